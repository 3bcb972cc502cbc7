"""What the saved state of an `Engine` has to look like."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from .controller import Controller
from .schema import COUNT, POSITIVE, Instance, Kind, ListOf, Number, Optional, read

__all__ = ["LARGEST_CORRECTION", "STATE_VERSION", "check_identity", "read_values"]

STATE_VERSION = 3
LARGEST_CORRECTION = 1e6
"""A correction outside [1/this, this] is a runaway, not a tuning: it is held there and noted."""
LARGEST_SEED = 1 << 4096
"""of a saved run"""

_REMEDIES = {
    "version": "load it with the hdet that wrote it",
    "knobs": "construct it with the same knobs",
    "controller": "construct it with the same controller, or with controller=None, which keeps the "
    "corrections and searches no further",
}


def check_identity(state: Any, identity: Mapping[str, Any]) -> None:
    """Raises ValueError for a state of another version, of other knobs or of another controller. A
    run without a controller takes the state of any."""
    named: dict[str, Kind] = {
        "version": Number(),
        "knobs": ListOf(Instance(str)),
        "controller": Optional(Instance(str)),
    }
    saved = read(state, named, "ensemble's")
    for key, own in identity.items():
        if saved[key] != own and not (key == "controller" and own is None):
            raise ValueError(
                f"the ensemble's state was saved with {key} {reprlib.repr(saved[key])}, "
                f"this run has {own!r}: {_REMEDIES[key]}"
            )


def read_values(
    state: Any, counts: Iterable[str], controller: Controller | None, knobs: int
) -> dict[str, Any]:
    """The values in it. Raises ValueError for one that is damaged, or that this ``controller``
    cannot load; and for base values that no controller would move any more."""
    mapping = Instance(Mapping)
    fields: dict[str, Kind] = {
        **dict.fromkeys(counts, COUNT),
        "seed": Number(-LARGEST_SEED, LARGEST_SEED, whole=True),
        "level": Optional(Number(-sys.float_info.max, sys.float_info.max)),
        "corrections": ListOf(Number(LARGEST_CORRECTION**-2, LARGEST_CORRECTION), knobs),
        "bases": ListOf(Optional(POSITIVE), knobs),
        "controller_state": Optional(mapping) if controller is None else mapping,
    }
    values = read(state, fields, "ensemble's")
    if values["position"] > values["step"]:
        raise ValueError(
            f"the ensemble's state has step {values['step']}, but position "
            f"{values['position']}: it is damaged"
        )
    if controller is not None:
        controller.check_state(values["controller_state"], knobs)
    elif any(base is not None for base in values["bases"]):
        raise ValueError(
            f"the ensemble's state was saved with controller {reprlib.repr(state['controller'])}, "
            "whose values stand in the place of the schedule, and would stay where they are "
            "without it: construct it with the same controller, and freeze_after=1 to search no "
            "further"
        )
    return values
