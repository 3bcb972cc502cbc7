"""What a plan's tables on a device hold, and which kernels it has launched: nothing is copied twice, and while a CUDA graph is captured
nothing is copied and no kernel is launched for the first time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NoReturn

import torch
from torch import Tensor

captured: list[list[Tensor]] = []
"""the tables of plans that a CUDA graph has captured: it holds their addresses, and may outlive the plan"""


class Mirrors:
    """Copies in host memory of what has been copied to a device, and names of kernels that were launched there. `capturing` says whether
    its stream is being captured."""

    def __init__(self, capturing: Callable[[], bool]) -> None:
        self._capturing = capturing
        self._bits: dict[int, Tensor] = {}  # by the table's address on the device
        self._launched: set[Hashable] = set()

    def check_new(self) -> None:
        """Raises RuntimeError where a new table cannot be made."""
        if self._capturing():
            _refuse("hdet prepares an operation for its tensors at the first call, which cannot be captured")

    def check_launched(self, kernel: Hashable) -> None:
        """Before each launch. Raises RuntimeError for the first launch of a kernel where it would be captured: compiling it or loading
        its code is not allowed there."""
        if kernel in self._launched:
            return
        if self._capturing():
            _refuse("this step takes a norm, or ends, as no step before it did (max_grad_norm, zero_gradients, how it is averaged)")
        self._launched.add(kernel)

    def refresh(self, table: Tensor, placed: Tensor, copy: Callable[[Tensor, Tensor], None]) -> None:
        """Copies the table to the device, unless it is what the device has. Raises RuntimeError where it cannot be copied."""
        bits = table.view(torch.uint8)  # an address among doubles is a number that a processor may take for 0
        mirror = self._bits.get(placed.data_ptr())
        if mirror is not None and torch.equal(bits, mirror):
            return
        if self._capturing():
            _refuse("gradients have moved, or hyperparameters have changed, since the last step")
        copy(table, placed)
        self._bits[placed.data_ptr()] = bits.clone()


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"{what}. A CUDA graph replays what it captured, so its step must find everything on the device: before the capture run one step "
        "with the same parameters as a warm-up, afterwards leave gradients where they are (zero_grad(set_to_none=False), or "
        "zero_gradients=True), and after the last change of a hyperparameter call optimizer.write_hyperparameters()"
    )
