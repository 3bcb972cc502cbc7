from __future__ import annotations

from .cautious_adamw import agreement
from .decorator import rule
from .lion import lion
from .trace import Settings, Tensor


@rule("FusedCautiousLion", like=lion, generic=True)
def cautious_lion(h: Settings, g: Tensor, p: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """Cautious Lion (Liang et al. 2024, arXiv 2411.16085): FusedLion without those elements of the
    direction that go up the gradient; the others are as much larger.

    With gradient g and rate r = lr * multiplier (Eq. 2)::

        u = sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g             exp_avg
        mask = 1 where u * g > 0, else 0
        p = p * (1 - r * weight_decay) - r * u * mask / max(mean(mask), 0.001)

    Arguments, state and errors are those of FusedLion, and a state of either loads into the other.
    The mean is FusedCautiousAdamW's, and sharded DTensors are refused as there.

    >>> parameter = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = hdet.FusedCautiousLion([parameter], lr=0.25)
    >>> parameter.grad = torch.tensor([1.0, 0.0])
    >>> optimizer.step()
    >>> parameter.tolist()
    [0.5, 1.0]
    """
    u, m = lion(h, g, p, m)
    mask, mean = agreement(u, g)
    return u * mask * (1 / mean), m
