"""Choosing a backend: by name or not at all."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from hdet import _C, kernels
from hdet.kernels import native

from ..limits import HANG_S


def test_available_says_usable_or_why_not() -> None:
    states = kernels.available()
    assert list(states) == ["cpu", "cuda", "triton", "torch"]
    assert states["cpu"] == states["torch"] == "usable"
    assert (
        states["cuda"] == "usable"
        if torch.cuda.is_available() and native._C.cuda
        else len(states["cuda"]) > 20
    )


def test_triton_is_usable_with_a_gpu_or_in_its_interpreter_or_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip(
        "triton", reason="Triton is not installed; there are wheels for Linux"
    )
    for interpret, gpu in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device: (9, 0)
        )  # a torch with CUDA would look for the GPU
        state = kernels.available()["triton"]
        assert (
            state == "usable"
            if interpret or gpu
            else "no usable CUDA device" in state and "TRITON_INTERPRET=1" in state
        )
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert kernels.available()["triton"] == "Triton 3.5.1 is too old: install 3.6 or later"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Install it with pip install hdet[triton]" in kernels.available()["triton"]


def test_auto_is_the_native_backend_of_the_device() -> None:
    assert kernels.select("auto", torch.device("cpu")).name == "cpu"


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("metal", "cpu", "backend='metal' is unknown; choose auto, cpu, cuda, triton, torch"),
        ("cuda", "cpu", 'backend="cuda" does not work on tensors on cpu'),
        ("auto", "meta", 'no native kernels for the device type meta; backend="torch"'),
    ],
)
def test_what_cannot_be_chosen_is_refused(backend: str, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.select(backend, torch.device(device))
    with pytest.raises(ValueError, match=message):
        kernels.average_(
            torch.zeros(1, 0 if backend == "metal" else 3, device=device), [1], backend
        )


def test_a_missing_module_is_reported_and_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "missing", "hdet's native module cannot be imported: no such file")
    assert kernels.available()["cpu"] == native.missing
    for name in ("auto", "cpu"):
        with pytest.raises(
            RuntimeError,
            match='backend="cpu" is not usable: .* no such file. backend="torch" works',
        ):
            kernels.select(name, torch.device("cpu"))
    assert kernels.select("torch", torch.device("cpu")).name == "torch"


def _built(*, cuda: bool, **info: str) -> SimpleNamespace:
    """Stands in for the native module."""
    return SimpleNamespace(cuda=cuda, build_info=lambda: {"cuda": cuda, **info})


_WITHOUT_CUDA = _built(cuda=False, cuda_note="nvcc was not found when hdet was built")
_WITH_CUDA = _built(cuda=True, cuda_archs="80 90")


def test_cuda_tensors_without_cuda_kernels_use_torch_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "_C", _WITHOUT_CUDA)
    monkeypatch.setattr(kernels, "_warned", False)
    monkeypatch.setitem(sys.modules, "triton", None)  # is missing
    with pytest.warns(
        RuntimeWarning, match="torch backend: .* nvcc was not found when hdet was built"
    ):
        assert kernels.select("auto", torch.device("cuda", 0)).name == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.select("auto", torch.device("cuda", 0)).name == "torch"
    with pytest.raises(RuntimeError, match='backend="cuda" is not usable: .* nvcc was not found'):
        kernels.select("cuda", torch.device("cuda", 0))


def test_cuda_tensors_without_cuda_kernels_use_triton_if_it_is_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip(
        "triton", reason="Triton is not installed; there are wheels for Linux"
    )
    monkeypatch.setattr(native, "_C", _WITHOUT_CUDA)
    monkeypatch.setattr(kernels, "_warned", False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.warns(
        RuntimeWarning, match="triton backend: .* nvcc was not found when hdet was built"
    ):
        assert kernels.select("auto", torch.device("cuda", 0)).name == "triton"


def test_only_the_backend_that_is_asked_for_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at the others would import Triton and start CUDA."""

    def asked() -> bool:
        raise AssertionError("another backend was asked")

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    monkeypatch.setattr(torch.backends.cuda, "is_built", asked)
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("cpu", "torch"):
        assert kernels.select(name, torch.device("cpu")).name == name
    monkeypatch.setattr(native, "_C", _WITH_CUDA)
    with pytest.raises(AssertionError, match="another backend"):
        kernels.available()


def test_the_capability_is_that_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_C", _WITH_CUDA)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda device=None: (7, 5) if device == torch.device("cuda", 1) else (9, 0),
    )
    assert kernels.available()["cuda"] == kernels.USABLE
    with pytest.raises(RuntimeError, match="compute capability 7.5, hdet was built for 80 90"):
        kernels.select("cuda", torch.device("cuda", 1))


OTHER_BUILDS = """
import importlib, sys, types
for interface, rules in {builds}:
    for name in [name for name in sys.modules if name.split(".")[0] == "hdet"]:
        del sys.modules[name]
    sys.modules["hdet._C"] = types.SimpleNamespace(INTERFACE=interface, RULES=rules)
    print(importlib.import_module("hdet.kernels.native").missing)
"""


def test_a_module_built_with_other_tables_or_rules_is_not_used() -> None:
    number, rules = _C.INTERFACE, _C.RULES
    builds = [(number, rules), (number + 1, rules), (number, "others")]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_BUILDS.format(builds=builds)], capture_output=True, text=True,
        check=False, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = ["built from other sources: reinstall hdet" in x for x in done.stdout.splitlines()]
    assert said == [False, True, True], done.stdout
