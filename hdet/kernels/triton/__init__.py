"""The Triton backend: the kernels of hdet.triton_kernels on CUDA tensors, or in Triton's
interpreter. Needs no build of hdet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...tensors.profiling import ranged
from ...triton_kernels import average
from ...triton_kernels import tables as t
from ..checks import check_shares
from ..copies import TorchCopyPlan
from ..interface import Column
from .launch import Memory, place_by_format, registers_for
from .step import TritonStepPlan


class TritonAveragePlan:
    """The weighted mean of co-resident sets: one launch for each format."""

    def __init__(
        self, params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None
    ) -> None:
        self.tensors = (params, masters)  # keeps alive what the tables point to
        self.memory = Memory(params[0][0].device)
        count, replicas = len(params[0]), len(params)
        nothing: list[Column | None] = [None] * replicas
        addresses = t.address_table(*params, *(masters or nothing), count=count)
        self.addresses = self.memory.place(addresses)
        self.weights = self.memory.room(replicas, torch.float32)
        aligned, elements = not bool((addresses % 16).any()), [param.numel() for param in params[0]]
        columns = (
            t.formats_of(params[0], count),
            t.formats_of(None if masters is None else masters[0], count, t.MASTERS),
        )
        self.launches = [
            (
                replace(
                    average.AverageVariant(replicas, *formats),
                    vector=t.vector(formats, aligned),
                    block=block,
                ),
                chunks,
            )
            for formats, block, chunks in place_by_format(self.memory, columns, elements)
        ]

    @ranged("hdet.average")
    def average(self, weights: Sequence[float]) -> None:
        check_shares(weights, len(self.weights))
        self.memory.refresh(
            torch.tensor(weights, dtype=torch.float64, device="cpu").float(), self.weights
        )
        for variant, chunks in self.launches:
            tables = (chunks, self.addresses, self.weights)
            self.memory.launch(
                average.average, len(chunks), *tables, V=variant, **registers_for(variant.replicas)
            )


class TritonBackend:
    name = "triton"
    step_plan = TritonStepPlan
    average_plan = TritonAveragePlan
    copy_plan = TorchCopyPlan  # a call for all tensors, too
