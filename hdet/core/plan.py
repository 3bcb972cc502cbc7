"""A run is a sequence of cycles: a controller plans each one and learns from it, the engine carries it out. All of it is plain data.

A `Plan` says how long a cycle is, which multiplier each replica has, what is measured, which snapshots are kept, and how it ends. What the
controller then learns is `Learned`. While it learns it may ask further `Question`s, which are answered from the tensors of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .validate import finite

__all__ = [
    "Adopt", "Average", "Decision", "Ending", "Keep", "Learned", "Moment", "Plan", "Question", "Restore", "SnapshotOf",
]  # fmt: skip


@dataclass(frozen=True)
class Average:
    """The replicas become their weighted mean (Eq. 3), as `Sync.converge` says."""


@dataclass(frozen=True)
class Keep:
    """Replicas go on as they are, each with its own parameters."""


@dataclass(frozen=True)
class Restore:
    """All replicas go back to a snapshot that the plan keeps."""

    snapshot: str


@dataclass(frozen=True)
class Adopt:
    """All replicas take the parameters of one: the weighted mean with weight 1 for it. The moments of local gradients become its own with
    ``moments="average"``; with "keep" those of the others begin anew, with "reset" all do."""

    replica: int


Ending = Average | Keep | Restore | Adopt


@dataclass(frozen=True)
class SnapshotOf:
    """Where a snapshot lives, "device" or "host". It holds all that is trained, to begin again from it: parameters, masters, the optimizer's
    state, and buffers of the model that a measurement runs (or that `Sync.buffers` is), as the cycle's first forward pass leaves them, which
    comes before its first step."""

    place: str = "device"


@dataclass(frozen=True)
class Plan:
    """One cycle. Every default is the Ensemble's own setting, so ``Plan()`` is the published method's cycle."""

    steps: int | None = None
    """Optimizer steps; None: the Ensemble's ``sync_interval``."""
    spread: bool = True
    """Do replicas differ by their knobs' spreads? If not, all train at base values."""
    multipliers: Sequence[Sequence[float]] | None = None
    """[knob][replica]: rho, each > 0, in the place of those that are drawn by the design. None: drawn."""
    measure: Mapping[str, Any] = field(default_factory=dict)
    """Names of the controller's measurements that run in this cycle, each with plain settings of its own (None: none)."""
    snapshots: Mapping[str, SnapshotOf] = field(default_factory=dict)
    """Those that are needed until this cycle's end. A name that the cycle before had not is taken at its first step; one that is missing is
    given up."""
    end: Ending = field(default_factory=Average)
    """What happens at the cycle's end, before the controller learns; `Learned.end` may follow."""
    judged: bool = True
    """May the Ensemble's `Divergence` leave a replica out, or take the cycle back? If not, whatever breaks is the controller's to take back, and
    a cycle that ends in an average has a loss only if all replicas have."""


@dataclass(frozen=True)
class Moment:
    """When a cycle begins."""

    cycle: int
    """Cycles closed before."""
    step: int
    """Optimizer steps done."""
    schedule_step: int
    """Steps of the schedule done; another number where a step was skipped, or the schedule steps several times for one."""
    done: int = 0
    """Optimizer steps of the cycle that are done, where it is planned anew in its middle (`Controller.restart`)."""


@dataclass(frozen=True)
class Question:
    """Asked of a measurement at a cycle's end. Every rank asks alike, and gets the same answer: plain numbers."""

    measurement: str
    """The name in `Plan.measure`."""


@dataclass(frozen=True)
class Decision:
    """The answer for one knob. ``factor`` multiplies its correction; ``value`` instead replaces schedule and correction."""

    factor: float = 1.0
    value: float | None = None
    """A base value that holds from now on, whatever the schedule does; each decision says it anew. None: schedule times correction."""
    slope: float | None = None
    """d loss / d ln(multiplier): negative means that a higher value was better."""
    error: float | None = None
    """One standard error of ``slope``."""
    t: float | None = None
    note: str = ""
    ramp: int = 0
    """Steps of the schedule over which a higher value comes into force, evenly by the logarithm; 0: at once. A lower one always does at once."""

    def __post_init__(self) -> None:
        for name in ("factor", "value"):
            number = getattr(self, name)
            if number is not None and not (finite(number) and number > 0):
                raise ValueError(f"a decision's {name} must be finite and positive, and an int or a float, got {number!r}")


@dataclass(frozen=True)
class Learned:
    """What a controller makes of a cycle: one `Decision` for each knob, and perhaps a further ending."""

    decisions: Sequence[Decision]
    end: Ending | None = None
    """After the plan's own: `Adopt` needs ``Plan(end=Keep())``, or there is nothing left to choose from."""
