"""A rank-one step by a native kernel."""

from __future__ import annotations

import torch

from .. import native
from ..spec.interface import RankOneTensors
from ..spec.rank_one import OnLine
from .step import NativeStepPlan

if native.missing is None:
    from hdet import _C


class NativeRankOnePlan(OnLine, NativeStepPlan):
    """A step of replicas on one line."""

    plan: _C.RankOnePlan
    operation = "rank_one"

    def __init__(self, tensors: RankOneTensors, memory: native.Memory) -> None:
        super().__init__(tensors, memory)
        plan, rows = self.plan, self.plan.num_rows
        self.line_addresses = memory.place(native.address_table(tensors.bases, tensors.displacements))
        plan.bases = self.line_addresses.data_ptr()
        plan.displacements = plan.bases + 8 * plan.num_tensors
        self.scales = memory.place(torch.tensor(tensors.scales or [1.0] * rows, dtype=torch.float64))
        self.lines = memory.room(rows * _C.REPLICA_ROW_BYTES)
        self.mean_rho = torch.zeros(rows, dtype=torch.float64)
        self.placed_mean_rho = memory.place(self.mean_rho)
        plan.scales, plan.lines, plan.mean_rho = self.scales.data_ptr(), self.lines.data_ptr(), self.placed_mean_rho.data_ptr()

    @staticmethod
    def _new_plan() -> _C.StepPlan:
        return _C.RankOnePlan()

    def _meet(self, rhos: list[float]) -> None:
        self.mean_rho.copy_(torch.tensor(rhos, dtype=torch.float64))
        self.memory.refresh(self.mean_rho, self.placed_mean_rho)
        self.memory.call("converge", self.plan)
