"""An optimizer step in Triton: at most one launch for the norm, one to derive, and one for each
format of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...rules import RULES, StepSettings
from ...tensors.profiling import ranged
from ...triton_kernels import hyper, norm
from ...triton_kernels import tables as t
from ...triton_kernels.arithmetic import HYPER_ROW
from ...triton_kernels.step import StepVariant, update
from ..checks import check_gradients, check_options
from ..interface import PLAIN, Column, StepOptions, StepTensors
from ..numbers import CODE_BLOCK, codebook
from ..tables import Inputs, SettingsTable, norms_of
from .launch import (
    DERIVED,
    TABLE_BLOCK,
    Memory,
    block_for,
    interpreted,
    place_by_format,
    registers_for,
)

EMPTY = 64
"""where an empty gradient lies, which is there and which nobody reads"""
_STREAMS = ("gradient", "param", "master")
"""the formats of a StepVariant, before those of moments"""


class TritonStepPlan:
    """An optimizer step on tensors of one device, or in the interpreter."""

    def __init__(self, tensors: StepTensors) -> None:
        self.tensors = tensors  # keeps alive what the tables point to
        self.shapes = [param.shape for param in tensors.params[0]]
        self.elements = [param.numel() for param in tensors.params[0]]
        self.device_number = tensors.params[0][0].get_device()
        self.memory = Memory(tensors.params[0][0].device)
        self.num_groups = tensors.num_groups
        self._make_tables()
        self._make_room()
        self._make_inputs()

    def _make_tables(self) -> None:
        """What stays as it is for as long as the plan is used."""
        tensors, count = self.tensors, len(self.shapes)
        nothing = [None] * tensors.num_replicas
        addresses = t.address_table(
            *tensors.moments,
            *map(tensors.scales_of, range(len(tensors.moments))),
            *tensors.params,
            *(tensors.masters or nothing),
            count=count,
        )
        self.aligned = not bool((addresses % 16).any())
        place = self.memory.place
        self.addresses = place(addresses)
        self.counters = place(t.address_table(tensors.steps, count=count))
        self.groups = place(torch.tensor(tensors.groups, dtype=torch.int32, device="cpu"))
        self.ids = place(
            torch.tensor(
                range(count) if tensors.ids is None else tensors.ids,
                dtype=torch.int32,
                device="cpu",
            )
        )
        seed = (tensors.stochastic or 0) % 2**64
        self.codebook = place(codebook()) if tensors.coded() else None
        tables = 0 if self.codebook is None else self.codebook.data_ptr()
        self.random = place(
            torch.tensor(
                [seed - (seed >> 63 << 64), tensors.first_replica, tables],
                dtype=torch.int64,
                device="cpu",
            )
        )
        self.all_chunks = place(t.chunk_table(range(count), self.elements))

    def _make_room(self) -> None:
        """Memory for what the derive phase writes."""
        count, replicas, room = len(self.shapes), self.tensors.num_replicas, self.memory.room
        self.control = room(4, torch.float32)
        self.skipped, self.norm = self.control[0], self.control[1]
        self.rows = room(count * HYPER_ROW.value, torch.float32)
        self.replica_rows = room(count * replicas * 3, torch.float32)
        self.partials = room(len(self.all_chunks), torch.float64)
        self.one, self.zero = (
            self.memory.place(torch.full((1,), x, dtype=torch.float32, device="cpu"))
            for x in (1.0, 0.0)
        )

    def _make_inputs(self) -> None:
        """What steps write."""
        self.inputs = Inputs(self.memory, self.tensors, 2 * len(self.shapes))
        self._dtypes = [
            param.dtype for param in self.tensors.params[0]
        ]  # of gradients, which mostly are stored as their parameters
        self._make_launches()
        self._seen: list[torch.dtype | None] = [None] * len(self.shapes)
        self._addresses: list[int] = []
        self._settings = SettingsTable(self.tensors, self.inputs.write_settings)
        self._options: StepOptions | None = None
        self._point_to_inputs()

    def _point_to_inputs(self) -> None:
        self.placed_gradients, *self.placed_settings = self.inputs.parts()

    def step(
        self, gradients: Column, settings: Sequence[StepSettings], options: StepOptions = PLAIN
    ) -> None:
        self._take_gradients(*self._check_gradients(gradients))
        self.upload(settings, options)
        self._run(options)

    def gradient_norms(self) -> Tensor:
        owners = self.all_chunks[:, 2]
        return norms_of(self.partials, owners, len(self.shapes), self.control[3])

    def upload(self, settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        self._take_settings(settings, options)
        if self.inputs.refresh():
            self._point_to_inputs()

    def _take_settings(self, settings: Sequence[StepSettings], options: StepOptions) -> None:
        if options is not self._options:
            check_options(options, self.tensors)
            self._options = options
        self._settings.take(settings, options)

    def _check_gradients(self, gradients: Column) -> tuple[list[int], list[torch.dtype | None]]:
        """The gradients' addresses, 0 where there is none, and their dtypes or the last ones there
        were, after a check that costs little.
        Anything unusual goes to the checks that can say what it is."""
        given = [g for g in gradients if g is not None]
        shapes = (
            self.shapes
            if len(given) == len(gradients)
            else [s for s, g in zip(self.shapes, gradients, strict=True) if g is not None]
        )
        try:
            addresses = [0 if g is None else g.data_ptr() or EMPTY for g in gradients]
            usual = (
                [g.shape for g in given] == shapes
                and False not in [g.is_contiguous() for g in given]
                and {g.dtype for g in given} <= t.FORMATS.keys()
                and {g.get_device() for g in given} <= {self.device_number}
                and (
                    EMPTY not in addresses
                    or all(
                        g is None or a != EMPTY or g.numel() == 0
                        for a, g in zip(addresses, gradients, strict=True)
                    )
                )
            )
        except (RuntimeError, AttributeError):  # sparse tensors have no address
            usual = False
        seen = (
            [old if g is None else g.dtype for g, old in zip(gradients, self._seen, strict=True)]
            if usual
            else []
        )
        if seen != self._seen:  # to look for negated views in each step would take too long
            check_gradients(gradients, self.tensors.params[0])
            seen = [
                old if g is None else g.dtype for g, old in zip(gradients, self._seen, strict=True)
            ]
        return addresses, seen

    def _take_gradients(self, addresses: list[int], seen: list[torch.dtype | None]) -> None:
        if addresses == self._addresses and seen == self._seen:
            return
        dtypes = [
            dtype or param.dtype for dtype, param in zip(seen, self.tensors.params[0], strict=True)
        ]
        table = t.typed_addresses(addresses, dtypes)
        self.gradients_aligned = not bool((table[:, 0] % 16).any())
        self.inputs.gradients().copy_(table.view(-1))
        self._addresses, self._seen = addresses, seen
        if dtypes != self._dtypes:  # rare: at the first step, if at all
            self._dtypes = dtypes
            self._make_launches()

    def _make_launches(self) -> None:
        """Chunks by format: each is one launch."""
        tensors, count = self.tensors, len(self.shapes)
        columns = (
            [t.FORMATS[dtype] for dtype in self._dtypes],
            t.formats_of(tensors.params[0], count),
            t.formats_of(None if tensors.masters is None else tensors.masters[0], count, t.MASTERS),
            *(t.formats_of(column, count) for column in tensors.moments),
        )
        plain = StepVariant(
            tensors.rule,
            tensors.num_replicas,
            signed=RULES[tensors.rule].signed,
            gives_parameter=RULES[tensors.rule].gives_parameter,
            stochastic=tensors.stochastic is not None,
            first=tensors.first_replica == 0,
        )
        self.launches: list[tuple[StepVariant, tuple[int, ...], Tensor]] = []
        for formats, block, chunks in place_by_format(self.memory, columns, self.elements):
            stored: dict[str, Any] = dict(zip(_STREAMS, formats, strict=False))
            variant = replace(plain, **stored, moments=formats[len(_STREAMS) :], block=block)
            if variant.coded:  # whole blocks of codes
                variant = replace(variant, block=max(block, CODE_BLOCK))
            self.launches.append((variant, formats, chunks))

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
        self.memory.launch(
            norm.squares, programs, *tables, ALIGNED=self.gradients_aligned, BLOCK=block
        )
        return programs

    def _derive(self, options: StepOptions, num_partials: int) -> None:
        grad_scale = self.one if options.grad_scale is None else options.grad_scale
        found_inf = self.zero if options.found_inf is None else options.found_inf
        inputs = (
            self.placed_gradients,
            *self.placed_settings,
            self.partials,
            grad_scale,
            found_inf,
            self.counters,
            self.groups,
        )
        count = len(self.shapes)
        block = block_for(count) if interpreted else DERIVED
        arguments = (*inputs, self.rows, self.replica_rows, self.control)
        counts = (num_partials, count, self.num_groups, self.tensors.num_replicas)
        variant = {
            "RULE": self.tensors.rule,
            "COUPLED": RULES[self.tensors.rule].coupled,
            "TENSORS": block,
            "BLOCK": TABLE_BLOCK,
        }
        self.memory.launch(
            hyper.derive, -(-count // block), *arguments, *counts, **variant, num_warps=8
        )

    def _update(self, variant: StepVariant, chunks: Tensor) -> None:
        tables = (chunks, self.placed_gradients, self.addresses, self.ids)
        derived = (self.rows, self.replica_rows, self.control, self.random)
        registers = registers_for(variant.replicas, coded=variant.coded)
        self.memory.launch(update, len(chunks), *tables, *derived, V=variant, **registers)
