from __future__ import annotations

from .decorator import rule
from .trace import Settings, Tensor, add_weighted, choose, where


@rule(
    "FusedSGD",
    moments=("momentum_buffer",),
    takes="SGD",
    kept_if="momentum",
    lr=1e-3,
    momentum=0.0,
    dampening=0.0,
    weight_decay=0.0,
    nesterov=False,
)
def sgd(h: Settings, g: Tensor, p: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """SGD with momentum, dampening and Nesterov momentum as torch.optim.SGD computes it: same
    arguments and results.

    With gradient g and rate r = lr * multiplier (Eq. 2)::

        g = g + weight_decay * p
        b = momentum * b + (1 - dampening) * g      momentum_buffer; in its first step b = g
        p = p - r * (g + momentum * b if nesterov else b)

    The state has a `step` beside torch's `momentum_buffer`, which a group without momentum does not
    have. torch's states, which have no step, load: a buffer that is there counts as one step.
    Replicas that share the buffer (`set_replicas`) need weight_decay 0.

    Raises ValueError or TypeError as FusedAdamW; nesterov needs momentum > 0 and dampening 0.

    A run that torch.optim.SGD began:

    >>> model = torch.nn.Linear(8, 1)
    >>> before = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> optimizer = hdet.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> before.step()
    >>> optimizer.load_state_dict(before.state_dict())
    >>> optimizer.step()
    >>> round(optimizer.state[model.bias]["momentum_buffer"].item(), 4)  # 0.9 * 4 + 4
    7.6
    """
    g = add_weighted(g, h.weight_decay, p)
    share = where(h.step <= 1, 1, where(h.momentum, 1 - h.dampening, 1))
    m = add_weighted(share * g, h.momentum, m)
    return choose(h.nesterov, g + h.momentum * m, m), m
