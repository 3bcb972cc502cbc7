"""An optimizer step in Triton: at most one launch for the norm, one to derive, and one for each format of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...profiling import ranged
from ...triton_kernels import hyper, norm, rank_one
from ...triton_kernels import tables as t
from ...triton_kernels.rules import HYPER_ROW
from ...triton_kernels.step import StepVariant, update
from ..spec.arguments import check_gradients
from ..spec.interface import PLAIN, RankOneTensors, StepOptions, StepSettings, StepTensors
from ..spec.settings import SettingsTable, check_options, count_settings
from ..spec.shared import OnLine
from .launch import TABLE_BLOCK, Memory, block_for, place_by_format, registers_for

_STREAMS = ("gradient", "param", "master", "exp_avg", "exp_avg_sq")
"""the formats of a StepVariant"""


class TritonStepPlan:
    """An optimizer step on tensors of one device, or in the interpreter."""

    def __init__(self, tensors: StepTensors) -> None:
        self.tensors = tensors  # keeps alive what the tables point to
        self.shapes = [param.shape for param in tensors.params[0]]
        self.elements = [param.numel() for param in tensors.params[0]]
        self.device_number = tensors.params[0][0].get_device()
        self.memory = Memory(tensors.params[0][0].device)
        self.num_rows = 1 + max(tensors.rows)
        self._make_tables()
        self._make_room()
        self._make_inputs()

    def _make_tables(self) -> None:
        """What stays as it is for as long as the plan is used."""
        tensors, count = self.tensors, len(self.shapes)
        nothing = [None] * tensors.num_replicas
        addresses = t.address_table(tensors.exp_avgs, tensors.exp_avg_sqs, *tensors.params, *(tensors.masters or nothing), count=count)
        self.aligned = not bool((addresses % 16).any())
        place = self.memory.place
        self.addresses = place(addresses)
        self.counters = place(t.address_table(tensors.steps, count=count))
        self.leaders = place(t.address_table([tensors.steps[i] for i in tensors.leaders()], count=self.num_rows))
        self.ids = place(torch.tensor(range(count) if tensors.ids is None else tensors.ids, dtype=torch.int32))
        seed = (tensors.stochastic or 0) % 2**64
        self.random = place(torch.tensor([seed - (seed >> 63 << 64), tensors.first_replica], dtype=torch.int64))
        self.all_chunks = place(t.chunk_table(range(count), self.elements))

    def _make_room(self) -> None:
        """Memory for what the derive phase writes."""
        replicas, room = self.tensors.num_replicas, self.memory.room
        self.control = room(3, torch.float32)
        self.skipped, self.norm = self.control[0], self.control[1]
        self.rows = room(self.num_rows * HYPER_ROW.value, torch.float32)
        self.replica_rows = room(self.num_rows * replicas * 2, torch.float32)
        self.partials = room(len(self.all_chunks), torch.float64)
        self.one, self.zero = self.memory.place(torch.ones(1)), self.memory.place(torch.zeros(1))

    def _make_inputs(self) -> None:
        """The tables that steps write: gradients; settings (csrc/core/hyper.h), then addresses of rates."""
        self.placed_gradients = self.memory.room(2 * len(self.shapes), torch.int64).view(-1, 2)
        self.num_settings = count_settings(self.num_rows, self.tensors.num_replicas)
        self.placed_settings = self.memory.room(self.num_settings + self.num_rows, torch.float64)
        self.placed_rates = self.placed_settings[self.num_settings :].view(torch.int64)
        self._gradient_dtypes: list[torch.dtype] = []
        self._addresses: list[int] = []
        self._settings = SettingsTable(self.tensors, self._write_settings)
        self._options: StepOptions | None = None

    def step(self, gradients: Sequence[Tensor], settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        addresses = self._check_gradients(gradients)
        self.upload(settings, options)
        self._take_gradients(gradients, addresses)
        self._run(options)

    def upload(self, settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        if options is not self._options:
            check_options(options, self.tensors)
            self._options = options
        self._settings.take(settings, options)

    def _write_settings(self, values: list[float], rate_addresses: list[int]) -> None:
        rates = torch.tensor(rate_addresses, dtype=torch.int64).view(torch.float64)
        self.memory.refresh(torch.cat((torch.tensor(values, dtype=torch.float64), rates)), self.placed_settings)

    def _check_gradients(self, gradients: Sequence[Tensor]) -> list[int]:
        """The gradients' addresses, after a check that costs little. Anything unusual goes to the checks that can say what it is."""
        try:
            addresses = [g.data_ptr() for g in gradients]
            usual = (
                [g.shape for g in gradients] == self.shapes
                and False not in [g.is_contiguous() for g in gradients]
                and {g.dtype for g in gradients} <= t.FORMATS.keys()
                and {g.get_device() for g in gradients} <= {self.device_number}
                and (self._gradient_dtypes or not any(map(Tensor.is_neg, gradients)))  # in each step that would take too long
                and (0 not in addresses or all(a != 0 or g.numel() == 0 for a, g in zip(addresses, gradients, strict=True)))
            )
        except (RuntimeError, AttributeError):  # sparse tensors have no address; None has no attributes
            usual = False
        if not usual:
            check_gradients(gradients, self.tensors.params[0])
        return addresses

    def _take_gradients(self, gradients: Sequence[Tensor], addresses: list[int]) -> None:
        dtypes = [g.dtype for g in gradients]
        if addresses == self._addresses and dtypes == self._gradient_dtypes:
            return
        table = t.typed_addresses(addresses, dtypes)
        self.gradients_aligned = not bool((table[:, 0] % 16).any())
        self.memory.refresh(table, self.placed_gradients)
        self._addresses = addresses
        if dtypes != self._gradient_dtypes:  # rare: at the first step, if at all
            self._gradient_dtypes = dtypes
            self._make_launches(gradients)

    def _make_launches(self, gradients: Sequence[Tensor]) -> None:
        """Chunks by format: each is one launch."""
        tensors, count = self.tensors, len(self.shapes)
        columns = (
            t.formats_of(gradients, count),
            t.formats_of(tensors.params[0], count),
            t.formats_of(None if tensors.masters is None else tensors.masters[0], count, t.MASTERS),
            t.formats_of(tensors.exp_avgs, count),
            t.formats_of(tensors.exp_avg_sqs, count),
        )
        stochastic, first = tensors.stochastic is not None, tensors.first_replica == 0
        plain = StepVariant(tensors.rule, tensors.num_replicas, stochastic=stochastic, first=first)
        self.launches: list[tuple[StepVariant, tuple[int, ...], Tensor]] = []
        for formats, block, chunks in place_by_format(self.memory, columns, self.elements, tensors.rows):
            stored: dict[str, Any] = dict(zip(_STREAMS, formats, strict=True))
            self.launches.append((replace(plain, **stored, block=block), formats, chunks))

    @ranged("hdet.step")
    def _run(self, options: StepOptions) -> None:
        self._derive(options, self._sum_squares(options))
        for variant, formats, chunks in self.launches:
            vector = t.vector(formats, self.aligned and self.gradients_aligned)
            variant = replace(variant, zero_gradients=options.zero_gradients, vector=vector)
            self._update(variant, chunks)

    def _sum_squares(self, options: StepOptions) -> int:
        """How many partial sums there are."""
        if options.max_norm == 0:
            return 0
        programs, block = len(self.all_chunks), min(block_for(max(self.elements)), TABLE_BLOCK)
        tables = (self.all_chunks, self.placed_gradients, self.partials)
        self.memory.launch(norm.squares, programs, *tables, ALIGNED=self.gradients_aligned, BLOCK=block)
        return programs

    def _inputs(self, options: StepOptions) -> tuple[Tensor, ...]:
        grad_scale = self.one if options.grad_scale is None else options.grad_scale
        found_inf = self.zero if options.found_inf is None else options.found_inf
        return (self.placed_settings, self.partials, grad_scale, found_inf, self.counters, self.leaders, self.placed_rates)

    def _counts(self, num_partials: int) -> tuple[int, ...]:
        return (num_partials, len(self.shapes), self.num_rows, self.tensors.num_replicas)

    def _derive(self, options: StepOptions, num_partials: int) -> None:
        derived = (self.rows, self.replica_rows, self.control)
        arguments = (*self._inputs(options), *derived, *self._counts(num_partials))
        self.memory.launch(hyper.derive, 1, *arguments, RULE=self.tensors.rule, BLOCK=TABLE_BLOCK, num_warps=8)

    def _update(self, variant: StepVariant, chunks: Tensor) -> None:
        tables = (chunks, self.placed_gradients, self.addresses, self.ids)
        derived = (self.rows, self.replica_rows, self.control, self.random)
        self.memory.launch(update, len(chunks), *tables, *derived, V=variant, **registers_for(variant.replicas))


class TritonRankOnePlan(OnLine, TritonStepPlan):
    """A step of replicas on one line (csrc/core/rank_one.h)."""

    def __init__(self, tensors: RankOneTensors) -> None:
        super().__init__(tensors)
        place = self.memory.place
        addresses = t.address_table(tensors.bases, tensors.displacements, count=len(self.shapes))
        self.aligned = self.aligned and not bool((addresses % 16).any())
        self.line_addresses = place(addresses)
        self.scales = place(torch.tensor(tensors.scales or [1.0] * self.num_rows, dtype=torch.float64))
        self.lines = self.memory.room(self.num_rows * 2, torch.float32)
        self.mean_rho = self.memory.room(self.num_rows, torch.float64)
        vector = t.vector((t.FORMATS[torch.float32],), self.aligned)
        plain = StepVariant(tensors.rule, self.tensors.num_replicas, vector=vector)
        columns = (t.formats_of(tensors.outputs[0], len(self.shapes)),)
        self.converges = [
            (replace(plain, param=format, block=block), chunks)
            for (format,), block, chunks in place_by_format(self.memory, columns, self.elements, tensors.rows)
        ]

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
