"""Plain data as one leaf of bytes; and `extra`, whose values may have a state of their own."""

from __future__ import annotations

import io
from typing import Any

import torch

__all__ = ["check_extra", "check_fits", "give_back", "is_stateful", "pack", "take", "unpack"]


def pack(value: Any, name: str) -> bytes:
    """Plain data and tensors as bytes: one leaf, whatever its shape, so that another shape at loading time does not matter.

    Raises:
        ValueError: it could not be read again with weights_only.
    """
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


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def check_extra(extra: Any) -> None:
    """Raises TypeError for another kind of argument, and ValueError, naming the key, for a value that cannot be saved.

    What a Stateful holds is not asked for here: a data loader may start its workers for it.
    """
    if extra is None or is_stateful(extra):
        return
    if not isinstance(extra, dict):
        raise TypeError(f"extra must be a dict, or have state_dict and load_state_dict, got {type(extra).__name__}")
    for key, value in extra.items():
        if not _has_state(value):
            pack({key: value}, f"extra[{key!r}]")


def take(extra: Any) -> bytes:
    """The state of `extra`, packed. Raises ValueError, naming the key, for what cannot be given back."""
    if is_stateful(extra):
        return pack(extra.state_dict(), "extra")
    states = {key: _state_of(value) for key, value in extra.items()}
    try:
        return pack(states, "extra")
    except ValueError:
        for key, state in states.items():
            pack({key: state}, f"extra[{key!r}]")
        raise


def check_fits(extra: Any, loaded: Any) -> None:
    """Raises ValueError where `give_back` had nothing for an object of ``extra``; nothing is changed."""
    if is_stateful(extra):
        return
    if not isinstance(loaded, dict):
        raise ValueError(f"it was saved with an extra of its own state ({type(loaded).__name__}), not with a dict: make the RunState so")
    for key, value in extra.items():
        if _has_state(value) and key not in loaded:
            raise ValueError(f"it has no extra[{key!r}]: make the RunState as the saved run did")


def give_back(extra: Any, loaded: Any) -> None:
    """What `take` took: objects take their state over, and plain values replace those that are there."""
    if is_stateful(extra):
        extra.load_state_dict(loaded)
        return
    objects = {key: value for key, value in extra.items() if _has_state(value)}
    for key, value in objects.items():
        if isinstance(value, torch.Generator):
            value.set_state(loaded[key])
        else:
            value.load_state_dict(loaded[key])
    extra.clear()
    extra.update({**loaded, **objects})


def _has_state(value: Any) -> bool:
    return isinstance(value, torch.Generator) or is_stateful(value)


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if is_stateful(value) else value
