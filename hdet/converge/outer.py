"""Outer: a cycle's mean displacement is the gradient of an outer step (DiLoCo)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.validate import within
from ..kernels.reference.rules import store
from ..kernels.spec import rounding
from ..optim.sgd import FusedSGD
from .base import Average, Task
from .bucketed_average import average
from .buckets import Buckets, Part, parts_of
from .health import digest
from .plain import Plain, PlainAverage

__all__ = ["Outer"]


@dataclass(frozen=True)
class Outer:
    """What the replicas have learned in a cycle moves the parameters by a step of SGD with momentum, instead of replacing them by the mean.

    With a the parameters at the cycle's beginning, w_r the weights of Eq. 3 and v the outer momentum, which begins at 0 (DiLoCo, Douillard
    et al. 2023, arXiv 2311.08105, Algorithm 1)::

        d = sum_r w_r (a - theta_r)
        v <- momentum * v + d
        theta_r <- a - rate * (d + momentum * v)        a - rate * v without ``nesterov``

    ``rate`` > 0: 1 with momentum 0 is `Plain`, to rounding. ``momentum``: in [0, 1).

    Only for gradients="local": replicas with shared gradients part by what their knobs do, which an outer step would enlarge. Buffers get
    their plain mean. Masters are stepped, and their 16-bit parameters written with them. `Ensemble.converge` in the middle of a cycle is the
    plain mean; the next outer step is over what follows, with the momentum that there is.

    Sends what `Plain` does, and a digest of 16 bytes for each replica. Extra memory beside its bucket: 4 bytes an element for a, 4 for v
    (float64: 8 and 8), and during an average 4 for a 16-bit parameter without a float32 master. hdet.checkpoint saves v; loading an
    optimizer's state without it begins at 0 again.

    Raises:
        ValueError: a rate or a momentum outside of its interval.
    """

    rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        within(self.rate, "rate", "(0, inf)")
        within(self.momentum, "momentum", "[0, 1)")

    def build(self, task: Task) -> Average:
        """Raises ValueError for shared gradients."""
        if task.gradients != "local":
            raise ValueError(
                "Outer needs gradients='local': replicas that share gradients have taken one step together, and there is nothing for an outer "
                "one to add; use Plain()"
            )
        return Plain().build(task) if task.replicas.count == 1 else _Outer(task, self)


class _Outer(PlainAverage):
    keeps_state = True

    def __init__(self, task: Task, way: Outer) -> None:
        super().__init__(task)
        self._task, self._way = task, way
        owned = {id(p) for group in task.optimizer.param_groups for p in group["params"]}
        self._count = sum(id(tensor) in owned for tensor in task.tensors)
        self._begins: list[torch.Tensor] = []
        """a of each parameter, or of its shard, in the wire's dtype; empty before the first cycle."""
        self._sgd: torch.optim.Optimizer | None = None
        """Steps them."""
        self._sent: list[Part] = []
        self._buckets = Buckets(lambda: self._sent, task.bucket_bytes, direct=True)

    def _parts(self) -> list[Part]:
        return parts_of(self._task.tensors, self._task.masters)

    def _forget(self) -> None:
        """Another state was loaded, or this is the end."""
        self.idle, self._begins, self._sgd = True, [], None

    def complete(self, weights: Sequence[float]) -> None:
        self._plain(weights)  # the momentum stays

    @torch.no_grad()
    def on_cycle_start(self) -> None:
        parts = self._parts()[: self._count]
        if len(self._begins) != len(parts):
            self._make(parts)
        for begin, part in zip(self._begins, parts, strict=True):
            begin.copy_(_value(part))

    def _make(self, parts: Sequence[Part]) -> None:
        way = self._way
        begins = self._begins = [torch.empty_like(part.tensor, dtype=part.wire) for part in parts]
        fused = all(part.wire == torch.float32 and part.tensor.is_contiguous() for part in parts)
        kind = FusedSGD if fused else torch.optim.SGD
        # What is sent is theta - a, which is -d.
        self._sgd = kind(begins, lr=way.rate, momentum=way.momentum, nesterov=way.nesterov and way.momentum > 0, maximize=True)
        for begin in begins if way.momentum else []:
            self._sgd.state[begin] = {"step": torch.ones((), device=begin.device), "momentum_buffer": torch.zeros_like(begin)}

    @torch.no_grad()
    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        if not self._begins:  # a state was loaded within the cycle, perhaps on this rank alone: the others compare
            self.on_cycle_start()
        if not self._have_begun_alike():
            self.complete(weights)
            self.keep([])
            return ["plain average instead of an outer step: replicas had not begun the cycle with the same parameters"]
        parts = self._parts()
        held = [_value(part) for part in parts[: self._count]]  # in their places, where they have the wire's dtype
        moved = [value if value.dtype == begin.dtype else value.to(begin.dtype) for value, begin in zip(held, self._begins, strict=True)]
        torch._foreach_sub_(moved, self._begins)
        self._sent = [*map(Part, moved), *parts[self._count :]]
        average(self._buckets, self._task.replicas, weights)
        self._sent = []
        assert self._sgd is not None
        for begin, displacement in zip(self._begins, moved, strict=True):
            begin.grad = displacement
        self._sgd.step()
        for begin, part in zip(self._begins, parts, strict=False):
            begin.grad = None
            store(begin, part.tensor, part.master)
        return []

    def _have_begun_alike(self) -> bool:
        """And with the same momentum: only then are they equal after the step. Who has loaded or disturbed one of them need not have told."""
        rows = self._task.replicas.sum_rows(digest([*self._begins, *self.kept()]).to(self._begins[0].device))
        return bool((rows == rows[0]).all())

    def kept(self) -> list[torch.Tensor]:
        if not self._begins:
            self.on_cycle_start()
        assert self._sgd is not None
        return [self._sgd.state[begin]["momentum_buffer"] for begin in self._begins if self._way.momentum]

    @torch.no_grad()
    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        kept = self.kept()
        for momentum, loaded in zip(kept, tensors or [torch.zeros(())] * len(kept), strict=False):
            momentum.copy_(loaded)


def _value(part: Part) -> torch.Tensor:
    return part.value if part.lower is None else rounding.join(part.tensor, part.lower)
