"""A pytest plugin that puts the shim in the place of hdet._C and lets backend="cuda" work on
tensors in host memory.

Loaded before anything of hdet: `pytest -p tests.kernels.shim.plugin`. HDET_SHIM is the module's
path.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

loader = importlib.machinery.ExtensionFileLoader("hdet._C", os.environ["HDET_SHIM"])
spec = importlib.util.spec_from_loader("hdet._C", loader)
assert spec is not None
assert not [name for name in sys.modules if name.startswith("hdet")]
import pytest
import torch  # before hdet._C, as hdet itself does

module = importlib.util.module_from_spec(spec)
loader.exec_module(module)
sys.modules["hdet._C"] = module

from hdet import kernels
from hdet.kernels import tables
from hdet.kernels.native import cuda
from tests.kernels import cases

NONE = SimpleNamespace(params={})

state = SimpleNamespace(stream=77, capturing=False, copies=0, used=[], multiprocessors=0)
"""what tests of hdet/kernels/tables.py change and count"""


def _copy(table: torch.Tensor, placed: torch.Tensor) -> None:
    state.copies += 1
    placed.copy_(table)


counted = ctypes.CDLL(os.environ["HDET_SHIM"])


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Puts back what was the device, as torch does; what is launched outside of it leaves the
    device changed."""
    before = counted.shim_device()
    try:
        yield
    finally:
        counted.shim_set_device(before)


tables._on = _on
tables._current_stream = lambda device: SimpleNamespace(cuda_stream=state.stream)
tables._capturing = lambda device: state.capturing  # type: ignore[misc]
tables._multiprocessors = lambda device: state.multiprocessors  # type: ignore[misc]
tables._placed = lambda table, device: table.clone()  # type: ignore[misc]
tables._copy_without_waiting = _copy
tables._used_on = lambda stream, table: state.used.append((stream.cuda_stream, table.data_ptr()))

_select = kernels.select


def select(backend: str, device: torch.device) -> kernels.Backend:
    return cuda.CudaBackend() if backend == "cuda" else _select(backend, device)


kernels.select = select
cases.BACKENDS[:] = ["cuda"]
cases.device_of = lambda backend: "cpu"


def pytest_collection_modifyitems(config: object, items: list[pytest.Item]) -> None:
    """Of the tables that every backend runs only what "cuda" runs; of the rest only what was
    written for the shim.

    Not the table of cases: checks.py has each of them give the CPU's bits, guards included, and
    those agree with float64.
    """
    items[:] = [
        item
        for item in items
        if item.path.name == "checks.py"
        or getattr(item, "callspec", NONE).params.get("backend") == "cuda"
    ]
