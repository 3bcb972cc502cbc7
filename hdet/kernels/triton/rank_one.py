"""A rank-one step in Triton: replicas on one line (csrc/core/rank_one.h), with the launches of any other step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...triton_kernels import rank_one
from ...triton_kernels import tables as t
from ...triton_kernels.step import StepVariant
from ..spec.interface import RankOneTensors, StepOptions
from ..spec.rank_one import OnLine
from .launch import TABLE_BLOCK, block_for, registers_for
from .step import TritonStepPlan


class TritonRankOnePlan(OnLine, TritonStepPlan):
    """A step of replicas on one line, of one device, or in the interpreter."""

    def __init__(self, tensors: RankOneTensors) -> None:
        super().__init__(tensors)
        place = self.memory.place
        addresses = t.address_table(tensors.bases, tensors.displacements, count=len(self.shapes))
        self.aligned = self.aligned and not bool((addresses % 16).any())
        self.line_addresses = place(addresses)
        self.scales = place(torch.tensor(tensors.scales or [1.0] * self.num_rows, dtype=torch.float64))
        self.lines = self.memory.room(self.num_rows * 2, torch.float32)
        self.mean_rho = self.memory.room(self.num_rows, torch.float64)
        self.converges = []
        for format, members in t.groups(t.formats_of(tensors.outputs[0], len(self.shapes))).items():
            block = block_for(max(self.elements[i] for i in members))
            vector = t.vector((t.FORMATS[torch.float32],), self.aligned)
            variant = StepVariant(tensors.rule, self.tensors.num_replicas, param=format, vector=vector, block=block)
            self.converges.append((variant, place(t.chunk_table(members, self.elements, tensors.rows))))

    def _meet(self, rhos: list[float]) -> None:
        self.memory.refresh(torch.tensor(rhos, dtype=torch.float64), self.mean_rho)
        self.memory.launch(rank_one.derive_converge, 1, self.mean_rho, self.scales, self.lines, self.num_rows)
        for variant, chunks in self.converges:
            tables = (chunks, self.addresses, self.line_addresses, self.lines)
            self.memory.launch(rank_one.converge, len(chunks), *tables, V=variant, **registers_for(variant.replicas))

    def _derive(self, options: StepOptions, num_partials: int) -> None:
        derived = (self.rows, self.replica_rows, self.scales, self.lines, self.control)
        arguments = (*self._inputs(options), *derived, *self._counts(num_partials))
        self.memory.launch(rank_one.derive_rank_one, 1, *arguments, RULE=self.tensors.rule, BLOCK=TABLE_BLOCK, num_warps=8)

    def _update(self, variant: StepVariant, chunks: Tensor) -> None:
        # base and displacement are float32, so no stream moves in vectors of 8
        variant = replace(variant, vector=min(variant.vector, 4))
        tables = (chunks, self.placed_gradients, self.addresses, self.line_addresses, self.ids)
        derived = (self.rows, self.replica_rows, self.lines, self.control, self.random)
        self.memory.launch(rank_one.update_rank_one, len(chunks), *tables, *derived, V=variant, **registers_for(variant.replicas))
