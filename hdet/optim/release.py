"""Gradient release: a parameter is stepped as soon as a backward pass has its gradient, which is
then dropped. So gradients need no memory at the same time."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.kernels import StepOptions
from hdet.tensors import dtensor as shards

from . import lists
from .masters import LAST_NORM
from .step_plans import Norms, Planned

FusedOptimizer = Any
"""of the module that imports this one"""


@dataclass
class _Alone:
    """What steps one parameter by itself."""

    number: int
    """among all parameters"""
    group: int
    planned: Planned | None = None


class GradientRelease:
    """Steps one optimizer's parameters in backward passes; its `step()` calls `end`."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._hooked: set[Tensor] = set()
        self._alone: dict[Tensor, _Alone] = {}
        """all parameters of the groups, from the first that is stepped on"""
        self._listed: list[Tensor | None] = []
        """the same, in turn; None ends a group"""
        self._stepped: dict[Tensor, _Alone] = {}
        """since the last `step()`"""
        self._scale: Tensor | None = None
        """what gradients of this step are divided by, so that the last norm is clipped"""
        self._max_norm: float | None = None
        """of this step, from its first gradient on"""
        self._written: list[Any] = []
        """what groups said then, and that"""
        self.norm: Tensor | None = None
        self.skipped: Tensor | None = None
        """of the last step, as a StepPlan's; was any parameter skipped?"""

    def attach(self, params: Iterable[Tensor]) -> None:
        """To those that are trained and have no hook yet; others are stepped by `step()`."""
        hook = weakly(self.take)
        for param in params:
            if param.requires_grad and param not in self._hooked:
                param.register_post_accumulate_grad_hook(hook)
                self._hooked.add(param)

    def forget(self) -> None:
        """No parameter has a plan."""
        self._alone.clear()

    @property
    def planned(self) -> list[Planned]:
        return [one.planned for one in self._alone.values() if one.planned is not None]

    @torch._disable_dynamo
    @torch.no_grad()
    def take(self, param: Tensor) -> None:
        """Steps a parameter along its gradient, which is dropped."""
        optimizer = self._optimizer()
        if optimizer is None or optimizer.keeps_gradients or param.grad is None:
            return
        optimizer.check_mode("loss.backward() with released gradients")
        if param in self._stepped:
            raise RuntimeError(
                "a second backward pass, or one after a pass that was interrupted, came before "
                "optimizer.step(), with released gradients: put all micro-batches but the last "
                "into `with optimizer.keep_gradients():`, and call step() after an interruption"
            )
        if not self._stepped:
            self._begin(optimizer)
        alone = self._alone.get(param) or self._find(optimizer, param)
        if alone is None:
            return
        # as if the groups had no other parameter
        sized = [
            (int(i == alone.group), optimizer._rule_of(group).kind(group))
            for i, group in enumerate(optimizer.param_groups)
        ]
        planned, state = alone.planned, optimizer.state[param]
        if (
            planned is None
            or planned.container[param] is not state
            or not planned.holds(planned.container, [param], sized)
        ):
            _check_processes(param)
            planned = optimizer._plan([param], sized, [0], {param: state}, alone.number)
        if planned.clip is not None and self._max_norm is not None:
            raise ValueError(
                "released gradients of DTensors, and of matrices of FusedMuon, cannot be clipped: "
                "their norm is taken of all of them; set max_grad_norm=None"
            )
        settings = optimizer._settings_of(planned)
        planned.watch.check()
        planned.step([param.grad], [], settings, partial(self._options, optimizer))
        alone.planned, self._stepped[param], param.grad = planned, alone, None

    def _find(self, optimizer: FusedOptimizer, param: Tensor) -> _Alone | None:
        """None: it is in no group any more."""
        groups = enumerate(optimizer.param_groups)
        placed = [(one, i) for i, group in groups for one in group["params"]]
        for number, (one, i) in enumerate(placed):
            self._alone.setdefault(one, _Alone(number, i))
        return self._alone.get(param)

    def _begin(self, optimizer: FusedOptimizer) -> None:
        """The first gradient of a step is there."""
        listed = [x for group in optimizer.param_groups for x in (*group["params"], None)]
        if not lists.same(listed, self._listed):
            self.forget()
            self._listed = listed
        max_norm, self._written = optimizer.max_grad_norm, _written(optimizer)
        self._max_norm, self._scale = max_norm, None
        if max_norm is not None and not math.isinf(max_norm):
            states = _states(optimizer)
            known = next((state[LAST_NORM] for state in states if LAST_NORM in state), None)
            if known is not None:  # torch's clip_grad_norm_
                self._scale = ((known + 1e-6) / max_norm).clamp(min=1.0)

    def _options(self, optimizer: FusedOptimizer, device: torch.device) -> StepOptions:
        if optimizer.zero_gradients:
            raise ValueError("zero_gradients=True keeps gradients that are released: set it False")
        scale = None if self._scale is None else self._scale.to(device)
        return StepOptions(grad_scale=scale, max_norm=self._max_norm or 0.0)

    def end(self, optimizer: FusedOptimizer) -> Norms | None:
        """All parameters have been stepped, those too whose gradient came in an earlier micro-batch
        alone. Returns where the norms are."""
        if getattr(optimizer, "found_inf", None) is not None:
            raise RuntimeError(
                "a GradScaler scales gradients that are released before it can unscale them: train "
                "in bfloat16 without one, or do not release gradients"
            )
        if self._stepped and self._written != _written(optimizer):
            raise RuntimeError(
                "a rate, another setting of a parameter group, or max_grad_norm was written after "
                "loss.backward(), in which parameters are stepped: gradients are released; write "
                "it before loss.backward(), or after optimizer.step()"
            )
        with_gradient = [param for param in optimizer._listed() if param.grad is not None]
        if not self._stepped.keys().isdisjoint(with_gradient):
            raise RuntimeError(
                "a parameter that was stepped in loss.backward() has a gradient again: "
                "DistributedDataParallel puts them back, also in one process; leave it out"
            )
        for param in with_gradient:
            self.take(param)
        if not self._stepped:
            raise RuntimeError(
                "optimizer.step() came without loss.backward() before it, in which parameters are "
                "stepped: gradients are released"
            )
        stepped, self._stepped = list(self._stepped.values()), {}
        plans = [one.planned.parts[0].plan for one in stepped if one.planned is not None]
        device = plans[0].skipped.device
        self.skipped = torch.stack([plan.skipped.to(device) for plan in plans]).amax()
        if self._max_norm is None:
            forget_norm(optimizer)
            return None
        self._norms = torch.stack([plan.norm.to(device) for plan in plans])
        if self._scale is not None:
            self._norms = self._norms * self._scale.to(device)
        self.norm = torch.linalg.vector_norm(self._norms)
        # one that is not finite says nothing of the next
        states = list(_states(optimizer))
        kept = [state.get(LAST_NORM) for state in states]
        known = next((x for x in kept if x is not None), torch.zeros_like(self.norm))
        last = torch.where(self.norm.isfinite(), self.norm, known.to(device))
        if all(x is known for x in kept):
            known.copy_(last)  # plans rely on the states' objects
        else:
            for state in states:
                state[LAST_NORM] = last
        return Norms(self, [one.number for one in stepped], [])

    def gradient_norms(self) -> Tensor:
        return self._norms


def forget_norm(optimizer: FusedOptimizer) -> None:
    """After a step that does not clip by it: a later one would clip by a norm of long ago."""
    for state in _states(optimizer):
        state.pop(LAST_NORM, None)


def _states(optimizer: FusedOptimizer) -> Iterator[dict[str, Any]]:
    """Of the parameters that have been stepped."""
    states = (optimizer.state.get(param) for param in optimizer._listed())
    return (state for state in states if state)


def _written(optimizer: FusedOptimizer) -> list[Any]:
    """Settings, by which a step is done; of a tensor what counts writes to it."""
    values = [optimizer._values(optimizer._rule_of(g), g) for g in optimizer.param_groups]
    marks = [[(id(x), x._version) if isinstance(x, Tensor) else x for x in row] for row in values]
    return [optimizer.max_grad_norm, *marks]


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that calls the method and does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        found = reference()
        return None if found is None else found(*args)

    return hook


def _check_processes(param: Tensor) -> None:
    alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    if not (alone or shards.is_sharded(param)):
        raise RuntimeError(
            "released gradients would not be those of all processes, which DDP averages after "
            "parameters are stepped: use fully_shard (FSDP2), whose gradients are reduced before"
        )
