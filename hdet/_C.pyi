# ruff: noqa: N999
"""hdet's native module.

Addresses, sizes (elements) and streams are plain integers. Nothing is checked: use hdet.kernels.
"""

from collections.abc import Sequence
from typing import Any

__version__: str
compiler: str
isa: list[str]  # CPU variants this processor can run, best first
openmp: bool
cuda: bool
cuda_compiler: str
cuda_archs: str  # for example "80 90 100"; empty without CUDA
cuda_note: str  # why there is no CUDA; empty with it

SOURCES: str
CARRIED: int
CODE_BLOCK: int
CODEBOOK_BYTES: int
RULES: str

# The structures of csrc/core/plan.h: addresses and enumerations are integers, all starts as 0.
class StepPlan:
    chunks: int
    num_chunks: int
    longest: int
    num_tensors: int
    num_replicas: int
    num_groups: int
    rule: int
    zero_gradients: int
    known: int
    seed: int
    first_replica: int
    gradients: int
    addresses: int
    columns: int
    codebooks: int
    ids: int
    groups: int
    rates: int
    settings: int
    rows: int
    replica_rows: int
    control: int
    emas: int
    num_emas: int
    ema_settings: int
    ema_rows: int
    partials: int
    grad_scale: int
    found_inf: int
    carried: int
    num_carried: int
    sums: int
    num_sums: int
    spans: int

class AveragePlan:
    chunks: int
    num_chunks: int
    num_replicas: int
    all_float: int
    addresses: int
    weights: int

class CopyPlan:
    chunks: int
    num_chunks: int
    all_float: int
    addresses: int
    scale: float

# See csrc/tensors.h. `interface`: hdet.kernels.native.interface. `tensors`: whether the memory of
# each of the objects counts
class Torch:
    def __init__(self, interface: list[int]) -> None: ...

class NotedObjects:
    def __init__(self, torch: Torch, objects: list[Any], tensors: list[bool]) -> None: ...
    def same(self, nested: list[Any]) -> bool: ...

class HeldGradients:
    def __len__(self) -> int: ...
    def __getitem__(self, place: int) -> Any: ...
    def absent(self) -> list[int]: ...
    def choose(self, places: list[int]) -> HeldGradients: ...

def hold_gradients(torch: Torch, params: list[Any]) -> HeldGradients | None: ...
def bump_versions(torch: Torch, tensors: list[Any]) -> None: ...

class GradientReader:
    EMPTY: int
    UNUSUAL: int
    MOVED: int
    RETYPED: int
    types: list[int]
    def __init__(self, torch: Torch, params: list[Any]) -> None: ...
    def read(self, gradients: Sequence[Any]) -> int: ...
    def forget(self) -> None: ...
    def write_addresses(self, out: int) -> None: ...

# the Known of csrc/core/numbers.h that all tensors have
def known_of(formats: Sequence[int]) -> int: ...

# isa: one of the names in `isa`; "" takes the environment's HDET_ISA, else the best
def cpu_step(plan: StepPlan, threads: int, isa: str = "") -> None: ...
def cpu_average(plan: AveragePlan, threads: int, isa: str = "") -> None: ...
def cpu_copy(plan: CopyPlan, threads: int, isa: str = "") -> None: ...

# only where `cuda` is true
def cuda_step(plan: StepPlan, device: int, stream: int) -> None: ...
def cuda_average(plan: AveragePlan, device: int, stream: int) -> None: ...
def cuda_copy(plan: CopyPlan, device: int, stream: int) -> None: ...
