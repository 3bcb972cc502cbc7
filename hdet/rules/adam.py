from __future__ import annotations

from .adamw import adamw
from .decorator import rule
from .trace import Settings, Tensor, add_weighted


@rule("FusedAdam", like=adamw, takes="Adam", weight_decay=0.0)
def adam(h: Settings, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Adam (Kingma and Ba 2015) as torch.optim.Adam computes it: same arguments, results and state.

    As FusedAdamW, but decay is part of the gradient, g + weight_decay * p, and so of the moments.
    Replicas that share moments (`set_replicas`) therefore need weight_decay 0.
    decoupled_weight_decay=True is refused: that is FusedAdamW.

    Raises ValueError or TypeError as FusedAdamW.

    With a gradient scaler, whose scale is too large for the first step:

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = hdet.FusedAdam(model.parameters(), lr=1e-3)
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     scaler.scale(model(torch.ones(4, 8)).square().mean() + 8 * model.bias.sum()).backward()
    ...     _ = scaler.step(optimizer)
    ...     print(optimizer.step_skipped.item())
    ...     scaler.update(1.0)
    1.0
    0.0
    >>> optimizer.state[model.bias]["step"].item()
    1.0
    """
    return adamw(h, add_weighted(g, h.weight_decay, p), p, m, v)
