"""What the scores of a trial's arms say of the rate in force, and what follows from it. Pure: of one trial alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev

from .protocol import BROKEN, ORIGIN, arm
from .rises import Rises

__all__ = ["SCAN_RAISES", "WITHIN", "Arms", "Finding", "begun_anew", "between", "checked", "risen", "scanned", "taken_back"]

CLEAR = 3.0
"""Standard errors by which an arm has to be better than the rate in force."""
TO_RAISE, TO_LOWER = 0.0025, 0.004
"""Of what the run has learned so far: a gain that is smaller moves nothing. Short trials lean towards low rates, so less is asked of a higher one."""
AGREED = 2.0
"""Standard errors by which a lower arm has to have been better in training, too."""
MUCH = 0.2
"""Of the run's first loss: what an arm from the first weights has to have learned itself; and of that: by what it has to be ahead of the run. In a
plateau, or in the noise of a good high rate, an arm that stays where it began is better, too."""
PART = 0.5
"""Of the way to the arm that is better: if it is a little better, what is best in so few steps lies half-way, and shorter runs prefer higher rates."""
SCAN_RAISES = 3.0
"""Octaves by which a scan raises a rate that is far too low: the best rate of a few steps is up to five above that of the run."""
LITTLE = 0.25
"""The part of what the higher arm of a scan has learned, above which the rate in force is not far too low: a language model learns the letters'
frequencies in its first steps, at any high rate alike, and that says nothing about the run."""
MOST = {False: 0.5, True: 0.75}
"""Of the most that any arm of the scans has learned, by whether the rate was raised before: one that learns more in so few steps is best for so few, and thus too
high for a long run. A rate that is raised for the first time may have been right."""
FLAT = 0.0002
"""Of what has been learned: where neither arm of a check is better or worse by as much, all there is to learn so far has been learned, at any of these rates.
Then a rise is taken back: it can bring nothing more, and be too high for what comes, as in a curriculum."""
WITHIN = 2.0
"""Octaves around the rate in force, within which the best one is said to lie. The scores would say more, and be wrong: what is best in some
60 steps is up to three octaves below what is best for the run."""


@dataclass(frozen=True)
class Finding:
    """What follows from a trial."""

    factor: float
    """That the rates are multiplied by."""
    note: str
    snapshot: str | None = None
    """As which the run goes on; None: as itself."""
    again: bool = False
    """Is the round to be repeated, at the rate that is in force then?"""
    doubted: bool = False
    """Is the run to be held against its first weights at a lower rate, later?"""
    edge: float | None = None
    """Of a check: the rate of the best arm, if it was the highest or the lowest one; 0 if not. None: nothing is said of where the best peak lies."""


@dataclass(frozen=True)
class Arms:
    """How copies of the run have done after so many steps, at multiples 2^octave of the rate in force, or of one that it may be raised to."""

    scores: Mapping[float, Sequence[float]]
    """By octave: losses of the same batches for each."""
    steps: int
    first: float
    """The loss before the run's first step."""
    trained: Mapping[float, Sequence[float]] = field(default_factory=dict)
    """By octave: losses of the last batches that it has trained on, before it did; empty where a judge scores, whose losses are others."""

    def loss(self, octave: float) -> float:
        return mean(self.scores[octave])

    def gain(self, octave: float) -> float:
        """By how much it is better than the rate in force."""
        return self.loss(0.0) - self.loss(octave)

    def better(self, octave: float) -> bool:
        """Is it clearly better, batch by batch?"""
        gains = [same - loss for loss, same in zip(self.scores[octave], self.scores[0.0], strict=True)]
        return len(gains) > 1 and mean(gains) > max(0.0, CLEAR * stdev(gains) / math.sqrt(len(gains)))

    def far_better(self, octave: float) -> bool:
        """So much that one would see it without the same batches? Pretrained weights lose a little under any high rate, at first; long runs make up
        for it, and are the better for it."""
        scores = self.scores[octave]
        return self.better(octave) and self.gain(octave) > CLEAR * stdev(scores) / math.sqrt(len(scores))

    def agreed(self, octave: float) -> bool:
        """Was it better than the rate in force already on the last batches that both have trained on? Where data comes in blocks, as sorted by class
        or domain, who has learned less of one block looks better on the next, which has scored both; in training it does not."""
        if not self.trained:
            return True
        gains = [same - loss for loss, same in zip(self.trained[octave], self.trained[0.0], strict=True)]
        return max(self.trained[0.0]) >= BROKEN or mean(gains) > max(0.0, AGREED * stdev(gains) / math.sqrt(len(gains)))

    def learned(self, octave: float = 0.0) -> float:
        """How far it is below the run's first loss."""
        return self.first - self.loss(octave)

    def far_ahead(self, octave: float) -> bool:
        """Has it learned much, and much more than the rate in force? More than a fifth by what batches differ by, too."""
        learned, differ = self.learned(octave), stdev(self.scores[min(self.scores)])
        return learned > MUCH * abs(self.first) + CLEAR * differ and self.gain(octave) > MUCH * learned

    def far_behind(self, octave: float) -> bool:
        """Has the rate in force hardly learned anything, beside this one?"""
        return self.learned() < LITTLE * self.learned(octave)

    def leaves_behind(self, octave: float) -> bool:
        """Is it higher, clearly better, and so much that the rate in force has hardly learned anything?"""
        return octave > 0 and self.better(octave) and self.far_behind(octave)

    @property
    def flat(self) -> bool:
        return all(abs(self.gain(octave)) < FLAT * self.learned() for octave in self.scores)


