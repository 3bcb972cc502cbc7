"""An optimizer step in Triton: at most one launch for the norm, one to derive, and one for each
format of tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...rules import RULES
from ...tensors.profiling import ranged
from ...triton_kernels import hyper, norm
from ...triton_kernels.step import StepVariant, sum_terms, update
from ..interface import Column, StepTensors
from ..numbers import CODE_BLOCK
from ..step import TableStepPlan
from ..tables import DTYPES
from .launch import (
    DERIVED,
    TABLE_BLOCK,
    Memory,
    block_for,
    interpreted,
    registers_for,
    slices_of,
    split_by_format,
    vector_of,
)


class TritonStepPlan(TableStepPlan):
    """An optimizer step on tensors of one device, or in the interpreter."""

    by_format = True
    memory: Memory

    def __init__(self, tensors: StepTensors) -> None:
        super().__init__(tensors, Memory(tensors.params[0][0].device))
        place = self.memory.place
        seed = (tensors.stochastic or 0) % 2**64
        self.random = place(
            torch.tensor(
                [
                    seed - (seed >> 63 << 64),
                    tensors.first_replica,
                    0 if self.codebooks is None else self.codebooks.data_ptr(),
                ],
                dtype=torch.int64,
                device="cpu",
            )
        )
        self.one, self.zero = (
            place(torch.full((1,), x, dtype=torch.float32, device="cpu")) for x in (1.0, 0.0)
        )
        streams = self.addresses.view(self.count, -1)[:, :-1]  # not the counters
        self.aligned = not bool((streams % 16).any())
        if self.emas is not None:
            streams = self.emas.view(self.count, -1)[:, :-1]
            self.aligned = self.aligned and not bool((streams % 16).any())

    def _point_to_chunks(self) -> None:
        """Chunks by format: each is one launch."""
        t, rule = self.tensors, RULES[self.tensors.rule]
        self.launches: list[tuple[StepVariant, tuple[int, ...], Tensor]] = []
        for kinds, chunks in split_by_format(self.chunks, self.placed_chunks):
            gradient, param, master, *moments = kinds[: 3 + len(t.moments)]
            variant = StepVariant(
                t.rule,
                t.num_replicas,
                gradient,
                param,
                master,
                tuple(moments),
                signed=rule.signed,
                gives_parameter=rule.gives_parameter,
                stochastic=t.stochastic is not None,
                first=t.first_replica == 0,
                block=block_for(self.chunks.longest),
                emas=len(t.averages),
            )
            if variant.coded:  # whole blocks of codes
                variant = replace(variant, block=max(variant.block, CODE_BLOCK))
            emas = (DTYPES[torch.float32],) * variant.emas
            self.launches.append((variant, (gradient, param, master, *moments, *emas), chunks))

    def _write_gradients(self, gradients: Column, changes: int) -> None:
        super()._write_gradients(gradients, changes)
        self.gradients_aligned = not bool((self.inputs.gradients() % 16).any())

    def _point_to_inputs(self) -> None:
        self.placed_gradients, *self.placed_settings = self.inputs.parts()

    @ranged("hdet.step")
    def _run(self, carried: Tensor | None = None) -> None:
        options = self._options
        assert options is not None and carried is None
        takes_norm = options.max_norm != 0
        if takes_norm:
            self._sum_squares()
        self._derive(
            self.one if options.grad_scale is None else options.grad_scale,
            self.zero if options.found_inf is None else options.found_inf,
            self.chunks.number if takes_norm else 0,
        )
        launches = [
            (self._variant(variant, options.zero_gradients, kinds), chunks)
            for variant, kinds, chunks in self.launches
        ]
        if self.num_sums:
            self._sum_terms(launches)
        for launch in launches:
            self._update(*launch)

    def _variant(
        self, variant: StepVariant, zero_gradients: bool, kinds: tuple[int, ...]
    ) -> StepVariant:
        vector = vector_of(kinds, self.aligned and self.gradients_aligned)
        return replace(variant, zero_gradients=zero_gradients, vector=vector)

    def _sum_terms(self, launches: list[tuple[StepVariant, Tensor]]) -> None:
        """What the rule sums over tensors, and what of their rows depends on it."""
        t, rule = self.tensors, RULES[self.tensors.rule]
        places = (self.spans, self.sums, max(self.chunks.longest, 1))
        for variant, chunks in launches:
            tables = (*self._tables(chunks), *places)
            self.memory.launch(sum_terms, len(chunks), *tables, SUMS=self.num_sums, V=variant)
        tables = (self.placed_gradients, *self.placed_settings, *places)
        counts = (t.num_groups, t.num_replicas)
        self.memory.launch(
            hyper.derive_again,
            self.count,
            *(*tables, self.numbers[self.count :], self.rows, *counts),
            RULE=t.rule,
            FIRST=rule.first_step,
            SUMS=self.num_sums,
            BLOCK=TABLE_BLOCK,
        )

    def _sum_squares(self) -> None:
        tables = (self.placed_chunks, self.placed_gradients, self.partials)
        block = min(block_for(self.chunks.longest), TABLE_BLOCK)
        self.memory.launch(
            norm.squares, self.chunks.number, *tables, ALIGNED=self.gradients_aligned, BLOCK=block
        )

    def _derive(self, grad_scale: Tensor, found_inf: Tensor, num_partials: int) -> None:
        t, count = self.tensors, self.count
        groups, columns = self.numbers[count:], len(self.addresses) // count
        block = block_for(count) if interpreted else DERIVED
        self.memory.launch(
            hyper.derive,
            -(-count // block),
            self.placed_gradients,
            *self.placed_settings,
            self.partials,
            grad_scale,
            found_inf,
            self.addresses,
            columns,
            groups,
            self.rows,
            self.replica_rows,
            self.control,
            num_partials,
            count,
            t.num_groups,
            t.num_replicas,
            *self._emas(self.ema_settings),
            EMAS=len(t.averages),
            RULE=t.rule,
            COUPLED=RULES[t.rule].coupled,
            FIRST=RULES[t.rule].first_step,
            SUMS=self.num_sums,
            TENSORS=block,
            BLOCK=TABLE_BLOCK,
            num_warps=8,
        )

    def _emas(self, *more: Tensor | None) -> tuple[Tensor, ...]:
        """Their addresses and rows, with `more` between; of none any tables."""
        tables = (self.emas, *more, self.ema_rows)
        return tuple(self.addresses if table is None else table for table in tables)

    def _tables(self, chunks: Tensor) -> tuple[Tensor, ...]:
        """What a kernel that sees elements reads."""
        tables = (chunks, self.placed_gradients, self.addresses, self.numbers)
        return (*tables, self.rows, self.replica_rows, self.control, self.random, *self._emas())

    def _update(self, variant: StepVariant, chunks: Tensor) -> None:
        slices = slices_of(self.chunks.longest, coded=variant.coded)
        self.memory.launch(
            update,
            len(chunks) * slices,
            *self._tables(chunks),
            slices,
            V=variant,
            **registers_for(variant.replicas, coded=variant.coded),
        )
