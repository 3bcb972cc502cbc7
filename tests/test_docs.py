"""The code blocks of README.md and docs/ parse, and what they say of hdet is there: names, methods, and the arguments of calls."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hdet
from hdet.replicas import Replicas

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"\bhdet(?:\.[A-Za-z_]\w*)+")

KNOWN: dict[str, Any] = {"hdet": hdet, "checkpoint": hdet.checkpoint, "dist": dist}
"""what pages call by these names without an import in each block"""
INSTANCES = {"ensemble": hdet.Ensemble, "state": hdet.checkpoint.RunState, "replicas": Replicas, "probe": hdet.ProbeController}


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """First line and text of each block."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        yield text.count("\n", 0, match.start(1)) + 1, match[1]


def mistakes(source: str) -> list[str]:
    """What a block says that is not so."""
    tree = ast.parse(source)
    known, found = dict(KNOWN), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hdet":
            for alias in node.names:
                try:
                    known[alias.asname or alias.name] = getattr(importlib.import_module(node.module or ""), alias.name)
                except (ImportError, AttributeError):
                    found.append(f"line {node.lineno}: {node.module} has no {alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = resolved(node.value, known)
            if owner is not None and not has(owner, node.attr):
                found.append(f"line {node.lineno}: {ast.unparse(node)} does not exist")
        elif isinstance(node, ast.Call):
            found += wrong_arguments(node, known)
    return found


def wrong_arguments(node: ast.Call, known: dict[str, Any]) -> list[str]:
    function = resolved(node.func, known)
    if not callable(function):
        return []
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin
        return []
    method = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id in INSTANCES
    stars = any(isinstance(arg, ast.Starred) for arg in node.args) or any(keyword.arg is None for keyword in node.keywords)
    try:
        (signature.bind_partial if stars else signature.bind)(
            *[None] * (method + len(node.args)), **{keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
        )
    except TypeError as error:
        return [f"line {node.lineno}: {ast.unparse(node)}: {error}"]
    return []


def resolved(node: ast.expr, known: dict[str, Any]) -> Any:
    """The object that an expression names, or the class of which it is an instance; None if that cannot be told from here."""
    if isinstance(node, ast.Name):
        return known.get(node.id, INSTANCES.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value, known)
        found = None if owner is None else getattr(owner, node.attr, None)
        return None if isinstance(found, property) else found
    return None


def has(owner: Any, name: str) -> bool:
    """Also attributes that a class's methods give to its instances."""
    if hasattr(owner, name):
        return True
    return isinstance(owner, type) and any(
        name in getattr(base, "__annotations__", ()) or re.search(rf"\bself\.{name}\b", inspect.getsource(base))
        for base in owner.__mro__
        if base.__module__.startswith("hdet")
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_parse_and_name_what_exists(page: Path) -> None:
    found = [f"{page.name}, block at line {first}, {mistake}" for first, source in blocks(page) for mistake in mistakes(source)]
    assert not found, "\n".join(found)


# profiling.md has the names of ranges, which look like Python's
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "profiling.md"], ids=lambda page: page.name)
def test_names_in_the_text_exist(page: Path) -> None:
    missing = []
    for name in sorted(set(NAME.findall(page.read_text()))):
        owner: Any = hdet
        for part in name.split(".")[1:]:
            try:
                owner = getattr(owner, part) if hasattr(owner, part) else importlib.import_module(f"{owner.__name__}.{part}")
            except (ImportError, AttributeError):
                if not (isinstance(owner, type) and has(owner, part)):
                    missing.append(name)
                break
    assert not missing, missing


def test_a_wrong_block_is_found() -> None:
    for wrong in (
        "hdet.Ensembel(optimizer)",
        "from hdet.converge import Compresed",
        "checkpoint.load('run', state, absent=0)",
        "checkpoint.save('run')",
        "ensemble.synchronise()",
        "ensemble.observe(loss, tokens=3)",
        "replicas = hdet.Replicas.from_mesh()",
    ):
        assert mistakes(wrong), wrong
    assert not mistakes("ensemble.engine.step, ensemble.history, state.extra, optimizer.anything(1, x=2)")
    with pytest.raises(SyntaxError):
        mistakes("for ...:\n    pass")
