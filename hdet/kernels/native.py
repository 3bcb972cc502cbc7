"""The compiled module, or the reason why it is not there; and the tables its kernels read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch  # before _C: both then share torch's OpenMP runtime (csrc/cpu/dispatch.cpp)
from torch import Tensor

from .checks import check_gradients

INTERFACE = 2
"""the functions of csrc/bindings.cpp this package calls; counted up there and here whenever they change"""

try:
    from hdet import _C
except ImportError as error:  # reported by name wherever a native backend is asked for
    missing: str | None = f"hdet's native module cannot be imported: {error}. Reinstall hdet (pip install -e .) with a C++ compiler"
else:
    # After an update without a new build, a missing function would otherwise surface in the middle of a run.
    stale = getattr(_C, "INTERFACE", 0) != INTERFACE
    missing = "hdet's native module was built from other sources: reinstall hdet (pip install -e .)" if stale else None


def bytes_for(count: int) -> Tensor:
    """Memory on the CPU for tables, 16-byte aligned: torch aligns to 64."""
    return torch.empty(count, dtype=torch.uint8)


def address_table(*columns: Sequence[Tensor]) -> Tensor:
    """Addresses of tensors as int64, one column after the other."""
    addresses = [tensor.data_ptr() for tensor in itertools.chain(*columns)]
    table = torch.empty(len(addresses), dtype=torch.int64)
    _C.write_addresses(table.data_ptr(), addresses)
    return table


def chunk_table(tensors: Iterable[Tensor], rows: Sequence[int]) -> Tensor:
    """The tensors cut into chunks (csrc/core/plan.h), as bytes."""
    elements = [tensor.numel() for tensor in tensors]
    table = bytes_for(_C.count_chunks(elements) * _C.CHUNK_BYTES)
    _C.write_chunks(table.data_ptr(), elements, rows)
    return table


def num_chunks(table: Tensor) -> int:
    return table.numel() // _C.CHUNK_BYTES


def gradient_addresses(gradients: Sequence[Tensor], params: Sequence[Tensor], shapes: Sequence[torch.Size], device: int) -> list[int]:
    """The gradients' addresses, after a check that costs little for each: it runs in every step.

    `device` is the parameters' get_device(). Anything unusual goes to the checks that can say what it is.
    """
    try:
        addresses = [g.data_ptr() for g in gradients]
        usual = (
            [g.shape for g in gradients] == shapes
            and False not in [g.is_contiguous() for g in gradients]
            and {g.dtype for g in gradients} <= {torch.float32}
            and {g.get_device() for g in gradients} <= {device}
            and (0 not in addresses or all(a != 0 or g.numel() == 0 for a, g in zip(addresses, gradients, strict=True)))
        )
    except (RuntimeError, AttributeError):  # sparse tensors have no address; None has no attributes
        usual = False
    if not usual:
        check_gradients(gradients, params)
    return addresses


class StepTables:
    """The parts of an AdamW plan that every device needs, in host memory.

    `addresses` has the columns params, exp_avgs, exp_avg_sqs. What changes with each step (hyperparameter rows, then gradient
    addresses) is written together by `write_step`, so that a device needs one small copy.
    """

    def __init__(self, params: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], rows: Sequence[int]) -> None:
        self.num_tensors = len(params)
        self.chunks = chunk_table(params, rows)
        self.num_chunks = num_chunks(self.chunks)
        self.addresses = address_table(params, exp_avgs, exp_avg_sqs)
        self.row_bytes = len(set(rows)) * _C.ROW_BYTES
        self.step_bytes = self.row_bytes + self.num_tensors * 8

    def write_step(self, out: Tensor, settings: Sequence[Sequence[float]], gradients: Sequence[int]) -> None:
        """Fills `out` (step_bytes of host memory). Each entry of settings ends with the number of the step, from 1."""
        address = out.data_ptr()
        _C.write_adamw_rows(address, settings)
        _C.write_addresses(address + self.row_bytes, gradients)
