"""Averages of the weights over time, which a step takes its new weights into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from ..core.validate import whole, within

MOST = 3
"""averages of one optimizer"""


@dataclass(frozen=True)
class WeightAverage:
    """An average of the weights over a run's steps, for the `ema=` of a fused optimizer.

    Update n, counted from 1, moves it to ``kept * average + (1 - kept) * weights``. The first one
    makes it the weights, as in torch.optim.swa_utils.AveragedModel, and so does every step up to
    `begin`.

    Args:
        decay: ``kept`` is min(decay, n / (n + 9)): the warm-up that diffusers and TensorFlow have,
            (k + 1) / (k + 10) with k = n - 1. None: a mean of all weights, in which update n counts
            as n ** `power`; ``kept`` is (1 - 1 / n) ** (power + 1).
        warm_up: False: ``kept`` is `decay` from the second update on, as AveragedModel has it.
        power: of `decay=None`. 0: all count alike (SWA, Izmailov et al. 2018). Two of 6.94 and
            16.97 are those of the post-hoc EMA (Karras et al. 2024, arXiv 2312.02696).
        every: steps between two updates.
        begin: steps before the average begins, counted from 0 again where a run begins again with
            its first weights (AutoLR); the first update follows `every` steps later.

    Raises ValueError for numbers out of range.

    The mean over the last 1 000 of 10 000 steps, each tenth of them::

        tail = hdet.WeightAverage(decay=None, every=10, begin=9000)
    """

    decay: float | None = 0.9999
    warm_up: bool = True
    power: float = 0.0
    every: int = 1
    begin: int = 0

    def __post_init__(self) -> None:
        if self.decay is None:
            within(self.power, "power of an average of weights", "[0, 1000]")
        else:
            within(self.decay, "decay of an average of weights", "[0, 1)")
            within(self.power, "power of an average of weights", "[0, 0]", "pass decay=None")
        for name, value, least in (("every", self.every, 1), ("begin", self.begin, 0)):
            name = f"{name} of an average of weights"
            within(whole(value, name, least, "steps"), name, f"[{least}, {1 << 24})")

    def numbers(self) -> tuple[float, ...]:
        """EmaSettings of csrc/core/hyper.h."""
        decay = -1.0 if self.decay is None else self.decay
        return decay, self.power, float(self.warm_up), float(self.every), float(self.begin)


Given = float | WeightAverage | Sequence[float | WeightAverage] | None
"""the argument `ema` of an optimizer; a number is the decay"""


def averages_of(ema: Given) -> tuple[WeightAverage, ...]:
    """Raises TypeError and ValueError as `WeightAverage`."""
    listed = [] if ema is None else list(ema) if isinstance(ema, Sequence) else [ema]
    if len(listed) > MOST:
        raise ValueError(f"ema has {len(listed)} averages, an optimizer keeps {MOST} at most")
    for one in listed:
        if not isinstance(one, (Real, WeightAverage)) or isinstance(one, bool):
            raise TypeError(
                f"ema={one!r} must be a decay such as 0.9999, an hdet.WeightAverage, or a tuple of "
                "these"
            )
    return tuple(one if isinstance(one, WeightAverage) else WeightAverage(one) for one in listed)
