"""The Triton backend: the kernels of hdet.triton_kernels on CUDA tensors, or in Triton's
interpreter. Needs no build of hdet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...tensors.profiling import ranged
from ...triton_kernels import average, norm, pair
from ...triton_kernels import tables as t
from ..spec.interface import Column
from ..spec.pairing import Pairing
from ..spec.settings import check_shares
from .launch import TABLE_BLOCK, Memory, block_for, place_by_format, registers_for
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


class TritonPairPlan(Pairing):
    """Operations between two sets of tensors: one launch for each combination of formats."""

    def __init__(
        self,
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        source_lowers: Column | None,
        masters: Column | None,
    ) -> None:
        super().__init__(sources, destinations, source_lowers, masters)
        self.memory = Memory(sources[0].device)
        count = len(sources)
        addresses = t.address_table(sources, source_lowers, destinations, masters, count=count)
        self.addresses = self.memory.place(addresses)
        self.aligned = not bool((addresses % 16).any())
        columns = (
            t.formats_of(sources, count),
            t.formats_of(source_lowers, count, t.MASTERS),
            t.formats_of(destinations, count),
            t.formats_of(masters, count, t.MASTERS),
        )
        self.launches = place_by_format(
            self.memory, columns, [source.numel() for source in sources]
        )

    @ranged("hdet.pair")
    def _pair(self, pairing: str, scale: float) -> None:
        for formats, block, chunks in self.launches:
            variant = replace(
                pair.PairVariant(pairing, *formats),
                vector=t.vector(formats, self.aligned),
                block=block,
            )
            self.memory.launch(
                pair.pair, len(chunks), chunks, self.addresses, float(scale), V=variant
            )


class TritonNormPlan:
    """The global norm of a set of tensors: two launches."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors  # keeps alive what the table points to
        self.memory = Memory(tensors[0].device)
        count, elements = len(tensors), [tensor.numel() for tensor in tensors]
        table = t.typed_addresses(
            [tensor.data_ptr() for tensor in tensors], [tensor.dtype for tensor in tensors]
        )
        self.aligned = not bool((table[:, 0] % 16).any())
        self.table = self.memory.place(table)
        self.chunks = self.memory.place(t.chunk_table(range(count), elements))
        self.partials = self.memory.room(len(self.chunks), torch.float64)
        self.block = min(block_for(max(elements)), TABLE_BLOCK)

    @ranged("hdet.norm")
    def norm(self) -> Tensor:
        result = torch.empty((), dtype=torch.float32, device=self.memory.device)
        programs = len(self.chunks)
        self.memory.launch(
            norm.squares,
            programs,
            self.chunks,
            self.table,
            self.partials,
            ALIGNED=self.aligned,
            BLOCK=self.block,
        )
        self.memory.launch(norm.finish_norm, 1, self.partials, result, programs, BLOCK=TABLE_BLOCK)
        return result


class TritonBackend:
    name = "triton"
    step_plan = TritonStepPlan
    average_plan = TritonAveragePlan
    pair_plan = TritonPairPlan
    norm_plan = TritonNormPlan
