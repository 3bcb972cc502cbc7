from __future__ import annotations

from .adamw import spread
from .decorator import rule
from .trace import Settings, Tensor, average, exp, log, where


@rule(
    "FusedAdEMAMix",
    moments=("exp_avg", "exp_avg_slow", "exp_avg_sq"),
    exact=("exp_avg_slow",),
    lr=1e-3,
    betas=(0.9, 0.999, 0.9999),
    alpha=5.0,
    t_alpha=0.0,
    t_beta3=0.0,
    eps=1e-8,
    weight_decay=1e-2,
)
def ademamix(
    h: Settings, g: Tensor, p: Tensor, m: Tensor, slow: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    """AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137, Algorithm 1): AdamW with a second
    average of gradients, over tens of thousands of steps.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        m = beta1 * m + (1 - beta1) * g             exp_avg
        s = beta3(t) * s + (1 - beta3(t)) * g       exp_avg_slow
        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        u = (m / (1 - beta1^t) + alpha(t) * s) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p * (1 - r * weight_decay) - r * u

    Args:
        betas: beta1, beta2 and beta3.
        alpha: the slow average's share of the direction.
        t_alpha: steps in which alpha(t) grows from 0, linearly; 0: none. The paper has the run's.
        t_beta3: steps in which beta3(t) grows from beta1, so that half-lives grow linearly,
            1 / ln beta3(t) = (1 - t / t_beta3) / ln beta1 + t / t_beta3 / ln beta3; 0: none. The
            paper has the run's.
        decay_at: as FusedAdamW.
        others: as FusedOptimizer. The slow average is float32 whatever `moment_dtype` is: a step
            changes it by less than half of what bfloat16 and codes can tell apart.

    Raises ValueError or TypeError as FusedAdamW. A state of FusedAdamW lacks exp_avg_slow, and is
    refused.

    A run of 1 000 steps, warmed up over all of them:

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = hdet.FusedAdEMAMix(model.parameters(), lr=1e-3, t_alpha=1000, t_beta3=1000)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model.bias])
    ['exp_avg', 'exp_avg_slow', 'exp_avg_sq', 'step']
    """
    first, last = log(h.beta1), log(h.beta3)
    warm = exp(first * last / (last + (first - last) * (h.step / h.t_beta3)))
    beta3 = where(h.step <= h.t_beta3, warm, h.beta3)
    alpha = h.alpha * where(h.step <= h.t_alpha, h.step / h.t_alpha, 1)
    m, slow = average(m, g, h.beta1), average(slow, g, beta3)
    v = h.beta2 * v + (1 - h.beta2) * g * g
    return ((1 / (1 - h.beta1**h.step)) * m + alpha * slow) / spread(h, v), m, slow, v
