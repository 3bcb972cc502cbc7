from __future__ import annotations

from .decorator import rule
from .trace import Settings, Tensor, average, root, sqrt, where


@rule(
    "FusedAdan",
    moments=("exp_avg", "exp_avg_diff", "exp_avg_sq", "neg_pre_grad"),
    generic=True,
    lr=1e-3,
    betas=(0.98, 0.92, 0.99),
    eps=1e-8,
    weight_decay=0.0,
)
def adan(
    h: Settings, g: Tensor, p: Tensor, m: Tensor, d: Tensor, n: Tensor, before: Tensor
) -> tuple[Tensor, ...]:
    """Adan (Xie et al. 2022, arXiv 2208.06677, Algorithm 1), with decoupled decay as in AdamW: the
    authors' code with no_prox=True.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        e = g - (gradient of the step before); 0 in the first
        m = beta1 * m + (1 - beta1) * g                     exp_avg
        d = beta2 * d + (1 - beta2) * e                     exp_avg_diff
        n = beta3 * n + (1 - beta3) * (g + beta2 * e)^2     exp_avg_sq
        u = (m / (1 - beta1^t) + beta2 * d / (1 - beta2^t)) / (sqrt(n / (1 - beta3^t)) + eps)
        p = p * (1 - r * weight_decay) - r * u

    Args:
        betas: as in the authors' code; the paper writes 1 - beta.
        others: as FusedAdamW. Four moments; neg_pre_grad is the gradient before, negated, as the
            authors keep it.

    Raises ValueError or TypeError as FusedAdamW.

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = hdet.FusedAdan(model.parameters(), lr=1e-3)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.bias]["neg_pre_grad"].item()
    -4.0
    """
    e = where(h.step <= 1, 0, 1) * (g + before)
    m, d = average(m, g, h.beta1), average(d, e, h.beta2)
    look = g + h.beta2 * e
    n = h.beta3 * n + (1 - h.beta3) * look * look
    width = root(n) * (1 / sqrt(1 - h.beta3**h.step)) + h.eps
    u = (1 / (1 - h.beta1**h.step)) * m + (h.beta2 / (1 - h.beta2**h.step)) * d
    return u / width, m, d, n, -g
