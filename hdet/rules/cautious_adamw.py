from __future__ import annotations

from .adamw import adamw, spread
from .decorator import rule
from .trace import Scalar, Settings, Tensor, average, clip, mean_of, sign, where


def agreement(u: Tensor, g: Tensor) -> tuple[Tensor, Scalar]:
    """1 where direction and gradient have one sign, else 0; and by what it is divided: its mean,
    0.001 at least."""
    mask = clip(sign(u) * sign(g), 0, 1)
    mean = mean_of(mask)
    return mask, where(mean <= 1e-3, 1e-3, mean)


@rule("FusedCautiousAdamW", like=adamw, generic=True)
def cautious_adamw(h: Settings, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Cautious AdamW (Liang et al. 2024, arXiv 2411.16085, Algorithm 1): FusedAdamW without those
    elements of the direction that go up the gradient; the others are as much larger.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        m = beta1 * m + (1 - beta1) * g             exp_avg
        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        mask = 1 where m * g > 0, else 0
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) * mask / max(mean(mask), 0.001)
        p = p * (1 - r * weight_decay) - r * u

    The mean is of a whole parameter, and takes a pass over gradient and exp_avg before the step.
    Arguments, state and errors are those of FusedAdamW, and a state of either loads into the other.
    Refused: sharded DTensors, whose means are on several ranks.

    A run that FusedAdamW began:

    >>> model = torch.nn.Linear(8, 1)
    >>> before = hdet.FusedAdamW(model.parameters(), lr=1e-3)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> before.step()
    >>> optimizer = hdet.FusedCautiousAdamW(model.parameters(), lr=1e-3)
    >>> optimizer.load_state_dict(before.state_dict())
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"].item()
    2.0
    """
    mask, mean = agreement(average(m, g, h.beta1), g)
    _, m, v = adamw(h, g, p, m, v)
    return m * mask * (1 / mean) / spread(h, v) / (1 - h.beta1**h.step), m, v
