from __future__ import annotations

from .decorator import rule
from .trace import Settings, Tensor, average, sign


@rule(
    "FusedLion",
    moments=("exp_avg",),
    lr=1e-4,
    betas=(0.9, 0.99),
    weight_decay=0.0,
)
def lion(h: Settings, g: Tensor, p: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """Lion (Chen et al. 2023, Algorithm 2). One moment, and every element moves by the rate or not
    at all.

    With gradient g and rate r = lr * multiplier (Eq. 2)::

        u = sign(beta1 * m + (1 - beta1) * g)       sign(0) = sign(NaN) = 0
        m = beta2 * m + (1 - beta2) * g             exp_avg
        p = p * (1 - r * weight_decay) - r * u

    Args:
        lr: of the size of a step; a third to a tenth of AdamW's is usual, with a weight_decay
            larger by as much.
        betas: (of the direction, of the average).
        decay_at: as FusedAdamW.
        others: as FusedOptimizer.

    Raises ValueError or TypeError as FusedAdamW.

    Two replicas of one parameter, at half and at one and a half times the rate:

    >>> parameter = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = hdet.FusedLion([parameter], lr=0.25)
    >>> optimizer.set_replicas(2, lambda p: [p, p.detach().clone()])
    >>> optimizer.multipliers = [[0.5], [1.5]]
    >>> parameter.grad = torch.ones(1)
    >>> optimizer.step()
    >>> [optimizer.replica_parameters(k)[0].item() for k in range(2)]
    [0.875, 0.625]
    >>> optimizer.average_replicas([0.5, 0.5])
    >>> [optimizer.replica_parameters(k)[0].item() for k in range(2)]
    [0.75, 0.75]
    """
    return sign(average(m, g, h.beta1)), average(m, g, h.beta2)
