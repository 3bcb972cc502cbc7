"""The tables of a plan, in the layout of csrc/core/plan.h: what kernels read of tensors and of
settings, and how it reaches the device."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ..rules import StepSettings
from ..rules.trace import MAX_MOMENTS
from ..tensors.profiling import ranged
from .checks import check_settings
from .interface import Column, StepOptions, StepTensors
from .numbers import CODES

DTYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, CODES: 4}
DTYPES |= {torch.int16: 2, torch.int8: 4}
"""of csrc/core/numbers.h: DType, and Master"""
FORMAT_PLACES = (0, 1, 2, *range(4, 4 + MAX_MOMENTS))
"""of gradient, parameter, master and moments in Chunk::formats, in four bits"""
CHUNK_ELEMENTS, LEAST_CHUNK_ELEMENTS = 16384, 2048
"""64 KiB a stream of float32: a step's four streams fit an L2 cache. Whole blocks of codes."""


def formats(count: int, *columns: Column | None, stochastic: bool = False) -> list[int]:
    """Chunk::formats (csrc/core/numbers.h) of each tensor: how gradient, parameter, master and
    moments are stored."""
    packed = [int(stochastic) << 12] * count
    for place, column in zip(FORMAT_PLACES, columns, strict=False):
        for i, tensor in enumerate(column or ()):
            packed[i] |= DTYPES[None if tensor is None else tensor.dtype] << 4 * place
    return packed


def chunk_length(elements: Sequence[int], least: int) -> int:
    """How long chunks are, a power of 2: so that there are `least` of them, as far as the shortest
    allow.

    A GPU has several blocks on each multiprocessor; a model of a million parameters in 64 long
    chunks would leave half of an H200 idle.
    """
    total, length = sum(elements), CHUNK_ELEMENTS
    while length > LEAST_CHUNK_ELEMENTS and total < least * length:
        length //= 2
    return length


