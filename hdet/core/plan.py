"""What a controller says: the plan of a cycle that begins, and at its end a decision for each
knob."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .evidence import KnobSpec
from .validate import finite

__all__ = ["Decision", "Plan"]


@dataclass(frozen=True)
class Plan:
    """One cycle. ``Plan()`` is the published method's."""

    spread: bool = True
    """Do replicas differ by their knobs' grids? If not, all train at base values."""
    measures: Sequence[str] = ()
    """Names of the controller's measurements that run in this cycle."""
    multipliers: Sequence[Sequence[float]] | None = None
    """[knob][replica]: what replicas try in the place of what is drawn for them; each above 0.
    Replicas are alike in a knob with spread 0: by it a run knows what they can differ in."""

    def check(
        self, knobs: Sequence[KnobSpec], replicas: int, measurements: Collection[str]
    ) -> None:
        """Raises ValueError for the plan of another run: its multipliers, or what it measures."""
        names = self.measures
        is_list = isinstance(names, Collection) and not isinstance(names, str)
        if not is_list or not all(name in measurements for name in names):
            raise ValueError(
                f"a plan's measures must be a list of names out of the controller's measurements, "
                f"{[*measurements]}, got {names!r}"
            )
        if self.multipliers is None:
            return
        table = self.multipliers
        is_table = isinstance(table, Sequence) and len(table) == len(knobs)
        is_table = is_table and all(isinstance(x, Sequence) and len(x) == replicas for x in table)
        if not is_table or not all(finite(rho) and rho > 0 for row in table for rho in row):
            raise ValueError(
                f"a plan's multipliers must be {len(knobs)} rows (one a knob) of {replicas} "
                f"positive numbers (one a replica), got {table!r}"
            )
        for knob, row in zip(knobs, table, strict=True):
            if not knob.grid.explores and len(set(row)) > 1:
                raise ValueError(
                    f"a plan's multipliers are {[*row]} for the knob {knob.name!r}, whose spread "
                    "is 0, by which replicas are alike in it: give it a spread"
                )


@dataclass(frozen=True)
class Decision:
    """The decision for one knob. ``factor`` multiplies its correction."""

    factor: float = 1.0
    value: float | None = None
    """A base value that holds from now on in the place of schedule times correction. Each decision
    says it again."""
    slope: float | None = None
    """d loss / d ln(multiplier): negative means that a higher value was better."""
    error: float | None = None
    """One standard error of ``slope``."""
    t: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for name, number in (("factor", self.factor), ("value", self.value)):
            if number is not None and not (finite(number) and number > 0):
                raise ValueError(
                    f"a decision's {name} must be a finite and positive int or float, got "
                    f"{number!r}"
                )
