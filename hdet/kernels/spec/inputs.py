"""The one table that the host writes for a step: where the gradients lie, the settings, and where
rates in device memory lie."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .interface import StepTensors
from .settings import count_settings


class TableMemory(Protocol):
    """What keeps tables where kernels read them: on a CPU or on a device (mirrors.py)."""

    def place(self, table: Tensor) -> Tensor: ...

    def refresh(self, table: Tensor, placed: Tensor) -> None: ...

    def differs(self, table: Tensor, placed: Tensor) -> bool:
        """Whether `table` is not what kernels find there."""

    def note(self, table: Tensor, placed: Tensor) -> None:
        """A kernel has brought what was changed."""

    def replayed(self, placed: Tensor) -> Tensor | None:
        """A copy in host memory of a table that a CUDA graph has captured and that this step need
        not write to; None for any other."""


class Inputs:
    """Gradients (int64), settings (float64, csrc/core/hyper.h) and addresses of rates (int64) of
    one plan, in one table: at most one copy a step, and none where nothing has changed.

    A graph that has captured a step replays it with the gradients it was captured with: a later
    step with others gets a table of its own. Settings go to all of them.
    """

    def __init__(self, memory: TableMemory, tensors: StepTensors, words: int) -> None:
        """`words`: numbers for all gradients together."""
        self.memory, self.words = memory, words
        self._sizes = (
            words,
            count_settings(tensors.num_groups, tensors.num_replicas),
            tensors.num_groups,
        )
        self.table = torch.zeros(sum(self._sizes), dtype=torch.int64, device="cpu")
        # Calls of torch for what a step writes would take a third of its time on the host.
        self._gradients = self.table[:words]
        self._bytes = (ctypes.c_char * self.table.nbytes).from_address(self.table.data_ptr())
        self.placed = memory.place(self.table)
        self._replayed: list[tuple[Tensor, Tensor]] = []
        self._moved = self._changed = True

    def addresses(self) -> tuple[int, ...]:
        """Where kernels find gradients, settings and rates."""
        start, (words, numbers, _) = self.placed.data_ptr(), self._sizes
        return start, start + 8 * words, start + 8 * (words + numbers)

    def parts(self) -> tuple[Tensor, ...]:
        """The same as tensors."""
        gradients, settings, rates = self.placed.split(self._sizes)
        return gradients, settings.view(torch.float64), rates

    def gradients(self) -> Tensor:
        """To be written to: the numbers of all gradients in host memory."""
        self._moved = True
        return self._gradients

    def write_settings(self, numbers: Sequence[float], rates: Sequence[int]) -> None:
        self._changed = True
        struct.pack_into(
            f"={len(numbers)}d{len(rates)}q", self._bytes, 8 * self.words, *numbers, *rates
        )

    def to_carry(self, most: int) -> Tensor | None:
        """Settings, if nothing else has changed and they are at most so many words: a step may
        bring them along, and was_carried() follows."""
        words = self._sizes[1] + self._sizes[2]
        if (
            not self._changed
            or self._moved
            or self._replayed
            or words > most
            or not self.memory.differs(self.table, self.placed)
        ):
            return None
        return self.table[self.words :]

    def was_carried(self) -> None:
        self.memory.note(self.table, self.placed)
        self._changed = False

    def refresh(self) -> bool:
        """What has been written goes to the device.

        Returns whether that is another place than before.
        """
        replayed = self.memory.replayed(self.placed) if self._moved else None
        if replayed is not None:
            self._replayed.append((replayed, self.placed))
            self.placed = self.memory.place(self.table)
        if self._moved or self._changed:
            self.memory.refresh(self.table, self.placed)
        if self._changed:
            for table, placed in self._replayed:
                table[self.words :] = self.table[self.words :]
                self.memory.refresh(table, placed)
        self._moved = self._changed = False
        return replayed is not None
