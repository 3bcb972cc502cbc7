from __future__ import annotations

from .decorator import rule
from .trace import Settings, Tensor, average, where


@rule(
    None,
    moments=("momentum_buffer",),
    kept_if="momentum",
    lr=1e-3,
    weight_decay=0.0,
    momentum=0.0,
)
def muon(h: Settings, g: Tensor, p: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """What FusedMuon does beside making directions orthogonal, with an average of gradients and
    Nesterov's look ahead. A step of zeros at rate 1 is what it makes orthogonal, negated; without
    momentum the parameter follows the direction that it is given."""
    m = average(m, g, h.momentum)
    return average(m, g, where(h.nesterov, h.momentum, 1)), m