class Chunks(NamedTuple):
    """Some tensors cut into chunks."""

    table: Tensor
    """(number, 4) int64, of which each row is a Chunk"""
    longest: int
    """Elements of the longest chunk."""

    @property
    def number(self) -> int:
        return len(self.table)

    def spans(self, elements: Sequence[int]) -> Tensor:
        """(tensors, 2) int64: the number of each tensor's first chunk, where tensors come in turn,
        and how many elements it has."""
        sizes = _numbers(elements)
        counts = -(-sizes // max(self.longest, 1))
        return torch.stack((counts.cumsum(0) - counts, sizes), 1)


def chunks_of(
    elements: Sequence[int],
    packed: Sequence[int],
    least: int,
    order: Sequence[int],
) -> Chunks:
    """Tensors of so many elements and of these formats cut into chunks, if possible into `least`.
    `order`: of the tensors in the table."""
    length = chunk_length(elements, least)
    tensors = _numbers(order)
    sizes = _numbers(elements)[tensors]
    counts = (sizes + length - 1) // length
    owners = torch.repeat_interleave(counts)
    offsets = (_numbers(range(len(owners))) - (counts.cumsum(0) - counts)[owners]) * length
    lengths = (sizes[owners] - offsets).clamp(max=length)
    begins = lengths.cumsum(0) - lengths
    tensors = tensors[owners]
    table = torch.stack((offsets, begins, tensors | lengths << 32, _numbers(packed)[tensors]), 1)
    return Chunks(table, min(length, max(elements, default=0)))


def _numbers(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def address_table(*columns: Column) -> Tensor:
    """(tensors * columns,) addresses as int64, a row for each tensor; 0 where there is none."""
    found = [0 if t is None else t.data_ptr() for t in itertools.chain(*columns)]
    return _numbers(found).view(len(columns), -1).T.reshape(-1)


CALL_SETTINGS = 1
GROUP_SETTINGS = len(StepSettings._fields) - 1
"""in doubles, as in csrc/core/hyper.h: CallSettings, and GroupSettings with the fields of
StepSettings but for the multipliers"""


def count_settings(num_groups: int, num_replicas: int) -> int:
    """The length of settings_numbers."""
    return CALL_SETTINGS + num_groups * (GROUP_SETTINGS + num_replicas)


def settings_numbers(settings: Sequence[StepSettings], options: StepOptions) -> list[float]:
    """The table, in the order of csrc/core/hyper.h: of the call, of each group,
    rho[groups][replicas] (Eq. 1).

    A rate in a tensor is 0 here: the kernels read it where it is. Nothing is checked.
    """
    numbers = [options.max_norm]
    for s in settings:
        numbers += (0.0 if isinstance(s.lr, Tensor) else s.lr, *s[2:])
    for s in settings:
        numbers += s.multipliers
    return numbers


Rate = tuple[int, torch.dtype | None, torch.Size | None]
"""address, type and shape of a learning rate in device memory; address 0: it is a number of the
table"""


class SettingsTable:
    """What a plan's device has of settings: they are checked and written where they differ from it.

    Another object for a rate in the same memory, like the `detach()` of each step, is the same
    rate.
    """

    def __init__(
        self, tensors: StepTensors, write: Callable[[list[float], list[int]], object]
    ) -> None:
        """`write` gets the numbers, and for each group the address of its rate, or 0."""
        self.tensors, self._write = tensors, write
        self._numbers: list[float] = []
        self._rates: list[Rate] = []
        self._tensors: list[object] = []  # kept alive

    def take(self, settings: Sequence[StepSettings], options: StepOptions) -> None:
        numbers, rates = settings_numbers(settings, options), [_rate(s.lr) for s in settings]
        if numbers == self._numbers and rates == self._rates:
            return
        check_settings(settings, self.tensors)
        self._write(numbers, [address for address, _, _ in rates])
        self._numbers, self._rates, self._tensors = numbers, rates, [s.lr for s in settings]


def _rate(lr: float | Tensor) -> Rate:
    return (lr.data_ptr(), lr.dtype, lr.shape) if isinstance(lr, Tensor) else (0, None, None)


class Inputs:
    """Gradients (int64), settings (float64, csrc/core/hyper.h) and addresses of rates (int64) of
    one plan, in one table: at most one copy a step, and none where nothing has changed.

    A graph that has captured a step replays it with the gradients it was captured with: a later
    step with others gets a table of its own. Settings go to all of them.
    """

    def __init__(self, memory: HostMemory, tensors: StepTensors) -> None:
        self.memory, self.words = memory, len(tensors.params[0])
        self._sizes = (
            self.words,
            count_settings(tensors.num_groups, tensors.num_replicas),
            tensors.num_groups,
        )
        self.table = torch.zeros(sum(self._sizes), dtype=torch.int64, device="cpu")
        # Calls of torch for what a step writes would take a third of its time on the host.
        self._gradients = self.table[: self.words]
        self._bytes = (ctypes.c_char * self.table.nbytes).from_address(self.table.data_ptr())
        self.placed = memory.place(self.table)
        self._replayed: list[tuple[Tensor, Tensor]] = []
        self._moved = self._changed = True

    def parts(self) -> tuple[Tensor, ...]:
        """Where kernels find gradients, settings and rates."""
        gradients, settings, rates = self.placed.split(self._sizes)
        return gradients, settings.view(torch.float64), rates

    def gradients(self) -> Tensor:
        """To be written to: the addresses of all gradients, in host memory."""
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


class HostMemory:
    """Where a plan's tables lie: in host memory, where a CPU's kernels read them."""

    carries = 0
    """words of settings that a kernel can bring along; here it reads them where they are"""
    chunks = 0
    """at least so many keep the device busy; threads of a CPU cut chunks where they like"""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place(self, table: Tensor) -> Tensor:
        """A table that a plan keeps, where kernels read it.

        Raises RuntimeError where a new one cannot be made.
        """
        return table

    def room(self, count: int) -> Tensor:
        """Bytes that kernels fill for each other, which begin as 0."""
        return self.place(torch.zeros(count, dtype=torch.uint8, device="cpu"))

    def refresh(self, table: Tensor, placed: Tensor) -> None:
        """`table` may have changed in host memory: what place() returned for it follows on the
        current stream, without waiting, unless it is the same. Raises RuntimeError where it cannot
        be copied."""

    def differs(self, table: Tensor, placed: Tensor) -> bool:
        """Whether `table` may not be what place() returned for it, on the device: then it is to be
        brought there, and `note` follows. Raises RuntimeError where nothing can be."""
        return False

    def note(self, table: Tensor, placed: Tensor) -> None:
        """The device has this table now, or a copy or a kernel that brings it is on its way."""

    def is_captured(self, placed: Tensor) -> bool:
        """Has a CUDA graph captured what place() returned?"""
        return False

    def replayed(self, placed: Tensor) -> Tensor | None:
        """A copy in host memory of what place() returned, if a CUDA graph has captured it and none
        is being captured now: this step need not write to it. Else None."""
        return None


# What a plan keeps on a device: nothing is copied twice, tables stay in memory for as long as a
# stream or a CUDA graph may read them, and while a graph is captured nothing is copied and no
# kernel is launched for the first time.

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
    if device.type != "cuda":
        return 0
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


BLOCKS = 16
"""of a kernel for each multiprocessor: two waves of the eight that fit at most"""


class DeviceMemory(HostMemory):
    """The tables of one plan in the memory of a device, with copies in host memory of what has been
    copied there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.chunks = BLOCKS * _multiprocessors(device)
        self._tables: list[Tensor] = []
        self._bits: dict[int, Tensor] = {}  # by the table's address on the device
        # tables that somebody began to bring there: an exception may have come between
        self._unsure: set[int] = set()
        self._launched: set[Hashable] = set()
        self._streams: set[int] = set()  # those that have used the tables
        self._captured = 0  # so many of the first tables may be read by a CUDA graph

    def place(self, table: Tensor) -> Tensor:
        if _capturing(self.device):
            _refuse(
                "hdet prepares an operation for its tensors at the first call, which cannot be "
                "captured"
            )
        placed = _placed(table, self.device)
        self._tables.append(placed)
        self._streams.clear()
        return placed

    @ranged("hdet.upload")
    def refresh(self, table: Tensor, placed: Tensor) -> None:
        if self.differs(table, placed):
            _copy_without_waiting(table, placed)
            self.note(table, placed)

    def differs(self, table: Tensor, placed: Tensor) -> bool:
        place = placed.data_ptr()
        mirror = None if place in self._unsure else self._bits.get(place)
        if mirror is not None and torch.equal(_bits(table), mirror):
            return False
        if _capturing(self.device):
            _refuse("gradients have moved, or hyperparameters have changed, since the last step")
        self._unsure.add(place)
        return True

    def note(self, table: Tensor, placed: Tensor) -> None:
        self._bits[placed.data_ptr()] = _bits(table).clone()
        self._unsure.discard(placed.data_ptr())

    def is_captured(self, placed: Tensor) -> bool:
        return any(table is placed for table in self._tables[: self._captured])

    def replayed(self, placed: Tensor) -> Tensor | None:
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
