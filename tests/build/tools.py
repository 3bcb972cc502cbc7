"""setup.py's functions, and what the machine has to build with."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def setup_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hdet_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nvcc() -> str | None:
    return setup_module().find_nvcc()


def include_rules(folder: Path) -> str:
    """A compiler flag: rules.h is printed into this folder, as pip's build does, without torch."""
    printed = [sys.executable, "-IS", str(ROOT / "csrc" / "generate.py"), "--cpp"]
    with (folder / "rules.h").open("w") as file:
        subprocess.run(printed, stdout=file, check=True)
    return f"-I{folder}"


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++")
