"""Cosines of gradient and displacement since the cycle began, on real tensors (the rule: core/rules/hypergradient_rule.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..core.validate import whole
from ..profiling import ranged
from ..tensors.dtensor import local_parts
from .measurement import Measurement, Watched

__all__ = ["GradientCosines"]


class GradientCosines(Measurement):
    """[replica][knob * samples + sample]: cosines, by knob, of the gradient g that the optimizer is about to use and the displacement
    d = weights - weights at the cycle's beginning; before ``samples`` of the steps in the second half of a cycle.

    Learning rates only; cycles have at least 4 steps. Costs one copy of the parameters, and ``samples`` passes over parameters and gradients
    per cycle. Sums over a replica's ranks are taken in the cycle statistics; a tensor that several ranks hold alike counts several times. A
    replica without gradients (made by a closure inside the step, or in a captured graph), or with ones that are not finite, has no vote.
    Loss scaling and clipping change no cosine.
    """

    _origin: list[list[torch.Tensor]]
    """[knob][parameter]: weights at the cycle's beginning"""

    def __init__(self, samples: int = 8) -> None:
        self.samples = whole(samples, "samples", 2, why="the slope's error comes from their scatter")
        self._hook: Any = None
        self._device = torch.device("cpu")
        self._indices: list[list[int]] = []
        self.reset()

    def watch(self, watched: Watched) -> None:
        """Raises ValueError for a knob that is no learning rate: displacements do not scale with it."""
        for knob in watched.knobs:
            if knob.key != "lr":
                raise ValueError(f"knob {knob.name!r} is no learning rate, and displacements scale with no other: use a ProbeController")
        self.release()
        self._indices = [list(knob.indices) for knob in watched.knobs]
        self._optimizer = watched.knobs[0].optimizer
        self._device = local_parts(watched.sets[0][:1])[0].device

    def on_cycle_start(self, settings: Any) -> None:
        """A hook before each step. (Replicas of one process share their gradient, so the first stands for all.)"""
        if self._hook is None:
            self._hook = self._optimizer.register_step_pre_hook(self._before_step)
        self._begin()

    def release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        self.reset()

    @torch.no_grad()
    def _begin(self) -> None:
        self._origin = [[p.clone() for p in local_parts(own)] for own in self._parameters()]
        self._step = 0  # nothing to see before `sample` is called

    def reset(self) -> None:
        self._step, self._length = 1, 0  # the step that comes next
        self._origin = []
        self._found: dict[int, torch.Tensor] = {}  # products, [knob][3], by the step they belong to

    restart = reset

    def sample(self, position: int, length: int, schedule_step: int) -> None:
        self._step, self._length = position + 1, length

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._step == 1:  # reset in the middle of a cycle
            self._begin()
        elif self._origin and self._step in self._positions() and not any(callable(x) for x in (*args, *kwargs.values())):
            self._found[self._step] = torch.stack(
                [_products(own, origin).to(self._device) for own, origin in zip(self._parameters(), self._origin, strict=True)]
            )

    def _parameters(self) -> list[list[torch.Tensor]]:
        """[knob][parameter]"""
        return [[p for i in own for p in self._optimizer.param_groups[i]["params"]] for own in self._indices]

    def _positions(self) -> list[int]:
        """The steps of the running cycle before which to look: spread over its second half, the last one included."""
        half = self._length // 2
        return sorted({self._length - i * half // self.samples for i in range(self.samples)} - {0, 1})

    @ranged("hdet.hypergradient")
    def measure(self, cycle: int, place: int = 0) -> torch.Tensor:
        """(3 * knobs * samples,) float64: the products by sample and knob; zeros where there were none."""
        none = torch.zeros(len(self._indices), 3, dtype=torch.float64, device=self._device)
        return torch.cat([none[:0], *(self._found.get(step, none) for step in self._positions())]).flatten()

    def split(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Added-up products -> cosines, [replica][knob * samples + sample]; 0 for a knob without a gradient, NaN for a replica without any."""
        knobs, split = len(self._indices), []
        for row in rows:
            cosines = [_cosine(*row[i : i + 3]) for i in range(0, len(row), 3)]
            blind = not any(row[1::3])
            split.append([math.nan if blind else x for k in range(knobs) for x in cosines[k::knobs]])
        return split


def _products(parameters: Sequence[torch.Tensor], origin: Sequence[torch.Tensor]) -> torch.Tensor:
    """(3,) float64: <g, d>, <g, g>, <d, d> over the parameters that have a gradient, of the shards on this rank."""
    seen = [(p, a) for p, a in zip(parameters, origin, strict=True) if p.grad is not None]
    total = torch.zeros(3, dtype=torch.float64, device=origin[0].device if origin else None)
    for (p, a), g in zip(seen, local_parts([p.grad for p, _ in seen if p.grad is not None]), strict=True):
        d, g = (local_parts([p])[0].float() - a.float()).flatten(), g.float().flatten()
        total += torch.stack([g @ d, g @ g, d @ d]).double().to(total.device)
    return total


def _cosine(inner: float, gradient: float, displacement: float) -> float:
    """Of the sums of products. 0 without a gradient or a displacement; NaN where one is not finite."""
    norm = math.sqrt(gradient * displacement) if gradient * displacement >= 0 else math.nan
    return inner / norm if norm else 0.0
