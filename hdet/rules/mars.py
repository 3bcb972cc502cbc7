from __future__ import annotations

from .adamw import adamw
from .decorator import rule
from .trace import Settings, Tensor, sqrt, sum_of, where


@rule(
    "FusedMARS",
    moments=("exp_avg", "exp_avg_sq", "last_grad"),
    generic=True,
    lr=3e-3,
    betas=(0.95, 0.99),
    eps=1e-8,
    weight_decay=0.0,
    gamma=0.025,
)
def mars(
    h: Settings, g: Tensor, p: Tensor, m: Tensor, v: Tensor, last: Tensor
) -> tuple[Tensor, ...]:
    """MARS-AdamW (Yuan et al. 2024, arXiv 2411.10438, Algorithm 2), with the gradient of the step
    before in the place of one of this batch at the weights before (the paper's MARS-approx).

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        c = g + gamma * beta1 / (1 - beta1) * (g - last_grad)
        c = c / max(1, norm(c))
        m = beta1 * m + (1 - beta1) * c             exp_avg
        v = beta2 * v + (1 - beta2) * c^2           exp_avg_sq
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p * (1 - r * weight_decay) - r * u

    The norm is of a whole parameter, and takes a pass over gradient and last_grad before the step.

    Args:
        gamma: how much of the difference of gradients counts.
        others: as FusedAdamW. The authors step vectors (biases, norms) with AdamW, at a rate of
            their own.

    Raises ValueError or TypeError as FusedAdamW. Refused: sharded DTensors, whose norms are on
    several ranks.

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = hdet.FusedMARS(model.parameters(), lr=3e-3, weight_decay=0.1)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model.bias])
    ['exp_avg', 'exp_avg_sq', 'last_grad', 'step']
    """
    c = g + h.gamma * (h.beta1 / (1 - h.beta1)) * (g - last)
    squares = sum_of(c * c)
    c = where(squares <= 1, 1, 1 / sqrt(squares)) * c
    return *adamw(h, c, p, m, v), g
