"""The controllers of examples/controllers: third-party code on public names."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import hdet
from tests.harness import batch

from .runs import run

FOLDER = Path(__file__).parents[2] / "examples" / "controllers"
NAMES = {
    "softmax": "PublishedSoftmax",
    "plateau": "PlateauHalver",
    "slope": "Slope",
    "hypergradient": "Hypergradient",
}


def made(file: str, **settings: Any) -> hdet.Controller:
    spec = importlib.util.spec_from_file_location(f"example_{file}", FOLDER / f"{file}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    controller: hdet.Controller = getattr(module, NAMES[file])(**settings)
    return controller


@pytest.mark.parametrize("file", NAMES)
def test_it_is_short_and_uses_public_names_alone(file: str) -> None:
    text = (FOLDER / f"{file}.py").read_text()
    assert len(text.splitlines()) <= 80
    nodes = list(ast.walk(ast.parse(text)))
    imported = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    assert imported <= {"__future__", "hdet", "hdet.controllers", "math", "torch", "typing"}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    assert {n.attr for n in attributes if getattr(n.value, "id", "") == "hdet"} <= set(hdet.__all__)


def test_they_are_all_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NAMES)


def test_the_published_controller_follows_the_replicas_with_lower_losses() -> None:
    """From a rate that is far too low higher ones have lower losses; sigma is small enough for
    their differences to count."""
    theirs = run(lambda m: made("softmax", temperature=1e-3), constant=True, lr=1e-4).steps()
    ours = run(lambda m: hdet.SoftmaxController(1e-3, decay=None), constant=True, lr=1e-4).steps()
    found, expected = (ran.ensemble.corrections["lr"] for ran in (theirs, ours))
    assert found == pytest.approx(expected, rel=1e-9) and found != 1


@pytest.mark.parametrize(("file", "together"), [("slope", 4), ("hypergradient", 1)])
def test_a_rate_that_is_far_too_low_is_left(file: str, together: int) -> None:
    ran = run(
        lambda m: made(file, freeze_after=0.5), together=together, constant=True, lr=1e-4,
        total=400, spread=0.5, data=lambda key: batch(0),
    )  # fmt: skip
    assert ran.steps().ensemble.corrections["lr"] > 3 and ran.controller.idle
    ran.ensemble.close()


def test_a_plateau_halves_the_rate_and_freezes() -> None:
    settings = {"patience": 2, "least": 0.2, "freeze_after": 100}
    ran = run(lambda m: made("plateau", **settings), together=1, constant=True).steps()
    decided = [record["record"]["decisions"] for record in ran.records]
    moves = [decisions[0]["factor"] for decisions in decided if decisions]
    assert moves.count(0.5) >= 2 and ran.ensemble.corrections["lr"] == 0.5 ** moves.count(0.5)
    assert set(moves[10:]) == {1.0}, "nothing moves after step 100"
