"""A rank-one step in Triton: replicas on one line (csrc/core/rank_one.h), with the launches of any other step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...profiling import ranged
from ...triton_kernels import rank_one
from ...triton_kernels import tables as t
from ...triton_kernels.step import StepVariant
from ..spec.interface import PLAIN, RankOneTensors, StepOptions, StepSettings
from ..spec.rank_one import Line
from ..spec.settings import check_shares
from .launch import TABLE_BLOCK, block_for, registers_for
from .step import TritonStepPlan


class TritonRankOnePlan(TritonStepPlan):
    """A step of replicas on one line, of one device, or in the interpreter."""

    def __init__(self, tensors: RankOneTensors) -> None:
        super().__init__(tensors.as_step())
        self.line_tensors = tensors  # keeps alive what the tables point to
        self.line = Line(tensors.rule)
        place = self.memory.place
        addresses = t.address_table(tensors.bases, tensors.displacements, count=len(self.shapes))
        self.aligned = self.aligned and not bool((addresses % 16).any())
        self.line_addresses = place(addresses)
        self.states = place(torch.tensor([[scale, 0.0, 0.0] for scale in tensors.scales or [1.0] * self.num_rows], dtype=torch.float64))
        self.scales = self.states[:, 0]
        self.lines = self.memory.room(self.num_rows * rank_one.LINE.value, torch.float32)
        self.converges = []
        for format, members in t.groups(t.formats_of(tensors.outputs[0], len(self.shapes))).items():
            block = block_for(max(self.elements[i] for i in members))
            vector = t.vector((t.FORMATS[torch.float32],), self.aligned)
            variant = StepVariant(tensors.rule, self.tensors.num_replicas, param=format, vector=vector, block=block)
            self.converges.append((variant, place(t.chunk_table(members, self.elements, tensors.rows))))

    def step(self, gradients: Sequence[Tensor], settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        self.line.step(super().step, gradients, settings, options)

    def upload(self, settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        self.line.upload(super().upload, settings, options)

    @ranged("hdet.converge")
    def converge(self, weights: Sequence[float]) -> None:
        check_shares(weights, self.tensors.num_replicas)
        # without a step there are no settings yet, and multipliers of 0: right for replicas that have not parted
        settings = self._settings or [0.0] * self.num_settings
        self._write_settings([*settings[: -len(weights)], *weights], self._rates.addresses)
        state = (self.placed_settings, self.states, self.lines)
        self.memory.launch(rank_one.derive_converge, 1, *state, self.num_rows, self.tensors.num_replicas)
        for variant, chunks in self.converges:
            tables = (chunks, self.addresses, self.line_addresses, self.lines)
            self.memory.launch(rank_one.converge, len(chunks), *tables, V=variant, **registers_for(variant.replicas))
        self.line.apart = False

    def _derive(self, options: StepOptions, num_partials: int) -> None:
        derived = (self.rows, self.replica_rows, self.states, self.lines, self.control)
        arguments = (*self._inputs(options), *derived, *self._counts(num_partials))
        compiled = {"RULE": self.tensors.rule, "MEAN": options.finish == "mean", "BLOCK": TABLE_BLOCK, "num_warps": 8}
        self.memory.launch(rank_one.derive_rank_one, 1, *arguments, **compiled)

    def _update(self, variant: StepVariant, chunks: Tensor) -> None:
        # base and displacement are float32, so no stream moves in vectors of 8; what becomes of the outputs is in their replica rows
        variant = replace(variant, vector=min(variant.vector, 4), finish="store")
        tables = (chunks, self.placed_gradients, self.addresses, self.line_addresses, self.ids)
        derived = (self.rows, self.replica_rows, self.lines, self.control, self.random)
        self.memory.launch(rank_one.update_rank_one, len(chunks), *tables, *derived, V=variant, **registers_for(variant.replicas))
