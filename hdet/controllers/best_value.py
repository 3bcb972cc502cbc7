"""The base value moves to the best of those that replicas have tried."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ..core.evidence import Evidence, Run
from ..core.plan import Decision, Plan
from ..core.schema import COUNT, FLAG, Check, list_of, number
from ..core.spread import assignment, check_spread
from ..core.validate import whole
from .near_peak import NearPeak

__all__ = ["BestValueController"]

Points = Sequence[tuple[float, float]]
"""[(multiplier, mean training loss of the replicas that had it)], in the order of multipliers."""


class BestValueController(NearPeak):
    """Moves the base value to the best of the values that replicas try, then to the better half of
    a small spread around it.

    First, where a knob has values, multipliers or a ratio: after ``cycles`` cycles its base value
    moves to the one with the lowest mean training loss. Replicas try another one in each cycle, so
    what their data do is averaged out. One with a loss that is missing or not finite never wins: it
    may have diverged. A replica that has a finite loss at none of several values is left out; if
    only it has tried a value, nothing moves.
    Then half of the replicas train a little above the base value and half below, as far as the
    knob's spread says or else ``spread``. It moves to that half if its loss was lower in each of
    ``cycles`` cycles: without an effect that happens in 2 of 2**cycles decisions. A replica without
    a finite loss is left out of its half in that cycle, which counts if others of it have one.

    Args:
        cycles: watched for a decision.
        spread: alpha in [0, 1) of what follows; 0: nothing does.
        freeze_after: see `Controller`.

    Cycles count while the schedule is near its peak (docs/choosing.md). A training loss says what a
    value does within a cycle: in short ones a low rate looks better than it is. Give replicas
    gradients of their own (``gradients="local"``): with shared ones they train at the mean of the
    values.

    Raises:
        ValueError: a setting out of its range.

    Example::

        ensemble = hdet.Ensemble(
            optimizer,
            knobs=[hdet.LearningRate(multipliers=[0.1, 0.5, 1, 5])],
            controller=hdet.BestValueController(),
            replicas=hdet.Replicas(0, 4, None),
        )
    """

    state_keys: Mapping[str, Check] = {
        **NearPeak.state_keys,
        "cycle": COUNT,
        "has_chosen": FLAG,
        "corrections": list_of(number(1e-100)),
        "window": list_of(list_of(list_of(number(-math.inf, math.inf)))),
    }

    def __init__(
        self, cycles: int = 4, spread: float = 0.1, *, freeze_after: float | None = None
    ) -> None:
        super().__init__(freeze_after)
        self.cycles, self.spread = whole(cycles, "cycles"), check_spread(spread)
        self.enough = cycles
        self.cycle = 0
        """The next one."""
        self.has_chosen = False
        """Is there nothing left to choose from but halves?"""
        self.corrections: list[float] = []
        """[knob]: while it was watched."""
        self.window: list[list[Sequence[float]]] = []
        """[cycle watched]: losses, infinite where one is missing, and the multipliers of each knob,
        by replica, as planned."""

    def check_state(self, state: Any) -> dict[str, Any]:
        values = super().check_state(state)
        rows = 1 + len(values["corrections"])
        if any(len(c) != rows or len({*map(len, c)}) > 1 for c in values["window"]):
            raise ValueError(
                f"the {type(self).__name__}'s window has rows of other lengths than the run has "
                "knobs and replicas: it is damaged"
            )
        return values

    def start(self, run: Run) -> None:
        super().start(run)
        self._names, self._replicas = [knob.name for knob in run.knobs], run.replicas
        self._seed = run.seed
        self._scales = [knob.scale for knob in run.knobs]
        grids = [knob.grid for knob in run.knobs]
        self._spreads = [grid.spread or self.spread * grid.explores for grid in grids]
        self._chooses = [grid.explores and not grid.spread for grid in grids]
        self.has_chosen = not any(self._chooses)

    @property
    def idle(self) -> bool:
        return super().idle or (self.has_chosen and not any(self._spreads))

    def report(self) -> str:
        if self.idle:
            return "rests: replicas train alike, and values stay where they are"
        tried = "better half of the replicas" if self.has_chosen else "best that replicas try"
        return f"a value moves to the {tried} in {self.cycles} cycles near the schedule's peak"

    def plan(self) -> Plan:
        if self.idle or not self.has_chosen:
            return super().plan()
        count = self._replicas
        half, rest = divmod(count, 2)
        signs = [-1] * half + [0] * rest + [1] * half
        return Plan(
            multipliers=[
                [
                    1 + spread * signs[place]
                    for place in assignment(self._seed, self.cycle, name, count)
                ]
                for name, spread in zip(self._names, self._spreads, strict=True)
            ]
        )

    def decide(self, evidence: Evidence) -> list[Decision]:
        nothing = [Decision()] * len(evidence.knobs)
        self.cycle = evidence.cycle + 1
        # The first cycle of a warm restart was planned far from the peak: replicas trained alike.
        differs = any(len(set(row)) > 1 for row in evidence.multipliers)
        counts = all(self.look(evidence)) and differs
        if self.corrections != list(evidence.corrections):  # also by a rollback or by hand
            self.window, self.corrections = [], list(evidence.corrections)
        if not counts or not self._can_compare(evidence):
            return nothing
        grids = [{*row} for row in evidence.planned]
        if self.window and grids != [{*row} for row in self.window[-1][1:]]:
            self.window = []  # of another number of replicas
        losses = [math.inf if loss is None else loss for loss in evidence.losses]
        self.window.append([losses, *evidence.planned])
        if len(self.window) < self.cycles:
            return nothing
        found = [
            _better_half(_points(self.window, k, are_halves=True))
            if self.has_chosen
            else _best(_points(self.window, k, are_halves=False))
            if chooses
            else None
            for k, chooses in enumerate(self._chooses)
        ]
        is_lost = [not self.has_chosen and chooses for chooses in self._chooses]
        self.window, self.has_chosen = [], True
        return [
            Decision(note="stays: no value had finite losses in each cycle")
            if best is None and lost
            else self._decide(k, best, evidence)
            for k, (best, lost) in enumerate(zip(found, is_lost, strict=True))
        ]

    def _can_compare(self, evidence: Evidence) -> bool:
        """Is there a loss, and in both halves?"""
        known = [r for r, loss in enumerate(evidence.losses) if loss is not None]
        rows = evidence.planned if self.has_chosen else []
        return bool(known) and all({min(row), max(row)} <= {row[r] for r in known} for row in rows)

    def _decide(self, k: int, best: float | None, evidence: Evidence) -> Decision:
        if best is None:
            return Decision()
        scale, base = self._scales[k], evidence.values[k]
        value = scale.fanned(base, best)
        others = "than the other values" if best == 1 else f"than {base:.4g}"
        note = f"{value:.4g} was better {others} in {self.cycles} cycles"
        return Decision(factor=scale.factor_to(best), note=note)


def _points(window: Sequence[Sequence[Sequence[float]]], k: int, are_halves: bool) -> list[Points]:
    """[cycle] of knob k. Missing losses of halves do not count, nor do those of a broken replica,
    which has none at several values; it is NaN where nobody else has tried a value."""
    every = [list(zip(rows[0], rows[1 + k], strict=True)) for rows in window]
    broken = {
        replica
        for replica, pairs in enumerate(zip(*every, strict=False))
        if all(loss == math.inf for loss, _ in pairs) and len({rho for _, rho in pairs}) > 1
    }
    cycles: list[Points] = []
    for pairs in every:
        by_value: dict[float, list[float]] = {rho: [] for rho in sorted(rho for _, rho in pairs)}
        for replica, (loss, rho) in enumerate(pairs):
            if loss < math.inf or not (are_halves or replica in broken):
                by_value[rho].append(loss)
        cycles.append([(rho, fmean(of) if of else math.nan) for rho, of in by_value.items()])
    return cycles


def _best(cycles: Sequence[Points]) -> float | None:
    """The multiplier with the lowest loss over all cycles, of those that were tried in each."""
    totals = [sum(loss for _, loss in same) for same in zip(*cycles, strict=True)]
    if any(math.isnan(total) for total in totals):
        return None
    total, (best, _) = min(zip(totals, cycles[-1], strict=True))
    return best if math.isfinite(total) else None


def _better_half(cycles: Sequence[Points]) -> float | None:
    """The multiplier of the half that was better in each cycle."""
    for better, other in ((0, -1), (-1, 0)):
        if all(points[better][1] < points[other][1] for points in cycles):
            return cycles[0][better][0]
    return None
