"""Values as JSON and tensors: what a checkpoint can hold of an optimizer, an Ensemble, an extra."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

_LISTED: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "size": torch.Size,
    "dict": dict,
    "ordered": OrderedDict,
    "counter": Counter,
}
"""kinds that JSON lacks, written as {"$kind": [items]}; dicts are lists of pairs"""
_NAMES = {kind: name for name, kind in _LISTED.items()}


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Make JSON of a value; put its tensors into ``tensors``, under names that begin with ``name``.

    Raises:
        ValueError: the value, named by its place, is none that `decode` can give back.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        while name in tensors:  # {"a": {"b": t}} and {"a.b": t}
            name += "'"
        tensors[name] = value.detach()
        return {"$tensor": name}
    if type(value) is list:
        return [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    if type(value) is dict and all(type(key) is str and key[:1] != "$" for key in value):
        return {key: encode(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, dict) and type(value) in _NAMES:
        if any(isinstance(key, torch.Tensor) for key in value):
            raise ValueError(f"{name} has tensors as keys, which a checkpoint cannot give back")
        pairs = [
            [encode(key, f"a key of {name}", {}), encode(item, f"{name}.{key}", tensors)]
            for key, item in value.items()
        ]
        return {f"${_NAMES[type(value)]}": pairs}
    if type(value) in _NAMES:
        return {f"${_NAMES[type(value)]}": encode(list(value), name, tensors)}
    if type(value) is bytes:
        return {"$bytes": value.hex()}
    raise ValueError(
        f"{name} holds what a checkpoint cannot give back (a {type(value).__name__}): "
        "keep tensors, numbers, strings, lists and dicts"
    )


def decode(value: Any, read_tensor: Callable[[str], Any]) -> Any:
    """The inverse of `encode`; ``read_tensor`` gives a tensor by its name."""
    if isinstance(value, list):
        return [decode(item, read_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if kind[:1] != "$":
        return {key: decode(item, read_tensor) for key, item in value.items()}
    if kind == "$tensor":
        return read_tensor(value[kind])
    if kind == "$bytes":
        return bytes.fromhex(value[kind])
    items = decode(value[kind], read_tensor)
    make = _LISTED[kind[1:]]
    return make(dict(items)) if issubclass(make, dict) else make(items)


# -- `extra`, whose values may have a state of their own ------------------------------------------


def _state_methods(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """How to take the value's state and to give it back; None for plain data."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    take, give = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    return (take, give) if callable(take) and callable(give) else None


def check_extra(extra: Any) -> None:
    """Raise unless ``extra`` can be saved; a state is not asked for, which may start workers.

    Raises:
        TypeError: it is another kind of argument.
        ValueError: a plain value, named by its key, cannot be saved.
    """
    if extra is None or _state_methods(extra) is not None:
        return
    if not isinstance(extra, dict):
        raise TypeError(
            "extra must be a dict, or have state_dict and load_state_dict, got "
            f"{type(extra).__name__}"
        )
    for key, value in extra.items():
        if _state_methods(value) is None:
            encode(value, f"extra[{key!r}]", {})


def take_extra(extra: Any) -> Any:
    """The state of ``extra``: of a dict, each value's own state, or the value itself."""
    methods = _state_methods(extra)
    if methods is not None:
        return methods[0]()
    found = {key: (value, _state_methods(value)) for key, value in extra.items()}
    return {
        key: value if methods is None else methods[0]() for key, (value, methods) in found.items()
    }


def check_extra_fits(extra: Any, loaded: Any) -> None:
    """Raise ValueError where a loaded state has nothing for an object of ``extra``."""
    if _state_methods(extra) is not None:
        return
    if not isinstance(loaded, dict):
        raise ValueError(
            f"it was saved with an extra of its own state ({type(loaded).__name__}), not with a "
            "dict: make the RunState so"
        )
    for key, value in extra.items():
        if _state_methods(value) is not None and key not in loaded:
            raise ValueError(f"it has no extra[{key!r}]: make the RunState as the saved run did")


def give_extra(extra: Any, loaded: Any) -> None:
    """The inverse of `take_extra`: objects load their state, plain values are replaced."""
    methods = _state_methods(extra)
    if methods is not None:
        methods[1](loaded)
        return
    objects = {key: value for key, value in extra.items() if _state_methods(value) is not None}
    for key, value in objects.items():
        _state_methods(value)[1](loaded[key])  # type: ignore[index]
    extra.clear()
    extra.update({**loaded, **objects})
