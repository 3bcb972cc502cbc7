"""Values as JSON and tensors: what a checkpoint can hold of an optimizer, an Ensemble, an extra."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

_KINDS: dict[str, Any] = {
    "$tuple": tuple,
    "$set": set,
    "$size": torch.Size,
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": Counter,
}
"""what JSON lacks, written as {kind: [items]}; dicts are lists of pairs"""
_TAGS = {kind: tag for tag, kind in _KINDS.items()}


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Make JSON of a value; put its tensors into ``tensors``, under names that begin with ``name``.

    Raises:
        ValueError: the value, named by its place, is none that `decode` can give back.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        while name in tensors:  # {"a": {"b": t}} and {"a.b": t}
            name += "'"
        tensors[name] = value.detach()
        return {"$tensor": name}
    if kind is bytes:
        return {"$bytes": value.hex()}
    if kind is list:
        return [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str and key[:1] != "$" for key in value):
        return {key: encode(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if kind in _TAGS:
        items = [[*pair] for pair in value.items()] if isinstance(value, dict) else [*value]
        return {_TAGS[kind]: encode(items, name, tensors)}
    raise ValueError(
        f"{name} holds what a checkpoint cannot give back (a {kind.__name__}): "
        "keep tensors, numbers, strings, lists and dicts"
    )


def decode(value: Any, read_tensor: Callable[[str], Any]) -> Any:
    """The inverse of `encode`; ``read_tensor`` gives a tensor by its name."""
    if isinstance(value, list):
        return [decode(item, read_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag[:1] != "$":
        return {key: decode(item, read_tensor) for key, item in value.items()}
    if tag == "$tensor":
        return read_tensor(value[tag])
    if tag == "$bytes":
        return bytes.fromhex(value[tag])
    make, items = _KINDS[tag], decode(value[tag], read_tensor)
    return make(dict(items)) if issubclass(make, dict) else make(items)
