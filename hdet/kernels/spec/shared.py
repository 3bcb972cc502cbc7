"""What is alike in every backend: the operations of pairs, and what would take replicas off their
line (csrc/core/rank_one.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...profiling import ranged
from . import arguments as checks
from .interface import COUPLED, DECOUPLED, Column, RankOneTensors, StepOptions, StepSettings
from .settings import check_shares

PAIRINGS = ("copy", "lerp", "swap")
"""in the order of csrc/core/plan.h: Pairing"""


class Pairing:
    """A PairPlan, for a backend that says how to do one operation: `_pair`."""

    def __init__(
        self,
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        source_lowers: Column | None,
        masters: Column | None,
    ) -> None:
        self.tensors = (
            sources,
            destinations,
            source_lowers,
            masters,
        )  # keeps alive what a plan's tables point to

    def copy(self, scale: float = 1.0) -> None:
        self._pair("copy", scale)

    def lerp(self, weight: float) -> None:
        if not 0 <= weight <= 1:
            raise ValueError(f"weight={weight} must be in [0, 1]; 1 copies")
        self._pair("lerp", weight)

    def swap(self) -> None:
        checks.check_swap(*self.tensors)
        self._pair("swap", 1.0)

    def _pair(self, pairing: str, scale: float) -> None:
        raise NotImplementedError


def check_rank_one_tensors(tensors: RankOneTensors) -> None:
    """Everything a plan relies on for as long as it is used."""
    step = tensors.as_step()
    if coded := step.coded():
        raise TypeError(
            f"moments of output {coded[0]} are codes of 8 bits, which replicas on one line do not "
            "have: use float32 or bfloat16"
        )
    checks.check_step_tensors(step)
    count = len(step.params[0])
    named = [
        (f"{name} {i}", t)
        for name, column in (("exp_avg", step.exp_avgs), ("exp_avg_sq", step.exp_avg_sqs))
        for i, t in enumerate(column or [])
        if t is not None
    ]
    named += [
        (f"output {i} of replica {k}", t)
        for k, outputs in enumerate(tensors.outputs)
        for i, t in enumerate(outputs)
    ]
    for name, column in (("base", tensors.bases), ("displacement", tensors.displacements)):
        if len(column) != count:
            raise ValueError(
                f"{name}s has {len(column)} entries, but there are {count} outputs in a replica"
            )
        for i, tensor in enumerate(column):
            checks.check_tensor(tensor, f"{name} {i}", step.params[0][0].device, (torch.float32,))
            checks.check_same_shape(tensor, step.params[0][i], f"{name} {i}", "the output")
            named.append((f"{name} {i}", tensor))
    for i, scale in enumerate(tensors.scales or []):
        checks.check_tensor(
            scale, f"scale {i}", step.params[0][0].device, (checks.wide_dtype(scale.device),)
        )
        named.append((f"scale {i}", scale))
    checks.check_apart(named)


def mean_rho(multipliers: Sequence[float], weights: Sequence[float]) -> float:
    """sum_k w_k rho_k, one term after the other: Python's sum() rounds in another way from 3.12
    on."""
    total = 0.0
    for weight, rho in zip(weights, multipliers, strict=True):
        total += weight * rho
    return total


class OnLine:
    """A RankOnePlan, for a backend whose step plan it comes before: that one's `step` and `upload`
    call `_take_settings`, and `_meet` does a converge.

    While the replicas are apart, no other multipliers can describe them.
    """

    def __init__(self, tensors: RankOneTensors, *memory: Any) -> None:
        super().__init__(tensors.as_step(), *memory)  # type: ignore[call-arg]
        self.line_tensors = tensors  # keeps alive what the tables point to
        self._apart = False
        self._multipliers = [(0.0,) * len(tensors.outputs)] * (
            1 + max(tensors.groups)
        )  # right for replicas that have not parted

    def _take_settings(self, settings: Sequence[StepSettings], options: StepOptions) -> None:
        self._check(settings)
        super()._take_settings(settings, options)  # type: ignore[misc]
        self._multipliers = [tuple(s.multipliers) for s in settings]
        self._apart = True

    def _check(self, settings: Sequence[StepSettings]) -> None:
        """Raises ValueError for what would take a replica off the line."""
        rule = self.line_tensors.rule
        for group, s in enumerate(settings):
            if s.weight_decay != 0 and (rule in COUPLED or not s.decay_at_base):
                remedy = (
                    f"use {' or '.join(DECOUPLED)}, or set it to 0"
                    if rule in COUPLED
                    else "set decay_at_base, or weight_decay to 0"
                )
                raise ValueError(
                    f"weight_decay={s.weight_decay} of group {group} takes replicas off their line "
                    f"(rank one): {remedy}"
                )
        multipliers = [tuple(s.multipliers) for s in settings]
        if self._apart and multipliers != self._multipliers:
            raise ValueError(
                f"multipliers changed from {self._multipliers} to {multipliers} while the replicas "
                "are apart: "
                "change them after converge() (the end of a cycle, or average_replicas of an "
                "optimizer)"
            )

    @ranged("hdet.converge")
    def converge(self, weights: Sequence[float]) -> None:
        check_shares(weights, len(self.line_tensors.outputs))
        self._meet([mean_rho(rhos, weights) for rhos in self._multipliers])
        self._apart = False

    def _meet(self, rhos: list[float]) -> None:
        """Replicas, and the base, become the points of the line at these multipliers, one for each
        group."""
        raise NotImplementedError
