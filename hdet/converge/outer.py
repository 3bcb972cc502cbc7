"""Outer: a cycle's mean displacement is the gradient of an outer step (DiLoCo)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..core.validate import within
from ..kernels import numbers
from ..kernels.numbers import store
from ..optim import FusedSGD
from ..optim.snapshot import is_schedule_free
from .base import Averager, Averaging, Task
from .buckets import Buckets, Part
from .health import digest


@dataclass(frozen=True)
class Outer(Averaging):
    """Move the parameters by SGD with momentum along what the replicas have learned in a cycle.

    With a the parameters at the cycle's beginning, w_r the shares of Eq. 3 and v the outer
    momentum, which begins at 0 (DiLoCo, Douillard et al. 2023, arXiv 2311.08105, Algorithm 1)::

        d = sum_r w_r (a - theta_r)
        v <- momentum * v + d
        theta_r <- a - rate * (d + momentum * v)        a - rate * v without ``nesterov``

    Buffers get their plain mean. Masters are stepped, and their 16-bit parameters written with
    them. `Ensemble.converge` in the middle of a cycle is the plain mean of replicas that differ;
    the next outer step is over what follows, with the momentum that there is. Of one worker it does
    nothing. hdet.checkpoint saves v, and a where one worker is in the middle of a cycle; loading an
    optimizer's state without them begins again.

    One worker is enough (SNOO, arXiv 2510.15830): one replica, in one process or in shards
    (FSDP2), or replicas that share gradients and are equal, because no knob has a spread or there
    is a search without a controller. These act as one, to rounding.

    Several send what `Plain` does, and a digest of 16 bytes each. Extra memory beside the
    bucket: 4 bytes an element for a, 4 for v (float64: 8 and 8), and during an average 4 for a
    16-bit parameter without a float32 master.

    Args:
        rate: above 0. 1 with momentum 0 is `Plain`, to rounding.
        momentum: in [0, 1).

    Raises:
        ValueError: a rate or a momentum outside of its interval; of `build`, replicas that share
            gradients and differ by their knobs, which an outer step would enlarge; a
            schedule-free optimizer.

    Example::

        outer = hdet.converge.Outer(rate=0.7, momentum=0.9)
        sync = hdet.Sync(50, converge=outer, gradients="local", moments="keep")
    """

    moves_equal: ClassVar[bool] = True

    rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        within(self.rate, "rate", "(0, inf)")
        within(self.momentum, "momentum", "[0, 1)")

    def make_averager(self, task: Task) -> Averager:
        if task.replicas.count > 1 and task.gradients != "local" and task.can_explore:
            raise ValueError(
                "Outer needs gradients='local' where replicas differ by their knobs: with shared "
                "ones an outer step would enlarge what they differ by. Pass gradients='local' and "
                "a choice of moments, or let all act as one: knobs=[hdet.LearningRate(spread=0)]"
            )
        if is_schedule_free(task.optimizer):
            raise ValueError(
                "Outer would move the average of a schedule-free optimizer's weights away from "
                "them: use Plain(), or FusedAdamW"
            )
        return _Outer(task, self)


class _Outer(Averager):
    def __init__(self, task: Task, settings: Outer) -> None:
        super().__init__(task)
        self._forget_on_load()
        self._settings = settings
        owned = {id(p) for group in task.optimizer.param_groups for p in group["params"]}
        self._n_parameters = sum(id(tensor) in owned for tensor in task.tensors)
        self._origins: list[torch.Tensor] = []
        """a of each parameter, in the wire's dtype; empty before the first cycle."""
        self._is_under_way = self._is_loaded = False
        """Are they the beginning of the running cycle? Has a checkpoint brought them?"""
        self._sgd: torch.optim.Optimizer
        """Steps them."""
        self._sent = sent = list[Part]()  # always this list, so that buckets need not hold self
        self._buckets = Buckets(lambda: sent, task.bucket_bytes, in_place=True)

    def _forget(self, *_: Any) -> None:
        self._origins = []
        self._is_under_way = self._is_loaded = False

    def complete(self, shares: Sequence[float]) -> None:
        self._average_plainly(shares)  # the momentum stays
        self._is_under_way = self._is_loaded = False

    @torch.no_grad()
    def on_cycle_start(self) -> None:
        if not self._is_loaded:
            parts = self._parts()
            for origin, part in zip(self._made_origins(parts), parts, strict=True):
                origin.copy_(_exact_value(part))
        self._is_under_way, self._is_loaded = True, False

    def _parts(self) -> list[Part]:
        """Of the parameters."""
        return self.task.parts()[: self._n_parameters]

    def _made_origins(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """And what steps them, made if they are not there."""
        if self._origins:
            return self._origins
        s = self._settings
        self._origins = [torch.empty_like(part.tensor, dtype=part.wire) for part in parts]
        fused = all(p.wire == torch.float32 and p.tensor.is_contiguous() for p in parts)
        # What is sent is theta - a, which is -d: hence maximize.
        self._sgd = (FusedSGD if fused else torch.optim.SGD)(
            self._origins,
            lr=s.rate,
            momentum=s.momentum,
            nesterov=s.nesterov and s.momentum > 0,
            maximize=True,
        )
        for origin in self._origins if s.momentum else []:
            self._sgd.state[origin] = {
                "step": torch.ones((), device=origin.device),
                "momentum_buffer": torch.zeros_like(origin),
            }
        return self._origins

    @torch.no_grad()
    def end_cycle(self, shares: Sequence[float]) -> list[str]:
        if not self._is_under_way:  # a state was loaded in it, perhaps on this rank alone
            self.on_cycle_start()
        if not self._have_begun_alike():
            self.complete(shares)
            self.load_state([])
            note = "plain average instead of an outer step: replicas had not begun the cycle alike"
            return [note]
        parts = self.task.parts()
        displacements = self._average_displacements(parts, shares)
        for origin, displacement in zip(self._origins, displacements, strict=True):
            origin.grad = displacement
        self._sgd.step()
        for origin, part in zip(self._origins, parts, strict=False):
            origin.grad = None
            store(origin, part.tensor, part.master)
        self._is_under_way = False
        return []

    def _average_displacements(
        self, parts: Sequence[Part], shares: Sequence[float]
    ) -> list[torch.Tensor]:
        """The mean of theta - a of each parameter, in the parameters' own memory where they have
        the wire's dtype. Buffers become their mean."""
        values = [_exact_value(part) for part in parts[: self._n_parameters]]
        displacements = [v.to(a.dtype) for v, a in zip(values, self._origins, strict=True)]
        torch._foreach_sub_(displacements, self._origins)
        self._sent[:] = [*map(Part, displacements), *parts[self._n_parameters :]]
        self._buckets.average(self.task.replicas, shares)
        self._sent.clear()
        return displacements

    def _have_begun_alike(self) -> bool:
        """And with the same momentum? Only then are replicas equal after the step."""
        replicas = self.task.replicas
        if replicas.count == 1:
            return True
        own = digest([*self._origins, *self._momenta()]).to(self._origins[0].device)
        rows = replicas.sum_rows(own, purpose="the outer step")
        return bool((rows == rows[0]).all())

    def _momenta(self) -> list[torch.Tensor]:
        states = (self._sgd.state[origin] for origin in self._origins)
        return [state["momentum_buffer"] for state in states] if self._settings.momentum else []

    def state(self) -> list[torch.Tensor]:
        origins = self._made_origins(self._parts())
        if not self._is_under_way and not self._is_loaded:
            return self._momenta()
        return [*(self._momenta() or map(torch.zeros_like, origins)), *origins]

    @torch.no_grad()
    def load_state(self, tensors: Sequence[torch.Tensor]) -> None:
        origins = self._made_origins(self._parts())
        count = len(origins)
        momenta = tensors[:count] or [torch.zeros(())] * count
        for own, loaded in zip(self._momenta(), momenta, strict=False):
            own.copy_(loaded)
        for own, loaded in zip(origins, tensors[count:], strict=False):
            own.copy_(loaded)
        self._is_under_way, self._is_loaded = False, len(tensors) > count


def _exact_value(part: Part) -> torch.Tensor:
    """What the part stands for, in its place in memory unless two halves have to be joined."""
    return part.value if part.lower is None else numbers.join(part.tensor, part.lower)
