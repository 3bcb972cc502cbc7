"""One interface to the kernels, three backends: "cpu" and "cuda" (native) and "torch" (the reference).

A backend asked for by name that is missing raises and says why. "auto" takes the native backend of the tensors' device. There is
one exception: CUDA tensors under an hdet that was built without CUDA run on the torch backend, with one warning that names the
reason. Tensors on any other kind of device need backend="torch".
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks, native
from .checks import check_parameters, check_settings
from .cpu import CpuBackend
from .cuda import CudaBackend
from .interface import AdamWPlan, AdamWSettings, AdamWTensors, Backend, CopyPlan
from .reference import TorchBackend

__all__ = [
    "AdamWPlan",
    "AdamWSettings",
    "AdamWTensors",
    "Backend",
    "CopyPlan",
    "adamw_plan",
    "available",
    "average_",
    "check_name",
    "check_parameters",
    "check_settings",
    "copy_plan",
    "select",
]

_BACKENDS: dict[str, Backend] = {"cpu": CpuBackend(), "cuda": CudaBackend(), "torch": TorchBackend()}
USABLE = "usable"


def _cuda_state() -> str:
    if native.missing is not None:
        return native.missing
    info = native._C.build_info()
    if not info["cuda"]:
        return f"hdet has no CUDA kernels: {info['cuda_note']}. Install the CUDA toolkit and reinstall with HDET_CUDA=1"
    if not torch.backends.cuda.is_built():
        return "this torch was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no usable CUDA device or driver"
    oldest = min(int(arch.split("-")[0].rstrip("af")) for arch in info["cuda_archs"].split())
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < oldest:
        return f"the device has compute capability {major}.{minor}, hdet was built for {info['cuda_archs']}: reinstall with HDET_CUDA_ARCHS"
    return USABLE


def available() -> dict[str, str]:
    """For each backend "usable", or the reason why it is not."""
    return {"cpu": native.missing or USABLE, "cuda": _cuda_state(), "torch": USABLE}


def check_name(backend: str) -> None:
    """Raises ValueError for a name that no backend has."""
    if backend != "auto" and backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; choose auto, {', '.join(_BACKENDS)}")


_warned = False


def _automatic(device: torch.device) -> str:
    global _warned
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f'hdet has no native kernels for the device type {device.type}; backend="torch" works there')
    if device.type == "cuda" and native.missing is None and not native._C.cuda:
        if not _warned:
            _warned = True
            warnings.warn(f"tensors on CUDA use the torch backend: {_cuda_state()}", RuntimeWarning, stacklevel=4)
        return "torch"
    return device.type


def select(backend: str, device: torch.device) -> Backend:
    """The backend of that name for tensors on that device.

    Raises ValueError for an unknown name or a backend that does not work on the device, RuntimeError for one that is not usable.
    """
    check_name(backend)
    name = _automatic(device) if backend == "auto" else backend
    if name != "torch" and name != device.type:
        raise ValueError(f'backend="{name}" does not work on tensors on {device}; use backend="auto"')
    reason = available()[name]
    if reason != USABLE:
        raise RuntimeError(f'backend="{name}" is not usable: {reason}. backend="torch" works without it')
    return _BACKENDS[name]


def adamw_plan(tensors: AdamWTensors, backend: str = "auto") -> AdamWPlan:
    """Prepares an AdamW step that updates all the tensors in one call. The plan holds addresses: it is valid until one changes.

    Raises ValueError or TypeError for tensors that are not float32, dense, contiguous, of equal shapes and on one device.
    """
    if len(tensors.params) == 0:
        raise ValueError("there are no parameters to plan for")
    chosen = select(backend, checks.device_of(tensors.params[0], "parameter 0"))
    checks.check_adamw_tensors(tensors)
    return chosen.adamw_plan(tensors)


def copy_plan(sources: Sequence[Tensor], destinations: Sequence[Tensor], backend: str = "auto") -> CopyPlan:
    """Prepares `plan.copy(scale)`: destinations[i] = scale * sources[i] for all i in one call; a source and a destination may not overlap.

    The plan holds addresses: it is valid until one changes. The native backends take float32, contiguous tensors on one device, the
    torch backend any floating dtypes and strides. Raises ValueError or TypeError for anything else.
    """
    if len(sources) == 0 or len(sources) != len(destinations):
        raise ValueError(f"{len(sources)} sources for {len(destinations)} destinations: there must be as many, and at least one")
    device = checks.device_of(sources[0], "source 0")
    chosen = select(backend, device)
    for i, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        checks.check_same_shape(destination, source, f"destination {i}", "its source")
        if not isinstance(chosen, TorchBackend):
            checks.check_tensor(source, f"source {i}", device)
            checks.check_tensor(destination, f"destination {i}", device)
    return chosen.copy_plan(sources, destinations)


def average_(replicas: Sequence[Sequence[Tensor]] | Tensor, weights: Sequence[float], backend: str = "auto") -> None:
    """Replaces K co-resident replicas by their weighted mean, in place (Eq. 3).

    `replicas` is a list of K lists of tensors with equal shapes, or one tensor of shape (K, n); float32, contiguous, on one device,
    not overlapping. `weights` are K numbers >= 0; they are divided by their sum. Afterwards all rows are bitwise equal. A replica of
    weight 0 is not read, so NaN in it does no harm, but receives the mean. Sums are float32 in the order of the replicas.
    Raises ValueError or TypeError, before anything is written, for anything else.
    """
    rows = _rows(replicas)
    shares = checks.normalised(weights, len(rows))
    checks.check_replicas(rows)
    checks.check_apart(rows)
    if len(rows[0]) == 0:
        check_name(backend)
        return
    select(backend, rows[0][0].device).average_(rows, shares)
    # A kernel writes behind autograd's back: what a backward pass has saved of these tensors is no longer valid.
    torch.autograd.graph.increment_version([tensor for row in rows for tensor in row if not tensor.is_inference()])


def _rows(replicas: Sequence[Sequence[Tensor]] | Tensor) -> Sequence[Sequence[Tensor]]:
    if not isinstance(replicas, Tensor):
        return replicas
    if replicas.layout != torch.strided or replicas.dim() != 2:
        raise ValueError(
            f"replicas must be lists of tensors or one dense tensor of shape (K, n), got {replicas.layout}, {tuple(replicas.shape)}"
        )
    return [[row] for row in replicas.detach()]
