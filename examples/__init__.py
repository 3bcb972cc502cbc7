"""Training scripts, each to be read and copied from. They use public names of hdet only."""
