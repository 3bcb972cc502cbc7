"""What a schedule-free optimizer has beside a rule: two modes, and the weight of a step in the
average."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from hdet.kernels import StepOptions, StepPlan, StepSettings, numbers
from hdet.kernels.checks import check_apart
from hdet.kernels.interface import PLAIN, Column
from hdet.rules import Facts
from hdet.tensors import dtensor as shards

from .fused import FusedOptimizer
from .masters import MASTER_KEYS, kept_beside, kept_masters, state_sets
from .moment_storage import scale_key
from .step_plans import Hyper, Member, Part

COUNTED: dict[str, Any] = {
    "k": 0,
    "weight_sum": 0.0,
    "lr_max": -1.0,
    "scheduled_lr": 0.0,
}
"""what a group counts from step to step, by schedulefree's names"""


class ScheduleFree(FusedOptimizer):
    # the scaler leaves a step out by itself: one that a kernel skips would count in the average
    _step_supports_amp_scaling = False

    def _carried(self) -> dict[str, Any]:
        # the last two are read by schedulefree's own
        own = {"train_mode": True, "foreach": True, "inner_momentum": 0.0}
        return {**super()._carried(), **COUNTED, **own}

    def _complete(self, saved: dict[str, Any]) -> None:
        super()._complete(saved)
        for group in saved["param_groups"]:
            group["counted"] = group["k"]

    def _counted(self, values: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        # schedulefree counts in k alone: each parameter has taken the steps of its group since
        if "z" not in values:
            return values
        since = group.get("k", 0) - group.get("counted", 0)
        return {**values, "step": values.get("step", 0) + since}

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        if isinstance(group["lr"], Tensor) and not group["lr"].is_cpu:
            raise TypeError(
                f"lr of {name} is a tensor on {group['lr'].device}, and the average's weights are "
                "computed of it on the host: pass a number"
            )
        super()._check_group({**group, "average": 0.0}, name)
        if group.get("inner_momentum"):
            raise ValueError(
                f"inner_momentum={group['inner_momentum']} of {name} is not supported: use 0, or "
                "schedulefree's AdamWScheduleFree"
            )
        if not group["betas"][0] > 0:
            raise ValueError(f"beta1={group['betas'][0]} of {name} must be above 0: y would be z")
        for key in ("warmup_steps", "r", "weight_lr_power"):
            if key not in group:
                raise ValueError(f"{name} lacks {key}: it is not that of a {type(self).__name__}")
            if not 0 <= group[key] < math.inf:
                raise ValueError(f"{key}={group[key]} of {name} must be finite and not negative")

    def _next(self, group: dict[str, Any]) -> dict[str, Any]:
        """What the group keeps after another step."""
        t, warmup = group["k"] + 1, group["warmup_steps"]
        rate = float(group["lr"]) * (t / warmup if t < warmup else 1.0)
        most = max(rate, group["lr_max"])
        weight = t ** group["r"] * most ** group["weight_lr_power"]
        total = group["weight_sum"] + weight
        return {"k": t, "weight_sum": total, "lr_max": most, "scheduled_lr": rate}

    def _values(self, rule: Facts, group: dict[str, Any]) -> Hyper:
        after = self._next(group)
        total = after["weight_sum"]
        share = (total - group["weight_sum"]) / total if total else 0.0
        return super()._values(rule, {**group, "lr": after["scheduled_lr"], "average": share})

    def check_mode(self, what: str) -> None:
        super().check_mode(what)
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(f"this optimizer is in eval mode: call its train() before {what}")

    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See FusedOptimizer.step. Raises RuntimeError in eval mode."""
        self.check_mode("a step")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.write_hyperparameters()
        loss = super().step(closure)
        for group in self.param_groups:
            group.update(self._next(group))
        return loss

    def write_hyperparameters(self) -> NoReturn:
        raise RuntimeError(
            f"a CUDA graph cannot replay a step of {type(self).__name__}: each has another weight "
            "in the average, which is computed on the host"
        )

    def _parts(self, device: torch.device, members: list[Member]) -> list[Part]:
        if self.num_replicas == 1:
            return super()._parts(device, members)
        check_apart(
            (f"{kind} {m.number}", tensor)
            for m in members
            for kind, tensors in (
                ("parameter", m.sets),
                ("z of parameter", kept_beside(m.state, "z")),
            )
            for tensor in tensors
        )
        # The first replica moves what all share, the others move a copy of it: each has the bits of
        # an optimizer of its own.
        copies = [
            {key: torch.empty_like(kept) for key, kept in _shared(m).items()} for m in members
        ]
        pairs = list(zip(members, copies, strict=True))
        parts = [
            self._part(device, [_of_replica(m, k, own if k else {}) for m, own in pairs], k)
            for k in range(self.num_replicas)
        ]
        plan = _InTurn(
            [part.plan for part in parts],
            [kept for m in members for kept in _shared(m).values()],
            [copy for own in copies for copy in own.values()],
        )
        return [replace(parts[0], plan=plan)]

    def train(self) -> None:
        """The parameters become y, at which gradients are taken."""
        self._change(True)

    def eval(self) -> None:
        """The parameters become x, the average, which is what is measured and saved."""
        self._change(False)

    @torch.no_grad()
    def _change(self, train: bool) -> None:
        self._take_over()
        for group in self.param_groups:
            if bool(group["train_mode"]) == train:
                continue
            beta1 = float(group["betas"][0])
            weight = 1 - beta1 if train else 1 - 1 / beta1
            for param in group["params"]:
                state = shards.local_state(self.state.get(param, {}), param)
                sets, all_z = state_sets(state, shards.local(param)), kept_beside(state, "z")
                masters: Sequence[Tensor | None] = kept_masters(state) or [None] * len(sets)
                for own, master, z in zip(sets, masters, all_z, strict=False):
                    value = numbers.value_of(own, master)
                    numbers.store(value + weight * (z - value), own, master)
            group["train_mode"] = train
        self._refresh_watches()


class _InTurn:
    """Steps replicas one after the other, because each moves a z of its own, the first one last."""

    def __init__(
        self, plans: Sequence[StepPlan], shared: list[Tensor], copies: list[Tensor]
    ) -> None:
        """`plans`: of each replica, of which all but the first work on `copies` of `shared`."""
        self._plans, self._shared, self._copies = plans, shared, copies
        self.norm, self.skipped = plans[0].norm, plans[0].skipped
        self.gradient_norms = plans[0].gradient_norms
        self.upload = plans[0].upload  # never called: no graph has such a step

    def step(
        self, gradients: Column, settings: Sequence[StepSettings], options: StepOptions = PLAIN
    ) -> None:
        """See kernels.StepPlan.step."""
        early = replace(options, zero_gradients=False)
        for k, plan in reversed(list(enumerate(self._plans))):
            if k > 0:
                torch._foreach_copy_(self._copies, self._shared)
            own = [s._replace(multipliers=(s.multipliers[k],)) for s in settings]
            plan.step(gradients, own, options if k == 0 else early)


def _shared(member: Member) -> dict[str, Tensor]:
    """What the replicas of a parameter have in common."""
    keys = ("step", "exp_avg_sq", scale_key("exp_avg_sq"))
    return {key: member.state[key] for key in keys if key in member.state}


def _of_replica(member: Member, k: int, other: Mapping[str, Tensor]) -> Member:
    """As if there were no other replica, and with some `other` entries in its state."""
    state = {**member.state, **other, "z": kept_beside(member.state, "z")[k]}
    for key in MASTER_KEYS:
        if key in state:
            state[key] = kept_masters(member.state)[k]
    return member._replace(sets=[member.sets[k]], state=state)
