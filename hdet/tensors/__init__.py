"""Tensors and modules as torch gives them: shards of a DTensor, buffers by name, hooks, an
evaluation that leaves no trace."""
