"""Checkpoints that never hold a mixture of replicas: whole or absent, and checked before use."""

from .errors import CheckpointError
from .export import export_safetensors
from .folder import latest
from .run_state import RunState
from .save_load import load, save

__all__ = ["CheckpointError", "RunState", "export_safetensors", "latest", "load", "save"]
