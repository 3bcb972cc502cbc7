"""Choosing a backend: by name or not at all."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch

import hdet
from hdet import _C, kernels
from hdet.kernels import native, selection

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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.select("auto", torch.device("cpu")).name == "cpu"


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("metal", "cpu", "backend='metal' is unknown; choose auto, cpu, cuda, triton, torch"),
        ("cuda", "cpu", 'backend="cuda" does not work on tensors on cpu'),
        ("cpu", "meta", 'backend="cpu" does not work on tensors on meta'),
    ],
)
def test_what_cannot_be_chosen_is_refused(backend: str, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.select(backend, torch.device(device))
    with pytest.raises(ValueError, match=message):
        kernels.average_(
            torch.zeros(1, 0 if backend == "metal" else 3, device=device), [1], backend
        )


# -- what "auto" takes on machines that are not here -----------------------------------------------


@dataclass(frozen=True)
class Module:
    """Stands in for the native one."""

    cuda_archs: str = ""
    cuda_note: str = ""
    cuda_compiler: str = "NVIDIA 12.8.93"
    openmp: bool = True

    @property
    def cuda(self) -> bool:
        return bool(self.cuda_archs)


NEWEST = Module("75 80 90 100")
NO_CUDA = Module(cuda_note="nvcc was not found when hdet was built")


@dataclass(frozen=True)
class Machine:
    """A GPU's capability and driver, and what is installed beside it; no capability: no GPU."""

    module: Module = NEWEST
    capability: tuple[int, int] | None = (9, 0)
    driver: tuple[int, int] = (12, 8)
    hip: str | None = None
    triton: bool = True
    compiler: bool = True
    missing: str | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        number = 1000 * self.driver[0] + 10 * self.driver[1]
        monkeypatch.setattr(selection, "_warned", set())
        monkeypatch.setattr(selection, "_has_c_compiler", lambda: self.compiler)
        monkeypatch.setattr(native, "missing", self.missing)
        monkeypatch.setattr(native, "torch_interface", None)
        monkeypatch.setattr(native, "_C", self.module)
        monkeypatch.setattr(torch.version, "hip", self.hip)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: self.capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: number, raising=False)
        if not self.triton:
            monkeypatch.setitem(sys.modules, "triton", None)
        elif self.capability is not None:
            triton = pytest.importorskip("triton", reason="there are wheels for Linux")
            monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


T4, A100, H100, B200, RTX_5090 = (7, 5), (8, 0), (9, 0), (10, 0), (12, 0)
OF_80 = Module("80 90 100")

NATIVE = {
    "the module's own architecture": Machine(),
    "a newer minor version": Machine(Module("80-real"), (8, 9)),
    "T4": Machine(capability=T4),
    "by PTX": Machine(Module("80-real 100"), RTX_5090),
    "by PTX alone": Machine(Module("90-virtual"), B200),
    "this very architecture": Machine(Module("90a"), H100),
    "its family": Machine(Module("100f"), (10, 3)),
    "an older driver of the toolkit's major version": Machine(driver=(12, 2)),
}
OTHERS: dict[str, tuple[Machine, str, str]] = {
    "no module": (
        Machine(missing="the native module cannot be imported"),
        "triton",
        "the native module cannot be imported",
    ),
    "no CUDA kernels": (Machine(NO_CUDA), "triton", "nvcc was not found.*HDET_CUDA=1"),
    "neither Triton": (
        Machine(NO_CUDA, triton=False),
        "torch",
        "nvcc was not found.*Triton cannot be imported.*pip install hdet.triton.",
    ),
    "nor a compiler for it": (Machine(NO_CUDA, compiler=False), "torch", "needs a C compiler"),
    "T4, built for newer ones": (
        Machine(OF_80, T4),
        "torch",
        'capability 7.5, hdet was built for 80 90 100.*HDET_CUDA_ARCHS="75".*Triton needs.* 8.0',
    ),
    "old driver": (
        Machine(Module("90", cuda_compiler="NVIDIA 13.0.93"), driver=(12, 8)),
        "triton",
        "driver is one of CUDA 12.8, hdet was built with CUDA 13.0: update the driver",
    ),
    "PTX for an older driver": (
        Machine(Module("80"), driver=(12, 2)),
        "triton",
        "compute capability 9.0, hdet was built for 80",
    ),
    "-real": (Machine(Module("80-real")), "triton", "built for 80-real"),
    "a newer minor version than the device": (
        Machine(Module("86-real"), A100),
        "triton",
        "built for 86-real",
    ),
    "90a": (Machine(Module("90a"), B200), "triton", "built for 90a"),
    "another family": (Machine(Module("100f"), RTX_5090), "triton", "built for 100f"),
    "AMD": (Machine(hip="6.4"), "triton", "do not run on AMD"),
    "AMD without Triton": (Machine(hip="6.4", triton=False), "torch", "do not run on AMD"),
}


