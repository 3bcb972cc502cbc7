"""ExactLocal: the mean is computed on each rank beside its replica, and nothing is sent (docs/method.md: what shared gradients imply)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.validate import whole
from ..kernels.spec.interface import COUPLED
from ..optim.fused import FusedOptimizer
from ..tensors.dtensor import local_parts
from .base import Average, Task
from .health import digest
from .plain import PlainAverage


@dataclass(frozen=True)
class ExactLocal:
    """Each rank also steps the mean of all replicas, from the same gradient and moments at the base rate, and copies it at a cycle's end.

    Replicas that share gradients are at theta_r = D theta_0 - rho_r s, and sum rho_r = N: their uniform mean is D theta_0 - s, which is
    the trajectory of multiplier 1. It is computed from what all ranks have alike, so it is bitwise equal on all of them.

    ``check_every``: after so many cycles a digest of the mean (two numbers a replica) is compared over all ranks; where it differs, that
    cycle's average is taken plainly. The first cycle is always compared. Other cycles send nothing.

    Only for what the identity holds for: hdet's fused optimizers with shared gradients, decay 0 or decoupled at the base rate
    (``decay_at="base"``), 16-bit parameters with masters, no buffers. Weights that are not uniform (a replica is left out, or
    ``average="softmax"``) make a cycle's average a plain one, with a note.

    Costs a second set of parameters (and masters) in memory and 8 bytes more traffic for each fp32 parameter and step.
    `Ensemble.mean` gives the mean at every step. Weights that somebody writes in the middle of a cycle are not in it: load them together
    with the optimizer's state, or call `Ensemble.converge` after.
    """

    check_every: int = 10

    def __post_init__(self) -> None:
        whole(self.check_every, "check_every", of="cycles")

    def build(self, task: Task) -> Average:
        """Raises ValueError or TypeError for an optimizer, settings or tensors for which the mean is no trajectory of its own."""
        if task.gradients != "shared":
            raise ValueError(
                "ExactLocal needs gradients='shared': replicas with gradients of their own have no common direction; use Plain()"
            )
        optimizer: Any = task.optimizer
        if not isinstance(optimizer, FusedOptimizer):
            raise TypeError(
                f"ExactLocal needs one of hdet's fused optimizers, which step the mean with the replica; got {type(optimizer).__name__}: "
                "use hdet.FusedAdamW, FusedAdam, FusedSGD, FusedLion or FusedMuon, or Plain()"
            )
        if getattr(optimizer, "_hdet_fan_out", None) is not None:
            raise ValueError("this optimizer is already driven by an Ensemble: close() the other first")
        if optimizer.num_replicas != 1:
            raise ValueError(f"the optimizer steps {optimizer.num_replicas} replicas already: use Plain()")
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for i, tensor in enumerate(task.tensors):
            if id(tensor) not in owned:
                raise ValueError(
                    f"tensor {i} is not the optimizer's: ExactLocal cannot know the mean of buffers; leave them out or use Plain()"
                )
        reason = _refusal(optimizer)
        if reason is not None:
            raise ValueError(f"ExactLocal: {reason}; or use Plain()")
        return PlainAverage(task) if task.replicas.count == 1 else _ExactLocal(task, optimizer, self.check_every)


def _refusal(optimizer: FusedOptimizer) -> str | None:
    """Why the mean of the replicas is not the trajectory at the base rate, if it is not; with the way out."""
    for g, group in enumerate(optimizer.param_groups):
        decay = float(group.get("weight_decay", 0.0))
        if decay != 0 and optimizer.rule in COUPLED:
            return f"weight_decay={decay:g} of group {g} is part of the gradient, which replicas then do not share: set it to 0"
        if decay != 0 and optimizer.decay_at != "base":
            return f"weight_decay={decay:g} of group {g} acts at each replica's own rate: construct the optimizer with decay_at='base'"
        for i, p in enumerate(group["params"]):
            if p.requires_grad and p.dtype != torch.float32 and optimizer.master_weights is None:
                return (
                    f"parameter {i} of group {g} is {p.dtype} without a master, so steps round away: use master_weights='fp32' or 'split'"
                )
    return None


class _ExactLocal(PlainAverage):
    companions = 1

    def __init__(self, task: Task, optimizer: FusedOptimizer, check_every: int) -> None:
        super().__init__(task)
        self._optimizer, self._check_every = optimizer, check_every
        self._unchecked = True  # ranks may have begun with different parameters
        self._cycles = 0  # since the last check
        optimizer.set_replicas(2, lambda p: [p, p.detach().clone()])
        # Until a step the mean track is the model: weights may still be loaded, initialised or broadcast.
        self._follows = True
        self._hooks = [
            optimizer.register_step_pre_hook(self._finish_step),
            optimizer.register_step_post_hook(self._part),
            optimizer.register_state_dict_pre_hook(self._finish_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]

    def _finish_step(self, *_: Any) -> None:
        """Before a step, or before the state is read: the mean track takes the model's values, if it follows the model."""
        if self._follows:
            self._optimizer.average_replicas([1.0, 0.0])

    def _part(self, *_: Any) -> None:
        self._follows = False

    def _before_load(self, _: Any, state: dict[str, Any]) -> None:
        self._brings_mean = any("replica_params" in values for values in state["state"].values())

    def _loaded(self, _: Any) -> None:
        """A state saved in the course of a cycle has the mean with it; another one says that replicas were equal."""
        self._follows, self._unchecked = not self._brings_mean, True

    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        note = self._reason_against(weights)
        if note is None:
            self._optimizer.average_replicas([0.0, 1.0])
            self._follows = True
            return []
        self.complete(weights)
        return [f"averaged plainly: {note}"]

    def _reason_against(self, weights: Sequence[float]) -> str | None:
        """Why the mean track is not the average wanted in this cycle. Communicates in cycles that compare."""
        self._cycles += 1
        if len(set(weights)) > 1:
            return "the replicas' weights are not uniform"
        changed = _refusal(self._optimizer)
        if changed is not None:
            return changed
        if self._unchecked or self._cycles >= self._check_every:
            self._unchecked, self._cycles = False, 0
            masters = [m for m in self._optimizer.masters(self._task.tensors, 1) if m is not None]
            row = digest(local_parts([*self._optimizer.replica_parameters(1), *masters]))
            rows = self._task.replicas.sum_rows(row.to(local_parts(self._task.tensors[:1])[0].device)).tolist()
            if any(other != rows[0] for other in rows):
                return "the mean tracks of the replicas differ"
        return None

    def complete(self, weights: Sequence[float]) -> None:
        super().complete(weights)
        self._follows, self._unchecked, self._cycles = True, False, 0

    def mean(self) -> list[torch.Tensor] | None:
        own = self._task.tensors
        if self._follows:
            return [p.detach() for p in own]
        return [(mean if p.requires_grad else p).detach() for p, mean in zip(own, self._optimizer.replica_parameters(1), strict=True)]

    def close(self) -> None:
        if self._hooks:
            super().close()
            self._optimizer.set_replicas(1, lambda p: [p])
            self._follows = True
