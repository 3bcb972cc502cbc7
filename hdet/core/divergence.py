"""Who has diverged, and whether a whole cycle is to be rolled back. Pure: every rank decides alike
on equal inputs."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from .validate import whole, within

__all__ = ["Divergence", "Verdict", "judge"]


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
            ``rise_bound``, or with no finite loss or parameter left) is rolled back: they are
            restored, from the third attempt in a row on those of the cycle before, and the learning
            rate's base value is multiplied by ``lower``. Memory: twice the parameters and the state
            (24 bytes a parameter for AdamW in fp32). None keeps nothing; without a finite parameter
            left the run ends.
        lower: factor of the base value after a rollback, in (0, 1).
        attempts: rollbacks in a row after which the run ends with an error.

    Example::

        divergence = hdet.Divergence(rollback="host", lower=0.7)
        ensemble = hdet.Ensemble(optimizer, scheduler, divergence=divergence)
    """

    peer_bound: float | None = 4.0
    rise_bound: float | None = 2.0
    rollback: str | None = None
    lower: float = 0.5
    attempts: int = 8

    def __post_init__(self) -> None:
        for name, bound in (("peer_bound", self.peer_bound), ("rise_bound", self.rise_bound)):
            if bound is not None:
                why = "it is a factor of a healthy loss; None switches the check off"
                within(bound, name, "(1, inf)", why)
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
    roll_back: bool = False
    level: float | None = None
    """Median loss of the healthy replicas: what the next cycle is compared with."""
    notes: Sequence[str] = ()


def judge(
    settings: Divergence,
    finite: Sequence[bool],
    losses: Sequence[float | None],
    before: float | None,
) -> Verdict:
    """Who has diverged in a cycle, and whether it is rolled back.

    Args:
        finite: [replica] are all its parameters finite?
        losses: [replica] mean training loss, NaN or infinite where it was, None where a replica has
            none.
        before: `Verdict.level` of the last cycle that was not rolled back.
    """
    reasons = _reasons(settings, finite, losses, before)
    healthy = [r for r in range(len(finite)) if r not in reasons]
    known = [x for r in healthy if (x := losses[r]) is not None]
    level = statistics.median(known) if known else None
    # A cycle in which everybody's loss was broken, but nobody's parameters (a scaler may have
    # skipped the steps), can be averaged.
    averaged = healthy or [r for r, good in enumerate(finite) if good]
    left_out = [(r, why) for r, why in sorted(reasons.items()) if r not in averaged]
    notes = [f"replica {r} left out of the average: {why}" for r, why in left_out]
    has_diverged = not healthy
    bound = math.inf if settings.rise_bound is None else settings.rise_bound
    if level is not None and before is not None and level > bound * before > 0:
        notes.append(f"the median loss rose from {before:.4g} to {level:.4g}")
        has_diverged = True
    return Verdict(averaged, settings.rollback is not None and has_diverged, level, notes)


def _reasons(
    settings: Divergence,
    finite: Sequence[bool],
    losses: Sequence[float | None],
    before: float | None,
) -> dict[int, str]:
    """Why replicas have diverged, those that have."""
    reasons = {}
    for r, (good, loss) in enumerate(zip(finite, losses, strict=True)):
        if not good:
            reasons[r] = "parameters not finite"
        elif loss is not None and not math.isfinite(loss):
            reasons[r] = "loss not finite"
    bound = settings.peer_bound
    if bound is None or before is None:
        return reasons
    rest = [(r, x) for r, x in enumerate(losses) if x is not None and r not in reasons]
    ranked = sorted(loss for _, loss in rest)
    for r, loss in rest if len(rest) > 1 else []:
        if loss <= bound * before:
            continue  # whatever its peers' are; most need no closer look
        own = bisect_left(ranked, loss)
        usual = max(statistics.median(ranked[:own] + ranked[own + 1 :]), before)
        if loss > bound * usual > 0:
            reasons[r] = (
                f"loss {loss:.4g} above {bound:g} times its peers' and the last cycle's, "
                f"{usual:.4g}"
            )
    return reasons
