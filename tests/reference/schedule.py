"""OneCycle and AdamW, written again in float64: what the whole method stands on."""

import math

from tests.reference.method import Vector


def one_cycle(
    step: int, total: int, peak: float, pct_start: float = 0.3, div: float = 25.0, final_div: float = 1e4, shape: str = "cos"
) -> float:
    """Rate used by optimizer step number `step` (from 0): up from peak/div to peak, then down to peak/(div*final_div) at step total-1."""
    turn, end = pct_start * total - 1, total - 1
    low, floor = peak / div, peak / (div * final_div)
    if step <= turn:
        return _between(low, peak, step / turn, shape)
    return _between(peak, floor, (step - turn) / (end - turn), shape)


def _between(start: float, end: float, share: float, shape: str) -> float:
    if shape == "cos":
        share = (1 - math.cos(math.pi * share)) / 2
    return start + (end - start) * share


class AdamW:
    """Moments and direction of AdamW for one vector; the step itself is Eq. 2. Decay multiplies by 1 - (its rate) * weight_decay."""

    def __init__(self, size: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.betas, self.eps, self.count = betas, eps, 0
        self.first, self.second = [0.0] * size, [0.0] * size

    def direction(self, gradient: Vector) -> Vector:
        """u(t) = m_hat / (sqrt(v_hat) + eps)."""
        (one, two), self.count = self.betas, self.count + 1
        self.first = [one * m + (1 - one) * g for m, g in zip(self.first, gradient, strict=True)]
        self.second = [two * v + (1 - two) * g * g for v, g in zip(self.second, gradient, strict=True)]
        one_hat, two_hat = 1 - one**self.count, 1 - two**self.count
        return [(m / one_hat) / (math.sqrt(v / two_hat) + self.eps) for m, v in zip(self.first, self.second, strict=True)]