def scanned(arms: Arms, rises: Rises, broke: bool) -> Finding:
    """From the run's beginning. ``broke``: are the run's own weights not finite? Otherwise a rate is not lowered so soon: some losses rise at first
    under any rate that is good later, as a vector quantizer's."""
    below, above = min(arms.scores), max(arms.scores)
    after = f"in {arms.steps} steps from the start"
    if max(arms.scores[below]) >= BROKEN:
        return Finding(
            4.0**below,
            f"even 2^{below:g} times the rate breaks in {arms.steps} steps, or a batch does: back to the start",
            ORIGIN,
            again=True,
        )
    if broke:
        return Finding(2.0**below, f"the run breaks {after}: it goes on as the arm at 2^{below:g} times the rate", arm(0), again=True)
    if arms.far_better(below) and arms.agreed(below):
        note = f"2^{below:g} times the rate is better {after}: kept for now, and held against the first weights before the check"
        return Finding(1.0, note, doubted=True)
    if arms.leaves_behind(above) and rises.allowed(scan=True, far_behind=True):
        return Finding(1.0, f"2^{above:g} times the rate is far ahead {after}: 2^{SCAN_RAISES:g} times it is tried", again=True)
    tried = ("neither " if above > 0 else "not even ") + " nor ".join(f"2^{octave:g}" for octave in arms.scores if octave)
    return Finding(1.0, f"{after} {tried} times the rate is far ahead: kept")


def risen(arms: Arms, rises: Rises, raised: bool, learned: float, most: float) -> Finding:
    """Another scan, of the rate that the one in force may be raised to. ``raised``: is that one a scan's? ``learned``: by it; ``most``: by any arm, in as many
    steps."""
    above, after = max(arms.scores), f"in {arms.steps} steps from the start"
    if not learned < arms.learned() <= MOST[raised] * max(most, arms.learned(above)):
        why = "no better" if arms.learned() <= learned else "the best for so few, and too high for more"
        return Finding(1.0, f"2^{SCAN_RAISES:g} times the rate is {why} {after}: kept")
    if not rises.allowed(scan=True, far_behind=True):
        return Finding(1.0, f"2^{SCAN_RAISES:g} times the rate is not safe here: kept")
    further = arms.leaves_behind(above)
    more = ", and higher ones are still far ahead" if further else ""
    return Finding(2.0**SCAN_RAISES, f"2^{SCAN_RAISES:g} times the rate is better {after}{more}: raised", again=further)


def begun_anew(arms: Arms) -> Finding:
    """Early in the run, beside arms from its first weights at lower rates. Whatever it says, a check may follow."""
    number, octave = min(enumerate(sorted(arms.scores)[:-1]), key=lambda arm: arms.loss(arm[1]))
    did = f"{arms.steps} steps from the first weights at 2^{octave:g} times the rate"
    if arms.better(octave) and arms.far_ahead(octave) and arms.agreed(octave):
        return Finding(2.0**octave, f"{did} come much further than the run has: it goes on as that arm", arm(number), again=True)
    return Finding(1.0, f"{did} come not much further than the run has: kept", again=True)


def checked(arms: Arms, rises: Rises, peak: float) -> Finding:
    """Early in the run. ``peak``: the one in force."""
    if min(map(arms.loss, arms.scores)) >= BROKEN:
        return Finding(1.0, "no arm has a finite score, not even at the rate in force: look at the closure, or at the judge's losses")
    octave = min(arms.scores, key=lambda octave: (arms.loss(octave), abs(octave)))
    other = next(one for one in arms.scores if one not in (0.0, octave))
    gain, but = arms.gain(octave), ""
    if not arms.better(octave):
        but = "not clearly"
    elif gain < (TO_RAISE if octave > 0 else TO_LOWER) * abs(arms.learned()):
        but = "too little"
    elif arms.gain(other) >= gain / 2:  # the run is about to break
        but = "as the other side was"
    elif octave < 0 and not arms.agreed(octave):
        but = "but not in training"
    elif octave < 0 and arms.learned(octave) <= 0:
        but = "but it has learned nothing"
    elif octave > 0 and not rises.allowed(scan=False, far_behind=arms.far_behind(octave)):
        but = "which is not safe here"
    factor = 1.0 if but else 2.0 ** (PART * octave)
    now, best = peak * factor, peak * 2.0**octave
    edge = best if octave else 0.0
    was = f"{best:.2g} was the best{f' ({but})' if but else ''}" if octave else "no other was better"
    what = f"now {now:.2g}" if factor != 1 else "kept"
    note = f"{between(now, edge)}: in {arms.steps} steps {was}, {peak:.2g} was in force, {what}"
    return Finding(factor, note, again=not but, edge=edge)


def taken_back(peak: float, correction: float, why: str) -> Finding:
    """A rise. ``peak``: the one in force, ``correction`` times the schedule's."""
    return Finding(1 / correction, f"{why}: back to the rate of before, {peak / correction:.2g}")


def between(now: float, edge: float) -> str:
    """Where the best peak lies, as far as a check says. Beyond an arm nothing was tried, so nothing is said."""
    low, high = now / 2.0**WITHIN, now * 2.0**WITHIN
    if not edge:
        return f"best peak {low:.2g} to {high:.2g}"
    if edge > now:
        return f"best peak {low:.2g} to {edge:.2g} or more (higher was not tried)"
    return f"best peak {edge:.2g} to {high:.2g} or less (lower was not tried)"
