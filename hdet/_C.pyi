# ruff: noqa: N999
"""hdet's native module. Addresses, sizes (elements) and streams are plain integers; nothing is checked here: use hdet.kernels."""

from collections.abc import Sequence
from typing import TypedDict

class BuildInfo(TypedDict):
    version: str
    compiler: str
    isa: list[str]  # CPU variants this processor can run, best first
    openmp: bool
    cuda: bool
    cuda_compiler: str
    cuda_archs: str  # for example "80 90 100"; empty without CUDA
    cuda_note: str  # why there is no CUDA; empty with it

__version__: str
compiler: str
isa: list[str]
openmp: bool
cuda: bool
cuda_compiler: str
cuda_archs: str
cuda_note: str

INTERFACE: int
CHUNK_ELEMENTS: int
CHUNK_BYTES: int
ROW_BYTES: int

def build_info() -> BuildInfo: ...
def count_chunks(elements: Sequence[int]) -> int: ...
def write_chunks(out: int, elements: Sequence[int], rows: Sequence[int]) -> None: ...

# (lr, multiplier, beta1, beta2, eps, weight_decay, maximize, step) of each row; step counts from 1
def write_adamw_rows(out: int, settings: Sequence[Sequence[float]]) -> None: ...
def write_addresses(out: int, addresses: Sequence[int]) -> None: ...
def add_to_steps(steps: int, count: int, amount: float) -> None: ...

# isa: one of build_info()["isa"]; "" takes the environment's HDET_ISA, else the best
def cpu_adamw(
    chunks: int,
    num_chunks: int,
    rows: int,
    gradients: int,
    params: int,
    exp_avgs: int,
    exp_avg_sqs: int,
    threads: int,
    isa: str = "",
) -> None: ...
def cpu_average(
    chunks: int,
    num_chunks: int,
    addresses: int,
    num_tensors: int,
    num_replicas: int,
    weights: int,
    threads: int,
    isa: str = "",
) -> None: ...
def cpu_copy(
    chunks: int,
    num_chunks: int,
    sources: int,
    destinations: int,
    scale: float,
    threads: int,
    isa: str = "",
) -> None: ...

# only where `cuda` is true
def cuda_copy(
    chunks: int,
    num_chunks: int,
    sources: int,
    destinations: int,
    scale: float,
    device: int,
    stream: int,
) -> None: ...
def cuda_adamw(
    chunks: int,
    num_chunks: int,
    rows: int,
    gradients: int,
    params: int,
    exp_avgs: int,
    exp_avg_sqs: int,
    device: int,
    stream: int,
) -> None: ...
def cuda_average(
    chunks: int,
    num_chunks: int,
    addresses: int,
    num_tensors: int,
    num_replicas: int,
    weights: int,
    device: int,
    stream: int,
) -> None: ...
