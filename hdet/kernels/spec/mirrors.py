"""What a plan keeps on a device: nothing is copied twice, tables stay in memory for as long as a
stream or a CUDA graph may read them, and while a graph is captured nothing is copied and no
kernel is launched for the first time."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import NoReturn

import torch
from torch import Tensor

from ...tensors.profiling import ranged

captured: list[list[Tensor]] = []
"""the tables of plans that a CUDA graph has captured: it holds their addresses, and may outlive the
plan"""


# What follows is all that a test replaces to run plans of the "cuda" backend against the kernels'
# host build (tests/kernels/shim).
def _current_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """The device is torch's current one inside.

    Afterwards that is what it was, without a context on a GPU that nobody has used.
    """
    return torch.cuda.device(device)


def _capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with _on(device):
        return torch.cuda.is_current_stream_capturing()


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _placed(table: Tensor, device: torch.device) -> Tensor:
    """A copy on the device. This waits, so that every stream may read it."""
    return table.to(device)


def _copy_without_waiting(table: Tensor, placed: Tensor) -> None:
    """Through pinned memory of torch's, which keeps it until the copy is done: `table` may
    change right away."""
    placed.copy_(table.pin_memory() if placed.is_cuda else table, non_blocking=True)


def _used_on(stream: torch.cuda.Stream, table: Tensor) -> None:
    """Keeps the table's memory, once it is dropped, until this stream has done all it was given
    before."""
    table.record_stream(stream)


class DeviceMemory:
    """The tables of one plan in the memory of a device, with copies in host memory of what has been
    copied there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: list[Tensor] = []
        self._bits: dict[int, Tensor] = {}  # by the table's address on the device
        self._unsure: set[int] = (
            set()
        )  # tables that somebody began to bring there: an exception may have come between
        self._launched: set[Hashable] = set()
        self._streams: set[int] = set()  # those that have used the tables
        self._captured = 0  # so many of the first tables may be read by a CUDA graph

    def place(self, table: Tensor) -> Tensor:
        """A table that a plan keeps, where kernels read it.

        Raises RuntimeError where a new one cannot be made.
        """
        if _capturing(self.device):
            _refuse(
                "hdet prepares an operation for its tensors at the first call, which cannot be "
                "captured"
            )
        placed = _placed(table, self.device)
        self._tables.append(placed)
        self._streams.clear()
        return placed

    def room(self, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Numbers that kernels fill for each other."""
        return self.place(torch.zeros(count, dtype=dtype, device="cpu"))

    @ranged("hdet.upload")
    def refresh(self, table: Tensor, placed: Tensor) -> None:
        """`table` may have changed in host memory: what place() returned for it follows on the
        current stream, without waiting, unless it is the same. Raises RuntimeError where it
        cannot be copied."""
        if self.differs(table, placed):
            _copy_without_waiting(table, placed)
            self.note(table, placed)

    def differs(self, table: Tensor, placed: Tensor) -> bool:
        """Whether `table` may not be what place() returned for it, on the device: then it is to
        be brought there, and `note` follows. Raises RuntimeError if so under capture, when
        nothing can be."""
        place = placed.data_ptr()
        mirror = None if place in self._unsure else self._bits.get(place)
        if mirror is not None and torch.equal(_bits(table), mirror):
            return False
        if _capturing(self.device):
            _refuse("gradients have moved, or hyperparameters have changed, since the last step")
        self._unsure.add(place)
        return True

    def note(self, table: Tensor, placed: Tensor) -> None:
        """The device has this table now, or a copy or a kernel that brings it is on its way."""
        self._bits[placed.data_ptr()] = _bits(table).clone()
        self._unsure.discard(placed.data_ptr())

    def is_captured(self, placed: Tensor) -> bool:
        """Has a CUDA graph captured what place() returned?"""
        return any(table is placed for table in self._tables[: self._captured])

    def replayed(self, placed: Tensor) -> Tensor | None:
        """A copy in host memory of what place() returned, if a CUDA graph has captured it and none
        is being captured now; else None."""
        if not self.is_captured(placed) or _capturing(self.device):
            return None
        return self._bits[placed.data_ptr()].view(placed.dtype).clone()

    def check_launched(self, kernel: Hashable) -> None:
        """Before each launch.

        Raises RuntimeError for the first launch of a kernel where it would be captured:
        compiling it or loading its code is not allowed there."""
        if kernel in self._launched:
            return
        if _capturing(self.device):
            _refuse(
                "this step takes a norm, or ends, as no step before it did (max_grad_norm, "
                "zero_gradients)"
            )
        self._launched.add(kernel)

    def stream(self) -> int:
        """The current stream, to launch on.

        It may be another one at each call, and may be captured.
        """
        stream = _current_stream(self.device)
        if self._captured < len(self._tables) and _capturing(self.device):
            if not self._captured:
                captured.append(self._tables)
            self._captured = len(self._tables)
        if stream.cuda_stream not in self._streams:
            for table in self._tables:
                _used_on(stream, table)
            self._streams.add(stream.cuda_stream)
        return stream.cuda_stream


def _bits(table: Tensor) -> Tensor:
    """As bytes: an address among doubles is a number that a processor may take for 0."""
    return table.view(torch.uint8)


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"{what}. A CUDA graph replays what it captured, so its step must find everything on the "
        "device: before the capture run one step with the same parameters as a warm-up, "
        "afterwards leave gradients where they are (zero_grad(set_to_none=False), or "
        "zero_gradients=True), and after the last change of a hyperparameter call "
        "optimizer.write_hyperparameters()"
    )
