"""One interface to the kernels, four backends: "cpu" and "cuda" (native), "triton", and "torch"
(the reference).

A backend asked for by name that is missing raises and says why. "auto" takes the native backend of
the tensors' device. There is one exception: CUDA tensors under an hdet that was built without CUDA
run on Triton, or without that on the torch backend, with one warning that names the reason. Tensors
on any other kind of device need backend="torch".

Operations are prepared once for a set of tensors and then called: a plan holds addresses and is
valid until one changes.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import checks, native
from .interface import (
    AveragePlan,
    Backend,
    Column,
    CopyPlan,
    StepOptions,
    StepPlan,
    StepTensors,
)
from .rules import StepSettings

__all__ = [
    "AveragePlan",
    "Backend",
    "CopyPlan",
    "StepOptions",
    "StepPlan",
    "StepSettings",
    "StepTensors",
    "available",
    "average_",
    "average_plan",
    "check_name",
    "copy_plan",
    "select",
    "step_plan",
]

_BACKENDS = {
    "cpu": "native.plans.CpuBackend",
    "cuda": "native.cuda.CudaBackend",
    "triton": "triton.TritonBackend",
    "torch": "reference.TorchBackend",
}
USABLE = "usable"


def _cuda_state(device: torch.device | None) -> str:
    if native.missing is not None:
        return native.missing
    info = native._C.build_info()
    if not info["cuda"]:
        return (
            f"hdet has no CUDA kernels: {info['cuda_note']}. Install the CUDA toolkit and "
            "reinstall with HDET_CUDA=1"
        )
    if not torch.backends.cuda.is_built():
        return "this torch was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no usable CUDA device or driver"
    oldest = min(int(arch.split("-")[0].rstrip("af")) for arch in info["cuda_archs"].split())
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < oldest:
        return (
            f"the device has compute capability {major}.{minor}, hdet was built for "
            f"{info['cuda_archs']}: reinstall with HDET_CUDA_ARCHS"
        )
    return USABLE


def _triton_state(_: torch.device | None) -> str:
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}. Install it with pip install hdet[triton]"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
        return f"Triton {triton.__version__} is too old: install 3.6 or later"
    if triton.knobs.runtime.interpret or torch.cuda.is_available():
        return USABLE
    return (
        "torch finds no usable CUDA device or driver. Without one Triton's interpreter runs "
        "(TRITON_INTERPRET=1, on CPU tensors, slowly)"
    )


_STATES: dict[str, Callable[[torch.device | None], str]] = {
    "cpu": lambda _: native.missing or USABLE,
    "cuda": _cuda_state,
    "triton": _triton_state,
    "torch": lambda _: USABLE,
}
"""For tensors on a device, None the current one.

