"""ExactLocal: the mean is computed on each rank beside its replica, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch

from ..core.validate import refuse, whole
from ..optim.fused import FusedOptimizer
from ..optim.snapshot import attach_hook, is_schedule_free, keeps_emas
from ..rules import COUPLED
from ..tensors.dtensor import local_parts
from .base import Averager, Averaging, Task
from .health import digest


@dataclass(frozen=True)
class ExactLocal(Averaging):
    """Step the mean of all replicas beside each replica, and copy it at a cycle's end.

    Replicas that share gradients are at theta_r = D theta_0 - rho_r s, and sum rho_r = N: their
    uniform mean is D theta_0 - s, the trajectory of multiplier 1 (docs/method.md). It is computed
    from what all ranks have alike, so it is bitwise equal on all of them, and `Ensemble.mean` gives
    it at every step.

    Only for what the identity holds for: hdet's fused optimizers with shared gradients, decay 0 or
    decoupled at the base rate (``decay_at="base"``), 16-bit parameters with masters, no buffers.
    Weights that are not uniform make a cycle's average a plain one, with a note. Weights that
    somebody writes in the middle of a cycle are not in the mean: load them together with the
    optimizer's state, or call `Ensemble.converge` after.

    Costs a second set of parameters (and masters) in memory and 8 bytes more traffic for each fp32
    parameter and step.

    Args:
        check_every: after so many cycles, and in the first, a digest of the mean (two numbers a
            replica) is compared over all ranks; where it differs, that cycle's average is plain.
            Other cycles send nothing.

    Raises:
        ValueError: of `build`, an optimizer, settings or tensors for which the mean is no
            trajectory of its own.

    Example::

        sync = hdet.Sync(100, converge=hdet.converge.ExactLocal(10))
    """

    check_every: int = 10
    needs_rates_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole(self.check_every, "check_every", of="cycles")

    def make_averager(self, task: Task) -> Averager:
        reasons = chain(_why_no_build(task), _why_no_mean(task.optimizer))
        refuse(f"ExactLocal: {reason}; or use Plain()" for reason in reasons)
        return _ExactLocal(task, self.check_every)


def _why_no_build(task: Task) -> Iterator[str]:
    """What of the task does not go with it, and the way out."""
    optimizer: Any = task.optimizer
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strange = next((i for i, t in enumerate(task.tensors) if id(t) not in owned), None)
    if task.gradients != "shared":
        yield "replicas with gradients of their own have no common step: use gradients='shared'"
    if not isinstance(optimizer, FusedOptimizer):
        kind = type(optimizer).__name__
        yield f"{kind} does not step the mean: use a fused optimizer of hdet"
    if is_schedule_free(optimizer):
        yield "the mean of schedule-free replicas would need a z of its own: use FusedAdamW"
    if keeps_emas(optimizer):
        yield "the mean of averages over time (ema=) would need steps of its own: leave them out"
    if optimizer.num_replicas != 1:
        yield f"the optimizer steps {optimizer.num_replicas} replicas already: give it one"
    if strange is not None:
        yield f"tensor {strange} is not the optimizer's, so its mean is unknown: leave buffers out"


def _why_no_mean(optimizer: Any) -> Iterator[str]:
    """Why the replicas' mean is not the trajectory at the base rate, and the way out."""
    for g, group in enumerate(optimizer.param_groups):
        decay = float(group.get("weight_decay", 0.0))
        of_group = f"weight_decay={decay:g} of group {g}"
        if decay != 0 and optimizer.rule in COUPLED:
            yield f"{of_group} is part of the gradient, which replicas do not share: set it to 0"
        if decay != 0 and optimizer.cautious_decay:
            yield f"{of_group} acts where each replica's own sign says: use cautious_decay=False"
        if decay != 0 and optimizer.decay_at != "base":
            yield f"{of_group} acts at each replica's own rate: use decay_at='base'"
        if optimizer.master_weights is not None:
            continue
        for i, p in enumerate(group["params"]):
            if p.requires_grad and p.dtype != torch.float32:
                yield (
                    f"parameter {i} of group {g} is {p.dtype} without a master, so steps round "
                    "away: use master_weights='fp32' or 'split'"
                )


class _ExactLocal(Averager):
    companions: ClassVar[int] = 1

    def __init__(self, task: Task, check_every: int) -> None:
        super().__init__(task)
        optimizer: Any = task.optimizer
        self._optimizer, self._check_every = optimizer, check_every
        self._cycles = check_every
        """Since the last comparison. Ranks compare in the first, for they may have begun apart."""
        self._mean_is_model = True
        """Until a step: weights may still be loaded, initialised or broadcast."""
        optimizer.set_replicas(2, lambda p: [p, p.detach().clone()])
        self._hooks = [
            attach_hook(optimizer.register_step_pre_hook, self._update_mean),
            attach_hook(optimizer.register_step_post_hook, self._after_optimizer_step),
            attach_hook(optimizer.register_state_dict_pre_hook, self._update_mean),
            attach_hook(optimizer.register_load_state_dict_pre_hook, self._before_load),
            attach_hook(optimizer.register_load_state_dict_post_hook, self._after_load),
        ]

    def _update_mean(self, *_: Any) -> None:
        """Before a step, or before the state is read."""
        if self._mean_is_model:
            self._optimizer.average_replicas([1.0, 0.0])

    def _after_optimizer_step(self, *_: Any) -> None:
        self._mean_is_model = False

    def _before_load(self, _: Any, state: dict[str, Any]) -> None:
        """A state saved within a cycle has the mean; another one says that replicas were equal."""
        self._loads_mean = any("replica_params" in values for values in state["state"].values())

    def _after_load(self, _: Any) -> None:
        self._mean_is_model, self._cycles = not self._loads_mean, self._check_every

    def end_cycle(self, shares: Sequence[float]) -> list[str]:
        reason = self._why_plain(shares)
        if reason is None:
            self._optimizer.average_replicas([0.0, 1.0])
            self._mean_is_model = True
            return []
        self.complete(shares)
        return [f"averaged plainly: {reason}"]

    def _why_plain(self, shares: Sequence[float]) -> str | None:
        """Why the mean is not the average that this cycle wants. Communicates in some cycles."""
        self._cycles += 1
        if len(set(shares)) > 1:
            return "the replicas' weights are not uniform"
        if (changed := next(_why_no_mean(self._optimizer), None)) is not None:
            return changed
        if self._cycles < self._check_every:
            return None
        self._cycles = 0
        tensors = self.task.tensors
        masters = [m for m in self._optimizer.masters(tensors, 1) if m is not None]
        own = digest(local_parts([*self._optimizer.replica_parameters(1), *masters]))
        rows = self.task.replicas.sum_rows(own, purpose="the mean track").tolist()
        same = all(row == rows[0] for row in rows)
        return None if same else "the mean tracks of the replicas differ"

    def complete(self, shares: Sequence[float]) -> None:
        super().complete(shares)
        self._mean_is_model, self._cycles = True, 0

    def mean(self) -> list[torch.Tensor] | None:
        own = self.task.tensors
        if self._mean_is_model:
            return [p.detach() for p in own]
        means = self._optimizer.replica_parameters(1)
        return [(m if p.requires_grad else p).detach() for p, m in zip(own, means, strict=True)]

    def close(self) -> None:
        if self._hooks:
            super().close()
            self._optimizer.set_replicas(1, lambda p: [p])
            self._mean_is_model = True
