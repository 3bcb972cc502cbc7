"""The command line. Torch is imported by what needs it, when it runs."""
