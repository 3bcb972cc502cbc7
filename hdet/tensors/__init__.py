"""Tensors and modules as torch gives them: shards of a DTensor, buffers by name, orders in memory,
an evaluation that leaves no trace; and ranges for profilers."""
