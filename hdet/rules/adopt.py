from __future__ import annotations

from .decorator import rule
from .trace import Settings, Tensor, average, choose, clip, root, sqrt, where


@rule(
    "FusedADOPT",
    moments=("exp_avg_normed", "exp_avg_sq"),
    first_step=2,
    generic=True,
    lr=1e-3,
    betas=(0.9, 0.9999),
    eps=1e-6,
    weight_decay=0.0,
)
def adopt(h: Settings, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """ADOPT (Taniguchi et al. 2024, arXiv 2411.02853, Algorithm 2, with the clipping of its second
    version): Adam that converges with any beta2, as each gradient is divided by the root of those
    before it.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2), from t = 2 on::

        c = clip(g / max(sqrt(v), eps), (t - 1)^0.25)
        m = beta1 * m + (1 - beta1) * c             exp_avg_normed
        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        p = p * (1 - r * weight_decay) - r * m

    The first step only sets v = g^2: the parameter does not change, nor does it decay.

    Args:
        others: as FusedAdamW, whose average is of gradients in their own unit, so that neither's
            state loads into the other.

    Raises ValueError or TypeError as FusedAdamW.

    >>> parameter = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = hdet.FusedADOPT([parameter], lr=0.5)
    >>> for _ in range(2):
    ...     parameter.grad = torch.ones(1)
    ...     optimizer.step()
    ...     print(round(parameter.item(), 4))
    1.0
    0.95
    """
    is_first, limit = h.step <= 1, sqrt(sqrt(h.step - 1))
    c = clip(choose(is_first, m, g) / clip(root(v), h.eps), 0 - limit, limit)
    m = average(m, c, where(is_first, 1, h.beta1))
    beta2 = where(is_first, 0, h.beta2)
    return m, m, beta2 * v + (1 - beta2) * g * g
