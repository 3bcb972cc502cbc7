"""The CUDA sources themselves, compiled for the host behind shim/cuda_runtime.h and run under the undefined-behaviour sanitizer.

They give the same bits as the native CPU backend: one rule header, no contraction on either side.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hdet import _C, kernels
from hdet.kernels import AdamWTensors, cuda, native
from hdet.kernels.cpu import CpuBackend

from .cases import SIZES, Guarded
from .test_adamw import SETTINGS, Problem

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "csrc"
COMPILER = os.environ.get("CXX") or shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None or not SOURCES.exists(), reason="needs a C++ compiler and hdet's sources")


class _AdamWPlan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("chunks", "num_chunks", "rows", "gradients", "params", "exp_avgs", "exp_avg_sqs")]


class _AveragePlan(ctypes.Structure):
    _fields_ = [
        ("chunks", ctypes.c_int64),
        ("num_chunks", ctypes.c_int64),
        ("addresses", ctypes.c_int64),
        ("num_tensors", ctypes.c_int64),
        ("num_replicas", ctypes.c_int32),
        ("weights", ctypes.c_int64),
    ]


class _CopyPlan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("chunks", "num_chunks", "sources", "destinations")] + [("scale", ctypes.c_float)]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("shim")
    library = folder / "shim.so"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off", "-shared", "-fPIC"]
    command = [str(COMPILER), *flags, "-fsanitize=undefined", f"-I{HERE / 'shim'}", str(HERE / "shim" / "entry.cpp"), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    os.environ["UBSAN_OPTIONS"] = f"log_path={folder / 'undefined'}:print_stacktrace=1"  # read when the library is loaded
    loaded = ctypes.CDLL(str(library))
    for function in (loaded.shim_adamw, loaded.shim_average, loaded.shim_copy):
        function.restype = ctypes.c_char_p
        function.argtypes = [ctypes.c_void_p, ctypes.c_int]
    yield loaded
    del os.environ["UBSAN_OPTIONS"]
    reports = "\n".join(path.read_text() for path in folder.glob("undefined*"))
    assert not reports, reports


@pytest.fixture
def on_the_host(shim: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """hdet.kernels.cuda as it is, on tensors in host memory: no streams, no pinned memory, and the shim's kernels."""

    def launch(function: Callable[..., bytes | None], plan: type[ctypes.Structure]) -> Callable[..., None]:
        def call(*arguments: int) -> None:
            *addresses, device, stream = arguments
            assert (device, stream) == (-1, 77)
            error = function(ctypes.byref(plan(*addresses)), 0)
            assert error is None, error

        return call

    monkeypatch.setattr(cuda, "_current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(cuda, "_pinned_bytes", native.bytes_for)
    monkeypatch.setattr(cuda, "_to_device", lambda table, device: table.clone())
    monkeypatch.setattr(cuda, "_used_on", lambda stream, *tables: None)
    monkeypatch.setattr(_C, "cuda_adamw", launch(shim.shim_adamw, _AdamWPlan), raising=False)
    monkeypatch.setattr(_C, "cuda_average", launch(shim.shim_average, _AveragePlan), raising=False)
    monkeypatch.setattr(_C, "cuda_copy", launch(shim.shim_copy, _CopyPlan), raising=False)


@pytest.mark.usefixtures("on_the_host")
def test_the_cuda_backend_fills_the_tables_its_kernels_read() -> None:
    """Two rows of hyperparameters, a gradient's address that changes in each step, and the order of all arguments."""
    sizes = [5, 0, 2**14 + 3, 40]
    gpu, cpu = Problem(sizes, (0, 1, 2, 3)), Problem(sizes, (0, 1, 2, 3))
    rows = [1, 0, 0, 1]
    plans = [
        backend.adamw_plan(AdamWTensors(p.params.tensors, p.exp_avgs.tensors, p.exp_avg_sqs.tensors, p.steps, rows))
        for backend, p in ((cuda.CudaBackend(), gpu), (CpuBackend(), cpu))
    ]
    for step in range(3):
        for plan, problem in zip(plans, (gpu, cpu), strict=True):
            problem.new_gradients(step)
            gradients = [gradient.clone() for gradient in problem.gradients.tensors]
            plan.step(gradients, [SETTINGS, SETTINGS._replace(lr=0.3, maximize=True)])
    for one, other in zip(gpu.buffers(), cpu.buffers(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="multiplier"):
        plans[0].step(gpu.gradients.tensors, [SETTINGS, SETTINGS._replace(multiplier=float("nan"))])

    matrix = torch.randn(3, 1000)
    expected = matrix.clone()
    cuda.CudaBackend().average_([[row] for row in matrix], [0.5, 0.2, 0.3])
    CpuBackend().average_([[row] for row in expected], [0.5, 0.2, 0.3])
    assert torch.equal(matrix, expected)

    sources, bucket = [torch.randn(n) for n in sizes], torch.zeros(sum(sizes))
    cuda.CudaBackend().copy_plan(sources, list(bucket.split(sizes))).copy(0.3)
    assert torch.equal(bucket, torch.cat(sources) * 0.3)


def _step(shim: ctypes.CDLL, problem: Problem, step: int) -> None:
    t = problem.tensors
    tables = native.StepTables(t.params, t.exp_avgs, t.exp_avg_sqs, t.rows)
    table = native.bytes_for(tables.step_bytes)
    tables.write_step(table, [(*SETTINGS, step)], [g.data_ptr() for g in problem.gradients.tensors])
    params, column = tables.addresses.data_ptr(), 8 * tables.num_tensors
    rows = table.data_ptr()
    plan = _AdamWPlan(
        tables.chunks.data_ptr(), tables.num_chunks, rows, rows + tables.row_bytes, params, params + column, params + 2 * column
    )
    assert shim.shim_adamw(ctypes.byref(plan), 0) is None


@pytest.mark.parametrize("shifts", [(0, 0, 0, 0), (3, 3, 3, 3), (0, 1, 2, 3)], ids=["aligned", "odd", "each its own"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_step_has_the_bits_of_the_cpu(shim: ctypes.CDLL, sizes: list[int], shifts: tuple[int, int, int, int]) -> None:
    gpu, cpu = Problem(sizes, shifts), Problem(sizes, shifts)
    plan = kernels.adamw_plan(cpu.tensors, "cpu")
    vectors = shim.shim_vector_accesses()
    for step in range(1, 4):
        gpu.new_gradients(step)
        cpu.new_gradients(step)
        _step(shim, gpu, step)
        plan.step(cpu.gradients.tensors, [SETTINGS])
    for one, other in zip(gpu.buffers()[:3], cpu.buffers()[:3], strict=True):
        assert torch.equal(one, other)
    gpu.assert_guards()
    # 16-byte accesses are used where they can be, and nowhere else: g, m, v read and m, v written, in each step
    alike = len(set(shifts)) == 1
    heads = [min((4 - shifts[0]) % 4, size) for size in sizes]
    per_step = sum((size - head) // 4 * 5 for size, head in zip(sizes, heads, strict=True)) if alike else 0
    if max(sizes) < 2**14:  # with one chunk for each tensor the count is that simple
        assert shim.shim_vector_accesses() - vectors == 3 * per_step


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("shifts", [(0, 0), (1, 1), (0, 2)], ids=["aligned", "odd", "mixed"])
@pytest.mark.parametrize("sizes", [SIZES[name] for name in ("vector edges", "chunk edges", "empty first", "only empty")])
def test_average_has_the_bits_of_the_cpu(shim: ctypes.CDLL, sizes: list[int], shifts: tuple[int, int], count: int) -> None:
    gpu = [Guarded(sizes, shifts[k % 2], seed=k) for k in range(count)]
    cpu = [Guarded(sizes, shifts[k % 2], seed=k) for k in range(count)]
    weights = [k % 3 + (k == 0) for k in range(count)]  # some are 0
    shares = torch.tensor([w / sum(weights) for w in weights])
    first = gpu[0].tensors
    chunks = native.chunk_table(first, [0] * len(first))
    addresses = native.address_table(*(row.tensors for row in gpu))
    plan = _AveragePlan(chunks.data_ptr(), native.num_chunks(chunks), addresses.data_ptr(), len(first), count, shares.data_ptr())
    assert shim.shim_average(ctypes.byref(plan), 0) is None
    kernels.average_([row.tensors for row in cpu], weights, "cpu")
    for one, other in zip(gpu, cpu, strict=True):
        assert torch.equal(one.buffer, other.buffer)


@pytest.mark.parametrize("scale", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("shifts", [(0, 0), (1, 1), (0, 2)], ids=["aligned", "odd", "mixed"])
@pytest.mark.parametrize("sizes", [SIZES[name] for name in ("vector edges", "chunk edges", "empty first", "only empty")])
def test_copy_has_the_bits_of_the_cpu(shim: ctypes.CDLL, sizes: list[int], shifts: tuple[int, int], scale: float) -> None:
    source = Guarded(sizes, shifts[0], seed=0)
    gpu, cpu = Guarded(sizes, shifts[1], seed=1), Guarded(sizes, shifts[1], seed=1)
    chunks = native.chunk_table(source.tensors, [0] * len(sizes))
    sources, destinations = native.address_table(source.tensors), native.address_table(gpu.tensors)
    plan = _CopyPlan(chunks.data_ptr(), native.num_chunks(chunks), sources.data_ptr(), destinations.data_ptr(), scale)
    assert shim.shim_copy(ctypes.byref(plan), 0) is None
    CpuBackend().copy_plan(source.tensors, cpu.tensors).copy(scale)
    assert torch.equal(gpu.buffer, cpu.buffer)
    gpu.assert_guards()


def test_a_failing_call_is_named_and_the_device_restored(shim: ctypes.CDLL) -> None:
    problem = Problem([10])
    t = problem.tensors
    tables = native.StepTables(t.params, t.exp_avgs, t.exp_avg_sqs, t.rows)
    plan = _AdamWPlan(tables.chunks.data_ptr(), 1, 0, 0, 0, 0, 0)
    assert shim.shim_adamw(ctypes.byref(plan), 7) == b"hdet: cudaSetDevice failed: reported by the shim (cudaErrorInvalidDevice)"
    assert shim.shim_device() == 0
    rows = [Guarded([10], 0, k) for k in range(2)]
    chunks, addresses = native.chunk_table(rows[0].tensors, [0]), native.address_table(*(row.tensors for row in rows))
    weights = torch.tensor([0.5, 0.5])
    average = _AveragePlan(chunks.data_ptr(), 1, addresses.data_ptr(), 1, 2, weights.data_ptr())
    assert shim.shim_average(ctypes.byref(average), 1) is None
    assert shim.shim_device() == 0
