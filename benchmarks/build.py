"""Builds hdet._C in place, as `python setup.py build_ext --inplace` does, but without reading
pyproject.toml.

A setuptools before 77 refuses its licence field, and a machine that reaches no network has the
setuptools it has. The environment variables are those of setup.py.

    python -m benchmarks.build [--choices]

--choices: what an install takes, by choice of kernels, each compiled anew and thrown away: the
table of docs/install.md.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Distribution, Extension

ROOT = Path(__file__).resolve().parents[1]


def setup_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hdet_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    return setup


def found(pattern: str, file: str) -> str:
    match = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return match[1]


def build(setup: ModuleType, **places: object) -> Any:
    """`places`: attributes of setuptools' command, which say where the module goes."""
    version = found(r'^__version__ = "(.+)"$', "hdet/__init__.py")
    extension = Extension("hdet._C", sources=[])
    command = setup.CMakeBuild(
        Distribution({"name": "hdet", "version": version, "ext_modules": [extension]})
    )
    vars(command).update(places)
    command.ensure_finalized()
    command.run()


def compile_anew(archs: str) -> tuple[float, float]:
    """Seconds of processor time, and MB of the module. `archs`: none is C++ alone."""
    os.environ |= {"HDET_CUDA": "1" if archs else "0", "HDET_CUDA_ARCHS": archs}
    setup = setup_module()
    configure = setup.CMakeBuild._configure

    def configure_anew(*arguments: object) -> Path:
        folder: Path = configure(*arguments)
        subprocess.run([setup.find_tool("ninja"), "-C", folder, "-t", "clean"], check=True)
        return folder

    setup.CMakeBuild._configure = configure_anew
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        build(setup, build_lib=folder)
        after = os.times()
        (module,) = Path(folder).rglob("_C*")
        size = module.stat().st_size / 1e6
    return sum(after[2:4]) - sum(before[2:4]), size


def print_choices() -> None:
    choices = {
        "C++ alone": "",
        "one GPU's": "90",
        "default without a GPU": ";".join(setup_module().DEFAULT_ARCHS),
        "wheels": found("^WHEEL_ARCHS := (.+)", "Makefile"),
    }
    print("| kernels | architectures | processor seconds | module, MB |\n|---|---|---|---|")
    for name, archs in choices.items():
        seconds, size = compile_anew(archs)
        print(f"| {name} | {archs} | {seconds:.0f} | {size:.1f} |", flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    if sys.argv[1:] == ["--choices"]:
        print_choices()
    else:
        build(setup_module(), inplace=True)
