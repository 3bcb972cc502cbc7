"""The build's decisions, and that its failures are loud."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from unittest.mock import ANY

import pytest

from ..limits import HANG_S
from .tools import ROOT, setup_module

ARCHS = "75 80 86 89 90 100"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without nvcc, and none of our variables set. Returns a folder that is on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("HDET_CUDA", "HDET_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(folder))
    return folder


def script(path: Path, *lines: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + "\n".join(f"echo {line}" for line in lines) + "\n")
    path.chmod(0o755)
    return str(path)


def nvcc_in(folder: Path, version: str = "12.8") -> str:
    says = f"Cuda compilation tools, release {version}, V{version}.61"
    return script(folder / "nvcc", *(f"compute_{arch}" for arch in ARCHS.split()), f"'{says}'")


def test_without_nvcc_the_reason_is_recorded(bare: Path) -> None:
    assert setup_module().cuda_options() == [
        "-DHDET_CUDA=OFF",
        "-DHDET_CUDA_NOTE=nvcc was not found when hdet was built",
    ]


def test_nvcc_is_found_on_path_and_in_cuda_home_first(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = nvcc_in(bare)
    assert setup_module().find_nvcc() == on_path
    at_home = nvcc_in(tmp_path / "toolkit" / "bin")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    assert setup_module().find_nvcc() == at_home


def test_architectures(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = nvcc_in(bare)
    choose = setup_module().choose_archs
    default = ["80-virtual", "90"]
    assert choose(nvcc) == default
    script(bare / "nvidia-smi", "9.0", "8.9", "9.0")
    assert choose(nvcc) == ["89", "90"]
    script(bare / "nvidia-smi", "7.5")
    assert choose(nvcc) == ["75"]
    for other in ("7.0", "12.0"):  # older than the kernels support, newer than this nvcc knows
        script(bare / "nvidia-smi", other)
        assert choose(nvcc) == default
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0 8.0;9.0+PTX")
    assert choose(nvcc) == ["80-real", "90"]
    monkeypatch.setenv("HDET_CUDA_ARCHS", "86;89-real, 90")
    assert choose(nvcc) == ["86", "89-real", "90"]
    monkeypatch.setenv("HDET_CUDA_ARCHS", "80;130")
    with pytest.raises(SystemExit, match="HDET_CUDA_ARCHS names 130, but .* supports 75, 80"):
        choose(nvcc)


def test_cuda_can_be_skipped_and_wrong_values_are_refused(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc_in(bare)
    assert setup_module().cuda_options()[:2] == [
        "-DHDET_CUDA=ON",
        "-DHDET_CUDA_ARCHS=80-virtual;90",
    ]
    monkeypatch.setenv("HDET_CUDA", "0")
    assert setup_module().cuda_options() == [
        "-DHDET_CUDA=OFF",
        "-DHDET_CUDA_NOTE=hdet was built with HDET_CUDA=0",
    ]
    monkeypatch.setenv("HDET_CUDA", "yes")
    with pytest.raises(SystemExit, match="HDET_CUDA=yes is not understood; use 0"):
        setup_module().cuda_options()


@pytest.mark.parametrize(("version", "said"), [("11.5", "11.5"), ("none", "of an unknown version")])
def test_an_old_nvcc_is_left_alone_unless_cuda_is_required(
    bare: Path, version: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = nvcc_in(bare, version)
    note = f"nvcc was {said} when hdet was built, which is older than 12.0"
    assert setup_module().cuda_options() == ["-DHDET_CUDA=OFF", f"-DHDET_CUDA_NOTE={note}"]
    monkeypatch.setenv("HDET_CUDA", "1")
    assert f"-DCMAKE_CUDA_COMPILER={nvcc}" in setup_module().cuda_options()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the build reads."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    names = "setup.py pyproject.toml CMakeLists.txt MANIFEST.in README.md LICENSE"
    for name in names.split():
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    for name in ("hdet", "triton_kernels", "src"):  # and the links between them
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    return folder


def leave(checkout: Path, name: str) -> Path:
    """Its only source with anything in it: what fails there fails without waiting for the others,
    which take a minute."""
    for path in (checkout / "csrc").rglob("*.cpp"):
        if path.name != name:
            path.write_text("")
    return next((checkout / "csrc").rglob(name), checkout)


def python(
    cwd: Path, *command: str, timeout: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env={**os.environ, **environment}, timeout=timeout,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def build(checkout: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(checkout, "setup.py", *(command or ("build_ext", "--inplace")), **environment)


def test_required_cuda_that_is_missing_is_an_error(bare: Path, checkout: Path) -> None:
    result = build(checkout, HDET_CUDA="1")
    assert result.returncode != 0
    assert (
        "HDET_CUDA=1, but nvcc was not found in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda"
        in result.stderr
    )
    assert not list(checkout.glob("hdet/_C*.so"))


def test_without_a_compiler_wheels_are_named(bare: Path, checkout: Path) -> None:
    result = build(checkout, CXX="")
    assert result.returncode != 0
    assert "no C++ compiler was found" in result.stderr and "a wheel of hdet" in result.stderr


@pytest.mark.parametrize("wish", ["", "1"])
def test_an_nvcc_that_compiles_nothing_ends_the_build_only_where_cuda_is_required(
    checkout: Path, wish: str
) -> None:
    """As where it refuses the C++ compiler. The build that goes on is that of no source at all."""
    leave(checkout, "none")
    nvcc_in(checkout / "toolkit" / "bin")
    result = build(checkout, HDET_CUDA=wish, CUDA_HOME=str(checkout / "toolkit"))
    note = "no CUDA kernels: nvcc and the C++ compiler did not work together"
    assert (note in result.stdout) == (wish == "")
    assert ("cmake could not configure" in result.stderr) == (wish == "1")
    assert list(checkout.glob("hdet/_C*.so")) == ([] if wish == "1" else [ANY])


def test_broken_source_fails_the_build_with_the_compilers_message(checkout: Path) -> None:
    leave(checkout, "bindings.cpp").write_text("#error broken on purpose\n")
    result = build(checkout, HDET_CUDA="0")
    assert result.returncode != 0
    assert "broken on purpose" in result.stdout + result.stderr
    assert "the native module did not build" in result.stderr
    assert not list(checkout.glob("hdet/_C*.so"))


def test_source_distribution_has_the_sources_and_no_tests(checkout: Path) -> None:
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_nothing.py").write_text("")
    result = build(checkout, "sdist")
    assert result.returncode == 0, result.stderr
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    files = (path for path in (ROOT / "csrc").rglob("*.*") if path.suffix != ".pyc")
    sources = {str(path.relative_to(ROOT)) for path in files}
    package = {f"src/hdet/{name}" for name in ("py.typed", "_C.pyi", "triton_kernels/step.py")}
    assert {"CMakeLists.txt", "setup.py", *package, *sources} <= names
    assert not [name for name in names if name.endswith(".so")]


def test_the_wheel_holds_hdet_and_nothing_of_the_repository_beside_it(
    checkout: Path, tmp_path: Path
) -> None:
    """As it is packed, but for the native module, which takes minutes."""
    for folder in ("benchmarks", "examples", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "*.jsonl")
        shutil.copytree(ROOT / folder, checkout / folder, ignore=ignored)
    result = build(checkout, "build_py", "bdist_wheel", "--skip-build")
    assert result.returncode == 0, result.stderr
    (archive,) = (checkout / "dist").glob("*.whl")
    names = zipfile.ZipFile(archive).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"hdet"}
    kernels = {f"triton_kernels/{path.name}" for path in (ROOT / "triton_kernels").glob("*.py")}
    assert "triton_kernels/__init__.py" in kernels
    wanted = ("__init__.py", "__init__.pyi", "py.typed", *kernels)
    assert {f"hdet/{name}" for name in wanted} <= set(names)
    assert not [name for name in names if name.endswith("/cost.py") or "recsys" in name], (
        "what only our own measurements use"
    )
    (unpacked := tmp_path / "unpacked").mkdir()
    zipfile.ZipFile(archive).extractall(unpacked)
    assert triton_kernels(tmp_path, unpacked) == unpacked / "hdet" / "triton_kernels"


def triton_kernels(cwd: Path, path: Path, site: Path | None = None) -> Path:
    """The folder in which a process finds hdet.triton_kernels, with `path` as PYTHONPATH, and
    `site` as a folder of installed packages."""
    code = (
        "import sys, site; [site.addsitedir(folder) for folder in sys.argv[1:]]; import "
        "hdet.triton_kernels.chunks as m; print(m.__file__)"
    )
    paths = os.pathsep.join(map(str, (path, site or path, sysconfig.get_paths()["purelib"])))
    # -S: without the hdet that these tests run with
    command = "-S", "-c", code, *([str(site)] if site else [])
    done = python(cwd, *command, timeout=HANG_S, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    return (cwd / done.stdout.strip()).parent


def test_an_editable_install_and_pythonpath_find_hdet_and_its_triton_kernels(
    checkout: Path, tmp_path: Path
) -> None:
    """Kernels lie beside hdet/, where a link in it leads to. A folder hdet in the current one, such
    as a clone's, hides nothing."""
    assert (checkout / "hdet" / "triton_kernels").is_symlink()
    place = checkout / "hdet" / "triton_kernels"
    assert triton_kernels(checkout, Path(".")) == place
    setup = "from setuptools import setup; setup()"  # no native module
    command = "-c", setup, "editable_wheel", "--dist-dir", str(tmp_path)
    done = python(checkout, *command, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.whl")
    (site := tmp_path / "site").mkdir()
    zipfile.ZipFile(archive).extractall(site)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "hdet").mkdir(parents=True)
    assert triton_kernels(elsewhere, elsewhere, site).samefile(place)
