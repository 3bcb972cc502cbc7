from __future__ import annotations

from .adamw import adamw, spread
from .decorator import rule
from .trace import Settings, Tensor, average


@rule("FusedNAdamW", like=adamw)
def nadamw(h: Settings, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """NAdamW as AlgoPerf's baselines have it (Choi et al. 2019, arXiv 1910.05446, Table 1):
    AdamW whose direction is averaged with the gradient once more.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        m = beta1 * m + (1 - beta1) * g             exp_avg
        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        u = (beta1 * m + (1 - beta1) * g) / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p * (1 - r * weight_decay) - r * u

    It is not torch.optim.NAdam, whose beta1 changes from step to step. Arguments, state and errors
    are those of FusedAdamW, and a state of either loads into the other.

    A run that FusedAdamW began:

    >>> model = torch.nn.Linear(8, 1)
    >>> before = hdet.FusedAdamW(model.parameters(), lr=1e-3)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> before.step()
    >>> optimizer = hdet.FusedNAdamW(model.parameters(), lr=1e-3)
    >>> optimizer.load_state_dict(before.state_dict())
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"].item()
    2.0
    """
    _, m, v = adamw(h, g, p, m, v)
    return average(m, g, h.beta1) / spread(h, v) / (1 - h.beta1**h.step), m, v
