"""Where training breaks, and what rate follows from it: one sweep through the rates, a doubling at a time, from far below.

At the beginning of a run the rate doubles every few steps, and the training losses of each doubling are averaged. Two rates show: the one
from which on more rate does not help, and the one at which what was learned is lost again. Their relation to the best mean rate of a run was
the same for a transformer, a convolutional net without normalisation and a recommender, whatever the schedule (docs/evidence.md). Both are
large effects over many steps and not slopes, so noise hardly moves them, and they do not have the greedy bias of short looks ahead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Doubling", "Outcome", "clear_rise", "outcome"]

LOST = 0.5
"""The part of what was gained that is lost again where training breaks."""
GAINED = 0.85
"""The part of the gain from which on more rate does not help."""
PROGRESS = 0.05
"""A further part of the gain that counts as progress."""
STALLED, PLAIN = 5.0, 2.5
"""Doublings without progress after which neither progress nor a break is expected; and how many one counts for whose error is below `PROGRESS`."""
CLEAR = 4.0
"""Standard errors of a doubling's mean by which more is lost than there was. (Where a few examples make both, see `clear_rise`.)"""
LEARNED, PAIRED = 8.0, 5.0
"""Something was learned: the gain in standard errors of the untrained model's loss; or the paired t, where examples differ more than that."""
NOISE = 2.0
"""Standard errors by which more than `LOST` is lost in one of the doublings, or nothing has broken yet."""
BREAK_OVER_MEAN = 15.0
"""The rate at which training breaks over the best mean rate of a run."""
SUFFICIENT_OVER_MEAN = 2.5
"""The same of the rate from which on more does not help, where nothing breaks."""
AMPLE = 1.5
"""The best mean rate is at most this multiple of the rate that is sufficient."""


class Doubling(NamedTuple):
    """What one doubling showed."""

    rate: float
    """geometric mean over its steps, in any unit"""
    loss: float
    """mean over its steps; infinite where one was not finite"""
    error: float
    """one standard error of it"""
    t: float = 0.0
    """of the paired difference between a batch's losses at its end and before the sweep"""


class Outcome(NamedTuple):
    """What the doublings so far say."""

    over: bool
    best: float | None
    """An estimate of the best mean rate of a run, in the doublings' unit; None: nothing was learned and nothing broke."""
    broke: bool
    learned: bool = True
    """Was anything, before it ended? If not, a break is no more than a bound: on a plateau, where gradients are small, plain SGD bears a hundred
    times the rate that it bears later."""


def clear_rise(level: float, error: float) -> float:
    """A rise above the untrained model's loss ``level`` (with its standard error) that counts whatever its own error is: to twice as much,
    and clear of ``error``. Where the losses of a few examples explode, the error is as high as the mean, and t stays about 1."""
    return abs(level) + LEARNED * error


def outcome(untrained: Doubling, doublings: Sequence[Doubling], rise: float = math.inf) -> Outcome:
    """Is the sweep over, and what follows from it? ``untrained``: of a batch, at rate 0; ``rise``: see `clear_rise`."""
    limit = untrained.loss + rise
    start = least = max(untrained.loss, doublings[0].loss if doublings[0].loss < limit else -math.inf)
    least_error, stalled, learned = untrained.error, 0.0, False
    broken: list[int] = []
    """The doublings since something was lost that have not won it back."""
    clear = False
    for i, (_, loss, error, t) in enumerate(doublings):
        gain = start - least
        ruined = not math.isfinite(loss) or loss > start + CLEAR * error
        if ruined or loss > limit or (learned and loss - least > LOST * gain):
            broken.append(i)
            clear = clear or ruined or loss > limit or loss - least > LOST * gain + NOISE * math.hypot(error, least_error)
            # One doubling in which much is lost may be noise, and so may be two in which it is just as much as counts; three are none.
            if (clear and len(broken) > 1) or len(broken) > 2 or (ruined and learned) or not math.isfinite(loss):
                return Outcome(True, _of_break(start, doublings, broken[0], least, learned), True, learned)
            continue
        broken, clear = [], False
        patience = PLAIN if error < PROGRESS * gain else 1.0
        stalled = 0.0 if loss < least - PROGRESS * gain else stalled + learned * patience
        if loss < least:
            least, least_error = loss, error
        learned = learned or start - least > LEARNED * untrained.error or (loss < start and t < -PAIRED)
        if stalled >= STALLED:
            return Outcome(True, _sufficient(start, doublings[: i + 1], least) / SUFFICIENT_OVER_MEAN, False)
    return Outcome(False, _sufficient(start, doublings, least) / SUFFICIENT_OVER_MEAN if learned else None, False, learned)


def _of_break(start: float, doublings: Sequence[Doubling], first: int, least: float, learned: bool) -> float:
    """The mean rate that follows from a break in the doubling ``first``; where exactly, say the losses of it and of the one before."""
    rate, loss = doublings[first][:2]
    if not learned:
        return rate / BREAK_OVER_MEAN
    before, below = doublings[first - 1][:2]
    at, above = least + LOST * (start - least), min(loss, start) if math.isfinite(loss) else start
    part = (at - below) / (above - below) if below < at < above else 1.0
    return min(before * (rate / before) ** part / BREAK_OVER_MEAN, AMPLE * _sufficient(start, doublings[:first], least))


def _sufficient(start: float, doublings: Sequence[Doubling], least: float) -> float:
    """The rate at which `GAINED` of the gain is reached, between doublings by the logarithm."""
    wanted = start - GAINED * (start - least)
    before, above = doublings[0].rate / 2, start
    for rate, loss, _, _ in doublings:
        if loss <= wanted:
            part = (above - wanted) / (above - loss) if above > loss else 1.0
            return before * (rate / before) ** part
        before, above = rate, loss
    return before
