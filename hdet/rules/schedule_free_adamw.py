from __future__ import annotations

from .adamw import spread
from .decorator import rule
from .trace import Settings, Tensor, add_weighted, average


@rule(
    "FusedScheduleFreeAdamW",
    base="ScheduleFree",
    moments=("exp_avg_sq", "z"),
    exact=("z",),
    weights=("z",),
    computed=("average",),
    gives_parameter=True,
    lr=0.0025,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    warmup_steps=0,
    r=0.0,
    weight_lr_power=2.0,
)
def schedule_free_adamw(
    h: Settings, g: Tensor, p: Tensor, v: Tensor, z: Tensor
) -> tuple[Tensor, ...]:
    """Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682) as schedulefree's
    AdamWScheduleFree computes it: a constant rate, and an average of the weights in place of decay
    to 0.

    The parameters are y, where gradients are taken; `eval()` makes them x, the average, and
    `train()` makes them y again. With gradient g, step count t and rate r = lr * multiplier *
    min(1, t / warmup_steps)::

        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        d = g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * y
        c = w / (sum of all w until now),  w = t^r * (largest rate until now)^weight_lr_power
        y = (1 - c) * y + c * z + r * (beta1 * (1 - c) - 1) * d
        z = z - r * d

    Args:
        betas: beta1, of y = beta1 * x + (1 - beta1) * z, above 0; beta2.
        warmup_steps: in which the rate grows from 0.
        r, weight_lr_power: of the weights w.
        others: as FusedOptimizer. z is float32 whatever `moment_dtype` is; it begins as the
            parameter, or its master. A bfloat16 model needs `master_weights`, or each change of
            mode rounds it.

    An optimizer begins in train mode. t of the weights, their sum and the largest rate are numbers
    of a group, as schedulefree has them; each `step` counts for its own parameter. After a rate was
    lowered, later steps count as much in x as earlier ones.

    In an Ensemble z is averaged with the parameters. Multipliers move r, and not w, so that all
    replicas average alike and the mean of their x is that of the mean z. K replicas share
    exp_avg_sq, have a z each (`replica_z` in a state, K - 1 tensors), and are stepped one after
    the other: K times the traffic of one, and one more exp_avg_sq in memory.

    Raises ValueError or TypeError as FusedAdamW; RuntimeError for a step in eval mode, and where a
    CUDA graph is captured: c is computed on the host in each step. Refused: a rate in a tensor on a
    GPU, decay_at and cautious_decay.

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = hdet.FusedScheduleFreeAdamW(model.parameters(), lr=0.0025, warmup_steps=10)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(4, 8)).square().mean().backward()
    ...     optimizer.step()
    >>> optimizer.eval()  # before a measurement, and before the model is saved
    >>> optimizer.step()
    Traceback (most recent call last):
    RuntimeError: this optimizer is in eval mode: call its train() before a step
    """
    v = h.beta2 * v + (1 - h.beta2) * g * g
    d = add_weighted(g / spread(h, v), h.weight_decay, p)
    y = average(p, z, 1 - h.average) + h.rate * (h.beta1 * (1 - h.average) - 1) * d
    return y, v, z - h.rate * d
