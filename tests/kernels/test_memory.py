"""What travels to a device between steps, and what a capture refuses: hdet/kernels/tables.py,
on tables in host memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet import kernels
from hdet.kernels import StepSettings, tables
from hdet.kernels.native import cuda
from hdet.kernels.native.plans import Memory, NativeStepPlan

from .cases import of_sgd


def check_rates(backend: str) -> None:
    """A rate that is another object for the same memory in each step, as `detach()` makes it,
    travels once."""
    p, g, rate = torch.zeros(3), torch.ones(3), torch.tensor(0.5)
    plan = kernels.step_plan(of_sgd([p]), backend)
    memory, travelled = plan.memory, []  # type: ignore[attr-defined]
    refresh = memory.refresh
    memory.refresh = lambda table, placed: (travelled.append(len(table)), refresh(table, placed))
    plan.step([g], [StepSettings(rate.detach())])
    assert travelled
    travelled.clear()
    for _ in range(2):
        plan.step([g], [StepSettings(rate.detach())])
    assert not travelled and p.tolist() == [-1.5] * 3
    for other in (
        torch.zeros(2),
        torch.zeros(1, dtype=torch.float64),
        torch.empty((), device="meta"),
    ):
        with pytest.raises((ValueError, TypeError), match="lr of group 0"):
            plan.step([g], [StepSettings(other)])
    plan.step([g], [StepSettings(rate.clone().fill_(1.0))])
    assert travelled and p.tolist() == [-2.5] * 3


def test_a_rate_that_is_another_object_for_the_same_memory_travels_once() -> None:
    check_rates("cpu")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CUDA device's memory, in the host's."""
    state = SimpleNamespace(capturing=False, copies=0)

    def copy(table: Tensor, placed: Tensor) -> None:
        state.copies += 1
        placed.copy_(table)

    monkeypatch.setattr(tables, "_capturing", lambda device: state.capturing)
    monkeypatch.setattr(tables, "_multiprocessors", lambda device: 0)
    monkeypatch.setattr(tables, "_placed", lambda table, device: table.clone())
    monkeypatch.setattr(tables, "_copy_without_waiting", copy)
    return state


class HostMemory(cuda.CudaMemory):
    """Tables as on a CUDA device, read by the CPU's kernels."""

    call = Memory.call
    carries = 0


def test_a_step_with_a_rate_in_a_tensor_can_be_captured(device: SimpleNamespace) -> None:
    p, g, rate = torch.zeros(3), torch.ones(3), torch.tensor(0.5)
    plan = NativeStepPlan(of_sgd([p]), HostMemory)
    plan.step([g], [StepSettings(rate.detach())])
    copies, device.capturing = device.copies, True
    plan.step([g], [StepSettings(rate.detach())])
    rate.fill_(0.25)
    plan.step([g], [StepSettings(rate.detach())])
    assert p.tolist() == [-1.25] * 3 and device.copies == copies
    moved = torch.tensor(1.0)
    with pytest.raises(
        RuntimeError, match=r"hyperparameters have changed.*warm-up.*write_hyperparameters"
    ):
        plan.step([g], [StepSettings(moved)])
    plan.step([g], [StepSettings(rate)])
    device.capturing = False
    plan.step([g], [StepSettings(moved)])
    assert p.tolist() == [-2.5] * 3 and device.copies == copies + 1


class Carrying(HostMemory):
    """Kernels bring settings along.

    `broken`: somebody presses Ctrl-C when they have been launched.
    """

    carries = 128
    broken = False

    def call(self, operation: str, *arguments: Any, norm: bool = False) -> None:
        plan = arguments[0]
        ctypes.memmove(plan.settings, plan.carried, 8 * plan.num_carried)
        Memory.call(self, operation, *arguments, norm=norm)
        if self.broken:
            raise KeyboardInterrupt


def test_settings_that_came_along_before_an_interrupt_are_not_taken_for_the_last_ones(
    device: SimpleNamespace,
) -> None:
    p, g, memory = torch.zeros(3), torch.ones(3), Carrying(torch.device("cpu"))
    plan = NativeStepPlan(of_sgd([p]), lambda _: memory)
    plan.step([g], [StepSettings(1.0)])
    memory.broken = True
    with pytest.raises(KeyboardInterrupt):
        plan.step([g], [StepSettings(0.5)])
    memory.broken = False
    plan.step([g], [StepSettings(1.0)])
    assert p.tolist() == [-2.5] * 3


def test_formats_of_gradients_that_a_capture_refused_travel_afterwards(
    device: SimpleNamespace,
) -> None:
    p, memory = torch.zeros(3), HostMemory(torch.device("cpu"))
    plan = NativeStepPlan(of_sgd([p]), lambda _: memory)
    plan.step([torch.ones(3)], [StepSettings(1.0)])
    device.capturing, half = True, torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="gradients have moved"):
        plan.step([half], [StepSettings(1.0)])
    device.capturing = False
    plan.step([half], [StepSettings(1.0)])
    assert p.tolist() == [-2.0] * 3


def test_addresses_among_doubles_are_compared_as_bits(device: SimpleNamespace) -> None:
    """As doubles they are numbers so small that a processor may be told to take them for 0."""
    memory, placed = tables.DeviceMemory(torch.device("cpu")), torch.zeros(2, dtype=torch.float64)
    assert torch.set_flush_denormal(True) or pytest.skip("this processor keeps small numbers")
    try:
        for address in (1 << 40, 1 << 40, 1 << 41):
            memory.refresh(torch.tensor([0, address]).view(torch.float64), placed)
    finally:
        torch.set_flush_denormal(False)
    assert device.copies == 2 and placed.view(torch.int64).tolist() == [0, 1 << 41]
