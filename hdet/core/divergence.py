"""Who has diverged, and whether a whole cycle is to be taken back. Pure: every rank decides alike
on equal inputs."""

from __future__ import annotations

import math
import statistics
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from .validate import whole, within

__all__ = ["Divergence", "Verdict", "judge"]

LARGEST = sys.float_info.max


@dataclass(frozen=True)
class Divergence:
    """When a replica, or a whole cycle, counts as diverged, and what is done about it.

    Args:
        peer_bound: a replica is left out of the average, and takes it, if its mean training loss
            over the cycle exceeds ``peer_bound`` times both the median of the others and that of
            the cycle before. For losses above 0, from the second cycle on; None: only losses and
            parameters that are not finite.
        rise_bound: a cycle has diverged as a whole if the median of the healthy replicas' losses
            exceeds ``rise_bound`` times that of the last cycle that has not. Only looked at with
            ``rollback``.
        rollback: "device" or "host" keeps the parameters and the optimizer's state there, from the
            beginnings of this cycle and of the one before, and a cycle that diverged as a whole (by
            ``rise_bound``, or with no finite loss or parameter left) is taken back: they are
            restored, from the third attempt in a row on those of the cycle before, and the learning
            rate's base value is multiplied by ``lower``. Memory: twice the parameters and the state
            (24 bytes a parameter for AdamW in fp32). None keeps nothing; without a finite parameter
            left the run ends.
        lower: factor of the base value after a rollback, in (0, 1).
        attempts: rollbacks in a row after which the run ends with an error.
    """

    peer_bound: float | None = 4.0
    rise_bound: float | None = 2.0
    rollback: str | None = None
    lower: float = 0.5
    attempts: int = 8

    def __post_init__(self) -> None:
        for name in ("peer_bound", "rise_bound"):
            if getattr(self, name) is not None:
                within(
                    getattr(self, name),
                    name,
                    "(1, inf)",
                    "it is a factor of a healthy loss; None switches the check off",
                )
        if self.rollback not in (None, "device", "host"):
            raise ValueError(
                "rollback must be None, 'device' or 'host' (where the snapshot is kept), got "
                f"{self.rollback!r}"
            )
        within(self.lower, "lower", "(0, 1)", "the base value is multiplied by it")
        whole(self.attempts, "attempts")


@dataclass(frozen=True)
class Verdict:
    """What is to be done at the end of a cycle."""

    healthy: list[int]
    """Replicas whose parameters enter the average; empty if there is none."""
    roll_back: bool
    level: float | None
    """Median loss of the healthy replicas: what the next cycle is compared with."""
    notes: list[str]


def judge(
    settings: Divergence,
    finite: Sequence[bool],
    losses: Sequence[float | None],
    before: float | None,
) -> Verdict:
    """``finite``: [replica] are all its parameters finite? ``losses``: [replica] mean training
    loss, NaN or infinite where it was, None where a replica has none. ``before``: `Verdict.level`
    of the last cycle that was not taken back."""
    reasons = _reasons(settings, finite, losses, before)
    healthy = [r for r in range(len(finite)) if r not in reasons]
    counted = [losses[r] for r in healthy] if reasons else losses
    known = [x for x in counted if x is not None]
    level = statistics.median(known) if known else None
    # A cycle in which everybody's loss was broken, but nobody's parameters (a scaler may have
    # skipped the steps), can be averaged.
    survivors = healthy or [r for r in range(len(finite)) if finite[r]]
    notes = [
        f"replica {r} left out of the average: {why}"
        for r, why in reasons.items()
        if r not in survivors
    ]
    risen = (
        level is not None
        and before is not None
        and settings.rise_bound is not None
        and level > settings.rise_bound * before > 0
    )
    if risen:
        notes.append(f"the median loss rose from {before:.4g} to {level:.4g}")
    return Verdict(
        survivors, settings.rollback is not None and (not healthy or risen), level, notes
    )


def _reasons(
    settings: Divergence,
    finite: Sequence[bool],
    losses: Sequence[float | None],
    before: float | None,
) -> dict[int, str]:
    """Why replicas have diverged, those that have."""
    bound = None if before is None else settings.peer_bound
    # No loss up to here has diverged, whatever the others' are; most are, and need no closer look.
    quiet = LARGEST if bound is None or before is None else min(bound * before, LARGEST)
    pairs = enumerate(zip(finite, losses, strict=True))
    watched = [
        r for r, (good, loss) in pairs if not (good and (loss is None or -LARGEST <= loss <= quiet))
    ]
    if not watched:
        return {}
    ranked = sorted(
        x
        for good, x in zip(finite, losses, strict=True)
        if good and x is not None and math.isfinite(x)
    )
    reasons = {}
    for r in watched:
        loss = losses[r]
        if not finite[r]:
            reasons[r] = "parameters not finite"
        elif loss is None or not math.isfinite(loss):
            reasons[r] = "loss not finite"
        elif len(ranked) > 1 and before is not None and bound is not None:
            healthy_level = max(_median_of_others(ranked, loss), before)
            if loss > bound * healthy_level > 0:
                reasons[r] = (
                    f"loss {loss:.4g} above {bound:g} times its peers' and the last cycle's, "
                    f"{healthy_level:.4g}"
                )
    return reasons


def _median_of_others(ranked: Sequence[float], own: float) -> float:
    """Of sorted losses without this one, which is among them; not sorted anew for each of N
    replicas."""
    place, middle = bisect_left(ranked, own), (len(ranked) - 1) // 2
    upper = ranked[middle + (middle >= place)]
    return (
        upper if len(ranked) % 2 == 0 else (ranked[middle - 1 + (middle - 1 >= place)] + upper) / 2
    )