@pytest.mark.parametrize("name", NATIVE)
def test_a_gpu_that_the_module_has_code_for_gets_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    NATIVE[name].install(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selection.automatic(torch.device("cuda", 0)) == ("cuda", "")


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_gpu_gets_another_backend_with_one_warning(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, expected, why = OTHERS[name]
    machine.install(monkeypatch)
    device = torch.device("cuda", 0)
    with pytest.warns(RuntimeWarning, match=f"cuda use the {expected} backend: .*{why}"):
        assert kernels.select("auto", device).name == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.select("auto", device).name == expected
    with pytest.raises(RuntimeError, match='backend="cuda" is not usable: .*"torch" works'):
        kernels.select("cuda", device)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_devices_of_other_kinds_get_torchs_calls(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_warned", set())
    with pytest.warns(RuntimeWarning, match=f"no kernels of its own for {kind}"):
        assert kernels.select("auto", torch.device(kind)).name == "torch"


def test_a_cpu_without_the_module_gets_torchs_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "hdet's native module cannot be imported: no such file"
    Machine(missing=missing, capability=None).install(monkeypatch)
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    with pytest.warns(RuntimeWarning, match="cpu use the torch backend: .* no such file"):
        hdet.FusedSGD([param], lr=0.5).step()
    assert torch.equal(param.detach(), torch.full((3,), 0.5))
    assert kernels.available()["cpu"] == native.missing
    with pytest.raises(RuntimeError, match='backend="cpu" is not usable: .* no such file'):
        kernels.select("cpu", torch.device("cpu"))


def test_one_thread_for_want_of_openmp_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, whose compiler has none."""
    Machine(Module(openmp=False), None).install(monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    with pytest.warns(RuntimeWarning, match="cpu use the cpu backend: .*without OpenMP"):
        kernels.select("auto", torch.device("cpu"))


def test_only_what_may_be_taken_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at the others would import Triton and start CUDA."""

    def asked() -> bool:
        raise AssertionError("another backend was asked")

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    monkeypatch.setattr(torch.backends.cuda, "is_built", asked)
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("auto", "cpu", "torch"):
        expected = "cpu" if name == "auto" else name
        assert kernels.select(name, torch.device("cpu")).name == expected
    monkeypatch.setattr(native, "_C", Module("90"))
    with pytest.raises(AssertionError, match="another backend"):
        kernels.available()


def test_the_capability_is_that_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(OF_80).install(monkeypatch)
    second = torch.device("cuda", 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device=None: T4 if device == second else H100
    )
    assert kernels.available()["cuda"] == kernels.USABLE
    with pytest.raises(RuntimeError, match="compute capability 7.5, hdet was built for 80 90 100"):
        kernels.select("cuda", second)


OTHER_BUILDS = """
import importlib, sys, types
for sources, rules in {builds}:
    for name in [name for name in sys.modules if name.split(".")[0] == "hdet"]:
        del sys.modules[name]
    sys.modules["hdet._C"] = types.SimpleNamespace(SOURCES=sources, RULES=rules)
    print(importlib.import_module("hdet.kernels.native").missing)
"""


def test_a_module_built_with_other_sources_or_rules_is_not_used() -> None:
    sources, rules = _C.SOURCES, _C.RULES
    builds = [(sources, rules), ("others", rules), (sources, "others")]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_BUILDS.format(builds=builds)], capture_output=True, text=True,
        check=False, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [
        "built from other sources: run pip install -e . again" in x
        for x in done.stdout.splitlines()
    ]
    assert said == [False, True, True], done.stdout
