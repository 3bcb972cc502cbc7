"""Values as JSON and tensors: what a checkpoint can hold of an optimizer, an Ensemble, an extra."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..tensors.dtensor import local

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
DEEPEST = 100
"""Lists in lists: JSON's reader ends at some hundreds."""


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int = DEEPEST) -> Any:
    """Make JSON of a value; put its tensors into ``tensors``, under names that begin with ``name``.

    Raises:
        ValueError: the value, named by its place, is none that `decode` can give back.
    """
    kind = type(value)
    if not depth:
        raise ValueError(f"{name[:99]!r} ... is nested more than {DEEPEST} deep: flatten it")
    if kind is int and value.bit_length() > 64:  # JSON's numbers end at some thousand digits
        return {"$int": hex(value)}
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and _is_dense(value):
        while name in tensors:  # {"a": {"b": t}} and {"a.b": t}
            name += "'"
        tensors[name] = value.detach()
        return {"$tensor": name}
    if kind is bytes:
        return {"$bytes": value.hex()}
    if kind is list:
        return [encode(x, f"{name}.{i}", tensors, depth - 1) for i, x in enumerate(value)]
    if kind is dict and all(type(key) is str for key in value):
        pairs = [(key, encode(x, f"{name}.{key}", tensors, depth - 1)) for key, x in value.items()]
        return {f"${key}" if key[:1] == "$" else key: item for key, item in pairs}
    if kind in _TAGS:
        items = [[*pair] for pair in value.items()] if isinstance(value, dict) else [*value]
        return {_TAGS[kind]: encode(items, name, tensors, depth - 1)}
    called = kind.__name__
    if isinstance(value, torch.Tensor):
        called = f"{kind.__name__}: a {value.layout} tensor of {value.dtype} on {value.device}"
    raise ValueError(
        f"{name} holds what a checkpoint cannot give back (a {called}): keep dense tensors, "
        f"numbers, strings, lists and dicts{', such as its .tolist()' * hasattr(value, 'tolist')}"
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Neither sparse, nested, quantised, made of other tensors nor without data."""
    is_odd = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    is_odd |= is_traceable_wrapper_subclass(local(tensor))
    return tensor.layout == torch.strided and not is_odd


def decode(value: Any, read_tensor: Callable[[str], Any]) -> Any:
    """The inverse of `encode`; ``read_tensor`` gives a tensor by its name."""
    if isinstance(value, list):
        return [decode(item, read_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag[:1] != "$" or tag[:2] == "$$":
        return {k.removeprefix("$"): decode(item, read_tensor) for k, item in value.items()}
    if tag == "$tensor":
        return read_tensor(value[tag])
    if tag == "$int":
        return int(value[tag], 16)
    if tag == "$bytes":
        return bytes.fromhex(value[tag])
    make, items = _KINDS[tag], decode(value[tag], read_tensor)
    return make(dict(items)) if issubclass(make, dict) else make(items)
