"""Plain data as one leaf of bytes; and `extra`, whose values may have a state of their own."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch


def pack(value: Any, name: str) -> bytes:
    """Plain data and tensors as bytes: one leaf, whatever its shape, so that another shape at loading time does not matter. Raises
    ValueError if it could not be read again with weights_only."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        unpack(file.getvalue())
    except Exception as error:  # torch and pickle raise half a dozen types here
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{name} holds what a checkpoint cannot give back ({reason}): keep tensors, numbers, strings, lists and dicts"
        ) from error
    return file.getvalue()


def unpack(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)


def _access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """How to take the value's state and give it back, if it has one: a Stateful, or a torch.Generator."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    take, give = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    return (take, give) if callable(take) and callable(give) else None


def _is_stateful(extra: Any) -> bool:
    return _access(extra) is not None and not isinstance(extra, torch.Generator)


def check_extra(extra: Any) -> None:
    """Raises TypeError for another kind of argument, and ValueError, naming the key, for a value that cannot be saved. The state of a
    Stateful is not taken here: a data loader may start its workers for it."""
    if extra is None or _is_stateful(extra):
        return
    if not isinstance(extra, dict):
        raise TypeError(f"extra must be a dict, or have state_dict and load_state_dict, got {type(extra).__name__}")
    for key, value in extra.items():
        if _access(value) is None:
            pack({key: value}, f"extra[{key!r}]")


def take(extra: Any) -> bytes:
    """The state of `extra`, packed. Raises ValueError, naming the key, for what cannot be given back."""
    if _is_stateful(extra):
        return pack(extra.state_dict(), "extra")
    found = {key: (value, _access(value)) for key, value in extra.items()}
    states = {key: value if access is None else access[0]() for key, (value, access) in found.items()}
    try:
        return pack(states, "extra")
    except ValueError:
        for key, state in states.items():
            pack({key: state}, f"extra[{key!r}]")
        raise


def check_fits(extra: Any, loaded: Any) -> None:
    """Raises ValueError where `give_back` had nothing for an object of ``extra``; nothing is changed."""
    if _is_stateful(extra):
        return
    if not isinstance(loaded, dict):
        raise ValueError(f"it was saved with an extra of its own state ({type(loaded).__name__}), not with a dict: make the RunState so")
    for key, value in extra.items():
        if _access(value) is not None and key not in loaded:
            raise ValueError(f"it has no extra[{key!r}]: make the RunState as the saved run did")


def give_back(extra: Any, loaded: Any) -> None:
    """The inverse of `take`: objects load their state, and plain values replace those that are there."""
    if _is_stateful(extra):
        extra.load_state_dict(loaded)
        return
    objects = {key: (value, access) for key, value in extra.items() if (access := _access(value)) is not None}
    for key, (_, (_, give)) in objects.items():
        give(loaded[key])
    extra.clear()
    extra.update({**loaded, **{key: value for key, (value, _) in objects.items()}})
