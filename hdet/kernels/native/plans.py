"""Averages, pairs and norms by a native kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...profiling import ranged
from .. import native
from ..spec.interface import Column
from ..spec.pairing import PAIRINGS, Pairing
from ..spec.settings import check_shares

if native.missing is None:
    from hdet import _C


class NativeAveragePlan:
    """The weighted mean of co-resident sets."""

    def __init__(self, params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None, memory: native.Memory) -> None:
        self.tensors = (params, masters)  # keeps alive what the tables point to
        self.memory = memory
        self.plan = plan = _C.AveragePlan()
        count = len(params[0])
        packed = native.formats(count, params=params[0], masters=None if masters is None else masters[0])
        chunks = native.chunk_table(params[0], [0] * count, packed)
        self.chunks = memory.place(chunks)
        self.addresses = memory.place(native.address_table(*params, *(masters or [])))
        self.weights = torch.zeros(len(params))
        self.placed_weights = memory.place(self.weights)
        self._weights: list[float] = []
        plan.chunks, plan.num_chunks = self.chunks.data_ptr(), native.num_chunks(chunks)
        plan.num_tensors, plan.num_replicas = count, len(params)
        plan.all_float = int(native.only_float(*params) and native.nothing_in(masters))
        plan.params = self.addresses.data_ptr()
        plan.masters = 0 if native.nothing_in(masters) else self.addresses.data_ptr() + 8 * count * len(params)
        plan.weights = self.placed_weights.data_ptr()

    def average(self, weights: Sequence[float]) -> None:
        if list(weights) != self._weights:
            check_shares(weights, self.plan.num_replicas)
            self._weights = list(weights)
            self.weights.copy_(torch.tensor(self._weights, dtype=torch.float64))
            self.memory.refresh(self.weights, self.placed_weights)
        self._run()

    @ranged("hdet.average")
    def _run(self) -> None:
        self.memory.call("average", self.plan)


class NativePairPlan(Pairing):
    """Operations between two sets of tensors."""

    def __init__(
        self,
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        source_lowers: Column | None,
        masters: Column | None,
        memory: native.Memory,
    ) -> None:
        super().__init__(sources, destinations, source_lowers, masters)
        self.memory = memory
        self.plan = plan = _C.PairPlan()
        count = len(sources)
        nothing: Column = [None] * count
        chunks = native.chunk_table(sources, [0] * count, native.formats(count, sources, destinations, masters))
        self.chunks = memory.place(chunks)
        self.addresses = memory.place(native.address_table(sources, destinations, source_lowers or nothing, masters or nothing))
        plan.chunks, plan.num_chunks = self.chunks.data_ptr(), native.num_chunks(chunks)
        plan.all_float = int(native.only_float(sources, destinations) and native.nothing_in([source_lowers or [], masters or []]))
        columns = [self.addresses.data_ptr() + 8 * count * column for column in range(4)]
        plan.sources, plan.destinations, plan.source_lowers, plan.masters = columns

    def _pair(self, pairing: str, scale: float) -> None:
        self.plan.pairing = PAIRINGS.index(pairing)
        self.plan.scale = scale
        self._run()

    @ranged("hdet.pair")
    def _run(self) -> None:
        self.memory.call("pair", self.plan)


class NativeNormPlan:
    """The global norm of a set of tensors."""

    def __init__(self, tensors: Sequence[Tensor], memory: native.Memory) -> None:
        self.tensors = tensors  # keeps alive what the tables point to
        self.memory = memory
        chunks = native.chunk_table(tensors, [0] * len(tensors), native.formats(len(tensors), tensors))
        self.num_chunks = native.num_chunks(chunks)
        self.chunks = memory.place(chunks)
        self.addresses = memory.place(native.address_table(tensors))
        self.partials = memory.room(8 * self.num_chunks)

    @ranged("hdet.norm")
    def norm(self) -> Tensor:
        result = torch.empty((), device=self.memory.device)
        addresses = (table.data_ptr() for table in (self.addresses, self.partials, result))
        self.memory.call("norm", self.chunks.data_ptr(), self.num_chunks, *addresses)
        return result
