"""Builds hdet._C in place, as `python setup.py build_ext --inplace` does, but without reading
pyproject.toml.

A setuptools before 77 refuses its licence field, and a machine that reaches no network has the
setuptools it has. The environment variables are those of setup.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from setuptools import Distribution, Extension

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    os.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("hdet_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    version = re.search(
        r'^__version__ = "(.+)"$',
        (ROOT / "hdet/__init__.py").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert version is not None
    extension = Extension("hdet._C", sources=[])
    command = setup.CMakeBuild(
        Distribution({"name": "hdet", "version": version[1], "ext_modules": [extension]})
    )
    command.inplace = True
    command.ensure_finalized()
    command.run()


if __name__ == "__main__":
    main()
