"""The Triton backend: the kernels of hdet.triton_kernels on CUDA tensors, or in Triton's
interpreter. Needs no build of hdet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...tensors.profiling import ranged
from ...triton_kernels.average import AverageVariant, average
from ..checks import check_shares
from ..copies import TorchCopyPlan
from ..interface import Column
from ..tables import address_table, chunks_of, formats
from .launch import Memory, block_for, registers_for, slices_of, split_by_format, vector_of
from .step import TritonStepPlan


class TritonAveragePlan:
    """The weighted mean of co-resident sets: one launch for each format."""

    def __init__(
        self, params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None
    ) -> None:
        self.tensors = (params, masters)  # keeps alive what the tables point to
        self.memory = Memory(params[0][0].device)
        self.count, self.replicas = len(params[0]), len(params)
        masters = [[None] * self.count] * self.replicas if masters is None else masters
        addresses = address_table(*params, *masters)
        self.addresses = self.memory.place(addresses)
        self.weights = torch.zeros(self.replicas, dtype=torch.float32, device="cpu")
        self.placed_weights = self.memory.place(self.weights)
        packed = formats(self.count, None, params[0], masters[0])
        order = sorted(range(self.count), key=packed.__getitem__)
        elements = [param.numel() for param in params[0]]
        self.cut = chunks_of(elements, packed, self.memory.chunks, order)
        self.chunks = self.memory.place(self.cut.table)
        aligned, block = not bool((addresses % 16).any()), block_for(self.cut.longest)
        self.launches = []
        for (_, param, master, *_), part in split_by_format(self.cut, self.chunks):
            vector = vector_of((param, master), aligned)
            variant = AverageVariant(self.replicas, param, master, vector, block)
            self.launches.append((variant, part))

    @ranged("hdet.average")
    def average(self, weights: Sequence[float]) -> None:
        check_shares(weights, self.replicas)
        self.weights.copy_(torch.tensor(weights, dtype=torch.float64, device="cpu"))
        self.memory.refresh(self.weights, self.placed_weights)
        slices, registers = slices_of(self.cut.longest), registers_for(self.replicas)
        for variant, chunks in self.launches:
            tables = (chunks, self.addresses, self.placed_weights, slices)
            self.memory.launch(average, len(chunks) * slices, *tables, V=variant, **registers)


class TritonBackend:
    name = "triton"
    step_plan = TritonStepPlan
    average_plan = TritonAveragePlan
    copy_plan = TorchCopyPlan  # a call for all tensors, too
