"""What needs a GPU.

Everything here, and every case of other folders that runs on "cuda", is marked gpu: `pytest -m
gpu`.
"""