To ask may import Triton or start CUDA: select asks its own only.
"""


def available() -> dict[str, str]:
    """For each backend "usable", or the reason why it is not."""
    return {name: state(None) for name, state in _STATES.items()}


def check_name(backend: str) -> None:
    """Raises ValueError for a name that no backend has."""
    if backend != "auto" and backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; choose auto, {', '.join(_BACKENDS)}")


_warned = False


def _automatic(device: torch.device) -> str:
    global _warned
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f'hdet has no native kernels for the device type {device.type}; backend="torch" works '
            "there"
        )
    if device.type == "cuda" and native.missing is None and not native._C.cuda:
        instead = "triton" if _STATES["triton"](device) == USABLE else "torch"
        if not _warned:
            _warned = True
            warnings.warn(
                f"tensors on CUDA use the {instead} backend: {_STATES['cuda'](device)}",
                RuntimeWarning,
                stacklevel=4,
            )
        return instead
    return device.type


def select(backend: str, device: torch.device) -> Backend:
    """The backend of that name for tensors on that device.

    Raises ValueError for an unknown name or a backend that does not work on the device,
    RuntimeError for one that is not usable.
    """
    check_name(backend)
    name = _automatic(device) if backend == "auto" else backend
    if name in ("cpu", "cuda") and name != device.type:
        raise ValueError(
            f'backend="{name}" does not work on tensors on {device}; use backend="auto"'
        )
    reason = _STATES[name](device)
    if reason != USABLE:
        raise RuntimeError(
            f'backend="{name}" is not usable: {reason}. backend="torch" works without it'
        )
    module, _, member = _BACKENDS[name].rpartition(".")
    return getattr(importlib.import_module(f".{module}", __name__), member)()


def step_plan(tensors: StepTensors, backend: str = "auto") -> StepPlan:
    """Prepares an optimizer step that updates all the tensors, in all K replicas, in one call.

    See StepTensors for what it takes.

    Raises ValueError or TypeError for tensors, dtypes or combinations that cannot be stepped, by
    name.
    """
    if len(tensors.params) == 0 or len(tensors.params[0]) == 0:
        raise ValueError("there are no parameters to plan for")
    chosen = select(backend, checks.device_of(tensors.params[0][0], "parameter 0"))
    checks.check_step_tensors(tensors)
    return chosen.step_plan(tensors)


def average_plan(
    params: Sequence[Sequence[Tensor]],
    masters: Sequence[Column] | None = None,
    backend: str = "auto",
) -> AveragePlan:
    """Prepares the weighted mean of K co-resident sets: K lists of tensors of equal shapes and
    dtypes, contiguous, on one device, apart.

    Where a parameter has a master (float32, or int16 as the lower half of the split form) the mean
    is of the masters and both are written. Raises ValueError or TypeError for anything else.
    """
    if len(params) == 0 or len(params[0]) == 0:
        raise ValueError("there are no parameters to plan for")
    chosen = select(backend, checks.device_of(params[0][0], "tensor 0 of replica 0"))
    checks.check_replicas(params, masters)
    return chosen.average_plan(params, masters)


def copy_plan(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    *,
    source_lowers: Column | None = None,
    masters: Column | None = None,
    backend: str = "auto",
) -> CopyPlan:
    """Prepares `copy(scale)` of one set of tensors to another; a source and a destination may not
    overlap.

    float32, bfloat16 and float16 in any combination. `source_lowers`: the int16 lower halves of
    bfloat16 sources in the split form. `masters`: float32 or int16 (split) masters of the
    destinations, written with them: the way back from a communication bucket. The native backends
    take contiguous tensors on one device, the torch backend any floating dtypes and strides. Raises
    ValueError or TypeError for anything else.
    """
    if len(sources) == 0 or len(sources) != len(destinations):
        raise ValueError(
            f"{len(sources)} sources for {len(destinations)} destinations: there must be as many, "
            "and at least one"
        )
    chosen = select(backend, checks.device_of(sources[0], "source 0"))
    checks.check_pairs(
        sources, destinations, source_lowers, masters, any_layout=chosen.name == "torch"
    )
    return chosen.copy_plan(sources, destinations, source_lowers, masters)


def average_(
    replicas: Sequence[Sequence[Tensor]] | Tensor, weights: Sequence[float], backend: str = "auto"
) -> None:
    """Replaces K co-resident replicas by their weighted mean, in place (Eq. 3). Prepares a plan for
    this one call.

    `replicas` is a list of K lists of tensors with equal shapes, or one tensor of shape (K, n);
    contiguous, on one device, not overlapping. `weights` are K numbers >= 0; they are divided by
    their sum. Afterwards all rows are bitwise equal. A replica of weight 0 is not read, so NaN in
    it does no harm, but receives the mean. Sums are float32 in the order of the replicas. Raises
    ValueError or TypeError, before anything is written, for anything else.
    """
    rows = _rows(replicas)
    shares = checks.normalised(weights, len(rows))
    if len(rows[0]) == 0:
        check_name(backend)
        checks.check_replicas(rows, None)
        return
    average_plan(rows, None, backend).average(shares)
    # A kernel writes behind autograd's back: what a backward pass has saved of these tensors is no
    # longer valid.
    torch.autograd.graph.increment_version(
        [tensor for row in rows for tensor in row if not tensor.is_inference()]
    )


def _rows(replicas: Sequence[Sequence[Tensor]] | Tensor) -> Sequence[Sequence[Tensor]]:
    if not isinstance(replicas, Tensor):
        return replicas
    if replicas.layout != torch.strided or replicas.dim() != 2:
        raise ValueError(
            "replicas must be lists of tensors or one dense tensor of shape (K, n), got "
            f"{replicas.layout}, {tuple(replicas.shape)}"
        )
    return [[row] for row in replicas.detach()]
