"""An optimizer step whose kernels read the tables of tables.py: what the native and the Triton
backend have alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..rules import RULES, SCALARS, StepSettings
from . import native
from .checks import check_gradients, check_gradients_apart, check_options
from .interface import PLAIN, Column, StepOptions, StepTensors
from .numbers import codebook
from .tables import (
    DTYPES,
    Chunks,
    HostMemory,
    Inputs,
    SettingsTable,
    address_table,
    chunks_of,
    formats,
)

CONTROL_BYTES, ROW_BYTES, REPLICA_ROW_BYTES, EMA_ROW_BYTES = 16, 4 * (2 + SCALARS), 8, 8
"""of csrc/core/hyper.h and rules.h: Control, HyperRow, ReplicaRow, EmaRow"""


class NoReader:
    """In the place of csrc/tensors.h where there is no native module: each step checks all
    gradients in full."""

    EMPTY = 64
    """where an empty gradient lies, which is there and which nobody reads"""
    UNUSUAL = -1

    def read(self, gradients: Column) -> int:
        return self.UNUSUAL

    def forget(self) -> None:
        """There is nothing that it knows."""


def gradient_reader(params: Sequence[Tensor]) -> Any:
    """Looks at their gradients in each step: the native module's, or NoReader."""
    if native.torch_interface is None:
        return NoReader()
    return native._C.GradientReader(native.torch_interface, list(params))


