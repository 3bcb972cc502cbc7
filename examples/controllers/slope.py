"""Training losses alone: their slope in ln(multiplier), pooled over cycles with forgetting.

GREEDY: it asks which rate had the lower loss within a cycle. Near its noise floor a run says
"lower" even where the rate is right for all of it. Use it to leave a rate that is far off.
"""

from __future__ import annotations

import math

import hdet

FORGET, ENOUGH = 0.9, 3.0


class Slope(hdet.Controller):
    """ln(correction) moves by -step * tanh((|t| - dead) / 2), t being the pooled slope by its
    error. The error comes from what each cycle finds beyond what is pooled: replicas share their
    gradients, so their noise leaves no residual."""

    name = "slope"
    state_keys = ("sums",)

    def __init__(
        self, step: float = 0.3, dead: float = 2.0, freeze_after: float | None = None
    ) -> None:
        super().__init__(freeze_after)
        self.step, self.dead = step, dead
        self.sums: list[list[float]] = []
        """[knob]: sums of x x, of x y, of the weights' squares times x x, of the noise, of ones."""

    def start(self, run: hdet.Run) -> None:
        super().start(run)
        self.sums = self.sums or [[0.0] * 5 for _ in run.knobs]

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        present = [r for r, loss in enumerate(evidence.losses) if loss is not None]
        if len(present) < 2:
            return [hdet.Decision(note="fewer than two losses") for _ in evidence.knobs]
        losses = centred([loss for loss in evidence.losses if loss is not None])
        return [self._decide(k, present, losses, evidence) for k in range(len(evidence.knobs))]

    def _decide(
        self, k: int, present: list[int], losses: list[float], evidence: hdet.Evidence
    ) -> hdet.Decision:
        x = centred([math.log(evidence.multipliers[k][r]) for r in present])
        xx = math.fsum(a * a for a in x)
        xy = math.fsum(a * b for a, b in zip(x, losses, strict=True))
        a, b, c, noise, seen = self.sums[k]
        if a > 0 and xx > 0:
            beyond = xy - xx * b / a
            noise = FORGET * noise + beyond**2 / (xx + xx * xx * c / a**2)
            seen = FORGET * seen + 1
        a, b, c = FORGET * a + xx, FORGET * b + xy, FORGET**2 * c + xx
        self.sums[k] = [a, b, c, noise, seen]
        if seen < ENOUGH or noise == 0:
            return hdet.Decision()
        slope, error = b / a, math.sqrt(noise / seen * c) / a
        t = slope / error
        # Before the schedule's peak the value is low on purpose, and after it, too.
        near = evidence.scheduled[k] >= 0.95 * evidence.peak[k]
        move = self.step * math.tanh(max(abs(t) - self.dead, 0.0) / 2) if near else 0.0
        factor = math.exp(math.copysign(move, -t))
        return hdet.Decision(factor=factor, slope=slope, error=error, t=t)


def centred(values: list[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]
