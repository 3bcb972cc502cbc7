"""A small GPT on the bytes of text files: `make demo`, and a model to copy a training loop from."""