class TableStepPlan:
    """A subclass says where its kernels find the tables, and calls them."""

    by_format: ClassVar[bool] = False
    """kernels are compiled for one format each: chunks of one lie together"""

    def __init__(self, tensors: StepTensors, memory: HostMemory) -> None:
        t = self.tensors = tensors  # keeps alive what the tables point to
        self.memory, self.count = memory, len(t.params[0])
        self.elements = [param.numel() for param in t.params[0]]
        self.reader = gradient_reader(t.params[0])
        self.gradient_types = [DTYPES[p.dtype] for p in t.params[0]]  # as gradients mostly are
        self._apart = False  # are gradients known to be?
        self._retyped = False  # the chunks' formats have changed, and the device does not know it
        nothing: Column = [None] * self.count
        masters = [nothing] * t.num_replicas if t.masters is None else t.masters
        scales = [nothing] * len(t.moments) if t.scales is None else t.scales
        self.addresses = memory.place(
            address_table(*t.params, *masters, *t.moments, *scales, t.steps)
        )
        self.emas = self.ema_settings = None
        if t.averages:
            columns = [column for sets in t.emas for column in sets]
            self.emas = memory.place(address_table(*columns, t.ema_steps))
            numbers = [one.numbers() for one in t.averages]
            self.ema_settings = memory.place(
                torch.tensor(numbers, dtype=torch.float64, device="cpu")
            )
        self.codebooks = memory.place(codebook()) if t.coded() else None
        self.chunks = self._cut()
        self.num_sums = len(RULES[t.rule].trace.sums)
        self.numbers = memory.place(
            torch.tensor([*t.numbers, *t.groups], dtype=torch.int32, device="cpu")
        )
        self.spans = memory.place(self.chunks.spans(self.elements)) if self.num_sums else None
        self.placed_chunks = memory.place(self.chunks.table)
        self._make_room()
        self.inputs = Inputs(memory, t)
        self._settings = SettingsTable(t, self.inputs.write_settings)
        self._options: StepOptions | None = None
        self._point_to_chunks()
        self._point_to_inputs()

    def _cut(self) -> Chunks:
        t = self.tensors
        masters, stochastic = None if t.masters is None else t.masters[0], t.stochastic is not None
        packed = formats(self.count, None, t.params[0], masters, *t.moments, stochastic=stochastic)
        self.packed = [one | kind for one, kind in zip(packed, self.gradient_types, strict=True)]
        every = range(self.count)
        order = sorted(every, key=self.packed.__getitem__) if self.by_format else every
        return chunks_of(self.elements, self.packed, self.memory.chunks, order)

    def _make_room(self) -> None:
        """Memory for what the derive phase, the norm and a rule's sums write."""
        count = self.count
        of_replicas = count * self.tensors.num_replicas * REPLICA_ROW_BYTES
        of_emas = count * len(self.tensors.averages) * EMA_ROW_BYTES
        of_chunks = 8 * self.chunks.number
        sizes = (
            *(CONTROL_BYTES, count * ROW_BYTES, of_replicas, of_emas),
            *(of_chunks, self.num_sums * of_chunks),
        )
        padded = [-(-size // 16) * 16 for size in sizes]
        parts = self.memory.room(sum(padded)).split(padded)
        self.control, self.rows, self.replica_rows, self.ema_rows, partials, sums = (
            part[:size].view(torch.float32) for part, size in zip(parts, sizes, strict=True)
        )
        self.partials, self.sums = partials.view(torch.float64), sums.view(torch.float64)
        self.skipped, self.norm, _, self.unscaling = self.control

    def _point_to_chunks(self) -> None:
        """They are new, or elsewhere."""
        raise NotImplementedError

    def _point_to_inputs(self) -> None:
        """They are elsewhere."""
        raise NotImplementedError

    def _run(self, carried: Tensor | None = None) -> None:
        """Calls the kernels. `carried`: settings that the derive phase brings along."""
        raise NotImplementedError

    def step(
        self, gradients: Column, settings: Sequence[StepSettings], options: StepOptions = PLAIN
    ) -> None:
        self._take_gradients(gradients)
        if options.zero_gradients and not self._apart:
            check_gradients_apart(gradients, self.tensors.numbers)
            self._apart = True
        self._take_settings(settings, options)
        carried = self.inputs.to_carry(self.memory.carries)
        if carried is None:
            self._refresh()
            self._run()
        else:
            self._run(carried)
            self.inputs.was_carried()

    def upload(self, settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        self._take_settings(settings, options)
        self._refresh()

    def gradient_norms(self) -> Tensor:
        owners = self.placed_chunks.view(torch.int32)[:, 4]  # Chunk::tensor
        sums = self.partials.new_zeros(self.count).index_add_(0, owners, self.partials)
        return (sums.sqrt() * self.unscaling).float()

    def _take_settings(self, settings: Sequence[StepSettings], options: StepOptions) -> None:
        if options is not self._options:
            check_options(options, self.tensors)
            self._take_options(options)
        self._settings.take(settings, options)

    def _take_options(self, options: StepOptions) -> None:
        self._options = options

    def _refresh(self) -> None:
        if self.inputs.refresh():
            self._point_to_inputs()

    def _take_gradients(self, gradients: Column) -> None:
        """Writes where the gradients lie and how they are stored, if that has changed.

        Raises for gradients that cannot be used.
        """
        changes = self.reader.read(gradients)
        if changes == 0:
            return
        self._apart = False
        try:
            self._write_gradients(gradients, changes)
        except BaseException:
            self.reader.forget()
            raise

    def _write_gradients(self, gradients: Column, changes: int) -> None:
        # not plain, no native module, or a torch that it does not know: usable?
        unusual = changes == self.reader.UNUSUAL
        retyped = unusual or changes & self.reader.RETYPED != 0  # the first ones, mostly
        if unusual:
            check_gradients(gradients, self.tensors.params[0], self.tensors.numbers)
            addresses = [
                0 if g is None else g.data_ptr() if g.numel() else self.reader.EMPTY
                for g in gradients
            ]
            self.inputs.gradients().copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
            types = [0 if g is None else DTYPES[g.dtype] for g in gradients]
        else:
            self.reader.write_addresses(self.inputs.gradients().data_ptr())
            types = self.reader.types
        if retyped:
            self._take_types(types)

    def _take_types(self, types: Sequence[int]) -> None:
        """0: as before."""
        types = [new or old for new, old in zip(types, self.gradient_types, strict=True)]
        if types != self.gradient_types:  # rare: at the first step, if at all
            self.gradient_types, self._retyped = types, True
            self.chunks.table.copy_(self._cut().table)
        if not self._retyped:  # perhaps by an earlier call, which was refused under capture
            return
        if self.memory.is_captured(self.placed_chunks):
            # a replay goes on with the gradients that it was captured with
            self.placed_chunks = self.memory.place(self.chunks.table)
        else:
            self.memory.refresh(self.chunks.table, self.placed_chunks)
        self._retyped = False
        self._point_to_chunks()
