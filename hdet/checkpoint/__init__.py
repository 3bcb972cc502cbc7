"""Checkpoints that never hold a mixture of replicas: whole or absent, and checked before use."""

from .export import export_safetensors
from .folder import latest
from .loading import load
from .run_state import RunState
from .saving import save
from .together import CheckpointError

__all__ = ["CheckpointError", "RunState", "export_safetensors", "latest", "load", "save"]
