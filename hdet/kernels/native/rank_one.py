"""A rank-one step by a native kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...profiling import ranged
from .. import native
from ..spec.interface import PLAIN, RankOneTensors, StepOptions, StepSettings
from ..spec.rank_one import Line
from ..spec.settings import check_shares
from .step import NativeStepPlan

if native.missing is None:
    from hdet import _C


class NativeRankOnePlan(NativeStepPlan):
    """A step of replicas on one line."""

    plan: _C.RankOnePlan
    operation = "rank_one"

    def __init__(self, tensors: RankOneTensors, memory: native.Memory) -> None:
        super().__init__(tensors.as_step(), memory)
        self.line_tensors = tensors  # keeps alive what the tables point to
        self.line = Line(tensors.rule)
        plan, rows = self.plan, self.plan.num_rows
        self.line_addresses = memory.place(native.address_table(tensors.bases, tensors.displacements))
        plan.bases = self.line_addresses.data_ptr()
        plan.displacements = plan.bases + 8 * plan.num_tensors
        states = torch.zeros(rows * _C.STATE_BYTES, dtype=torch.uint8)
        of_scales = slice(None, None, _C.STATE_BYTES // 8)  # RankOneState::scale
        states.view(torch.float64)[of_scales] = torch.tensor(tensors.scales or [1.0] * rows, dtype=torch.float64)
        self.states = memory.place(states)
        self.scales = self.states.view(torch.float64)[of_scales]
        self.lines = memory.room(rows * _C.LINE_BYTES)
        plan.states, plan.lines = self.states.data_ptr(), self.lines.data_ptr()

    @staticmethod
    def _new_plan() -> _C.StepPlan:
        return _C.RankOnePlan()

    def step(self, gradients: Sequence[Tensor], settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        self.line.step(super().step, gradients, settings, options)

    def upload(self, settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        self.line.upload(super().upload, settings, options)

    @ranged("hdet.converge")
    def converge(self, weights: Sequence[float]) -> None:
        check_shares(weights, self.plan.num_replicas)
        # without a step there are no settings yet, and multipliers of 0: right for replicas that have not parted
        settings = self._settings or [0.0] * self.num_settings
        self._write_settings([*settings[: -len(weights)], *weights], self._rates.addresses)
        self.memory.call("converge", self.plan)
        self.line.apart = False
