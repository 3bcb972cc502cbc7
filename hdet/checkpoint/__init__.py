"""Checkpoints that never hold a mixture of replicas: whole or absent, and checked before use."""

from .errors import CheckpointError
from .export import export_safetensors
from .files import load, save
from .folder import latest
from .run_state import RunState

__all__ = ["CheckpointError", "RunState", "export_safetensors", "latest", "load", "save"]
