"""docs/names.md: every public name of before is on it, and every name that it gives for now exists."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.cli.main import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "names.md").read_text()

BEFORE = [
    "BaseController", "Betas", "ClipNorm", "CoresidentReplicas", "Dropout", "Ensemble", "Eps", "Decision", "Divergence", "Evidence", "FusedAdam", "FusedAdamW", "FusedLion", "FusedSGD",
    "GroupValue", "HypergradientController", "HypergradientRule", "LabelSmoothing", "LearningRate", "LineController", "LineRule", "LossWeights", "ModuleValue",
    "OneCycleAutoLR", "ProbeController", "ProbeRule", "RankController", "ReplicaDisagreement", "ReplicaLost", "Replicas", "ReplicasDiverged", "Scalar", "SlopeController",
    "SoftmaxController", "Temperature", "WeightDecay", "warm_noise_", "checkpoint", "converge", "kernels",
]  # fmt: skip
"""`hdet.__all__` of commit 9098dd5, but for ``__version__``."""


def rows(page: str) -> list[tuple[str, str, str]]:
    """(before, now, remark) of all tables."""
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return [(row[0], row[1], row[2]) for row in cells if row[0] != "before" and set(row[0]) != {"-"}]


def missing(now: str) -> list[str]:
    """What a cell of the column "now" names that does not exist."""
    if now == "gone":
        return []
    names = re.findall(r"`([^`]+)`", now)
    if not names or re.sub(r"`[^`]+`|[\s,]", "", now):
        return [f"{now!r} is neither names nor 'gone'"]
    return [name for name in names if not exists(name)]


def exists(name: str) -> bool:
    if name.startswith("hdet "):
        return main([name.removeprefix("hdet "), "--help"]) == 0
    if name.startswith("python -m "):
        module = name.removeprefix("python -m ")
        spec = importlib.util.find_spec(module)
        return spec is not None and (spec.submodule_search_locations is None or importlib.util.find_spec(f"{module}.__main__") is not None)
    if "/" in name:
        return (ROOT / name).exists()
    argument = re.fullmatch(r"([\w.]+)\((\w+)=\)", name)
    if argument is not None:
        owner = found(argument[1])
        return owner is not None and argument[2] in inspect.signature(owner).parameters
    return found(name) is not None


def found(name: str) -> Any:
    """The object, or a true value for an attribute that instances have; None if there is no such thing."""
    parts = name.split(".")
    if parts[0] not in ("hdet", "benchmarks"):
        parts.insert(0, "hdet")
    owner: Any = importlib.import_module(parts[0])
    for part in parts[1:]:
        if hasattr(owner, part):
            owner = getattr(owner, part)
        elif inspect.ismodule(owner) and importlib.util.find_spec(f"{owner.__name__}.{part}") is not None:
            owner = importlib.import_module(f"{owner.__name__}.{part}")
        elif isinstance(owner, type) and attribute(owner, part):
            return True
        else:
            return None
    return True if owner is None else owner


def attribute(owner: type, name: str) -> bool:
    """Does the class, or one that it inherits from, give it to instances?"""
    return any(
        name in getattr(base, "__annotations__", ()) or re.search(rf"\bself\.{name}\b.* = |\bself, .*\b{name} = ", inspect.getsource(base))
        for base in owner.__mro__
        if base.__module__.startswith("hdet")
    )


def test_every_public_name_of_before_has_a_row() -> None:
    named = [before for before, _, _ in rows(PAGE)]
    assert not [name for name in BEFORE if named.count(f"`{name}`") != 1]


def test_unchanged_names_are_the_same_and_changed_ones_are_no_more() -> None:
    for before, now, remark in rows(PAGE):
        name = before.strip("`")
        if name in BEFORE:
            assert (name in hdet.__all__) == (now == f"`hdet.{name}`"), before
            assert remark.startswith("renamed") == (name not in hdet.__all__ and now != "gone"), before


def test_every_name_of_now_exists(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {before: names for before, now, _ in rows(PAGE) if (names := missing(now))}
    capsys.readouterr()
    assert not wrong


def test_files_that_have_moved_are_not_where_they_were() -> None:
    moved = [before.strip("`") for before, _, _ in rows(PAGE) if re.fullmatch(r"`hdet/[\w/]+\.py`", before)]
    assert len(moved) > 80
    assert not [path for path in moved if (ROOT / path).exists() and path != "hdet/triton_kernels/"]


@pytest.mark.parametrize(
    "wrong",
    ["`hdet.Ensembel`", "`hdet.Ensemble(converge=)`", "`Ensemble.converged`", "`Evidence.probes`", "`hdet.run.slots`", "`python -m benchmarks.nothing`",
     "`python -m benchmarks.results`", "`hdet evidence`", "`examples/recsys.py`", "somewhere else", ""],
)  # fmt: skip
def test_a_wrong_name_is_found(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert missing(wrong)
    capsys.readouterr()
