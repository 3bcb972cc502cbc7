"""The command line, and the small training job behind `hdet train`. Torch is imported by what needs it, when it runs."""
