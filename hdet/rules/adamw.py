from __future__ import annotations

from .decorator import rule
from .trace import Settings, Tensor, average, root, sqrt


def spread(h: Settings, v: Tensor) -> Tensor:
    """Of the gradients around 0, with Adam's correction."""
    return root(v) * (1 / sqrt(1 - h.beta2**h.step)) + h.eps


@rule(
    "FusedAdamW",
    moments=("exp_avg", "exp_avg_sq"),
    takes="AdamW",
    lr=1e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=1e-2,
    amsgrad=False,
)
def adamw(h: Settings, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2) as torch.optim.AdamW computes it: same
    arguments, results and state.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        m = beta1 * m + (1 - beta1) * g             exp_avg
        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p * (1 - r * weight_decay) - r * u

    Args:
        decay_at: "replica": decay acts at r, the rate the replica steps with, as stock AdamW at
            that rate would. "base": at lr, so that all replicas decay alike and differ along u
            only.
        others: as torch.optim.AdamW and FusedOptimizer.

    Raises ValueError or TypeError, before anything is changed, for arguments out of range or NaN,
    amsgrad, differentiable, and in a step for tensors that cannot be used (sparse, with gaps, of
    another dtype, overlapping), by name.

    A bfloat16 model with exact float32 weights behind it, clipped gradients, and a schedule:

    >>> model = torch.nn.Linear(8, 1).bfloat16()
    >>> optimizer = hdet.FusedAdamW(
    ...     model.parameters(), lr=3e-4, master_weights="split", max_grad_norm=1.0
    ... )
    >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(4, 8, dtype=torch.bfloat16)).square().mean().backward()
    ...     optimizer.step()
    ...     scheduler.step()
    >>> sorted(optimizer.state[model.weight])
    ['exp_avg', 'exp_avg_sq', 'remainder', 'step']
    >>> optimizer.grad_norm.item() > 0, optimizer.step_skipped.item()
    (True, 0.0)
    """
    m = average(m, g, h.beta1)
    v = h.beta2 * v + (1 - h.beta2) * g * g
    return m / spread(h, v) / (1 - h.beta1**h.step), m, v
