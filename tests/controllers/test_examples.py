"""The five controllers of examples/controllers: third-party code of at most 60 lines on public names, in one process and in two."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from tests.distributed import run_ranks

from .runs import run

FOLDER = Path(__file__).parents[2] / "examples" / "controllers"
NAMES = {
    "softmax": "PublishedSoftmax",
    "range_test": "RangeTest",
    "population": "Population",
    "trial": "Trial",
    "plateau": "PlateauHalver",
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
    assert len(text.splitlines()) <= 60
    tree = ast.parse(text)
    imports = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imports += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert set(imports) <= {"__future__", "hdet", "math", "random"}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "hdet"}
    assert used <= set(hdet.__all__)


def test_they_are_all_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NAMES)


def test_the_published_controller_follows_the_replicas_with_lower_losses() -> None:
    """From a rate that is far too low higher ones have lower losses; sigma is small enough for their differences to count."""
    theirs = run(lambda m: made("softmax", temperature=1e-3), constant=True, lr=1e-4).steps()
    ours = run(lambda m: hdet.SoftmaxController(1e-3, decay=None), constant=True, lr=1e-4).steps()
    assert theirs.ensemble.corrections["lr"] == pytest.approx(ours.ensemble.corrections["lr"], rel=1e-9)
    assert theirs.ensemble.corrections["lr"] != 1


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_range_test_goes_back_each_time_and_finds_a_better_rate(replicas: int) -> None:
    ran = run(lambda m: made("range_test", steps=20, lowest=1.0, doublings=8), together=replicas, constant=True, lr=1e-4, total=400)
    before = ran.weights()
    for cycle in range(3):
        ran.steps(20)
        assert torch.equal(ran.weights(), before), "each value is tried from the same weights"
        assert ran.records[cycle]["multipliers"]["lr"] == [2.0**cycle] * replicas
    ran.steps()
    assert ran.records[-1]["corrections"]["lr"] > 4
    plain = run(lambda m: None, together=replicas, constant=True, lr=1e-4, total=400).steps()
    assert ran.validation() < plain.validation()


def test_a_population_parts_and_adopts_the_winner() -> None:
    ran = run(lambda m: made("population", ready=2, factors=(0.5, 1.0, 2.0)), constant=True, lr=1e-3)
    ran.steps(10)
    multipliers, before = ran.records[0]["multipliers"]["lr"], ran.all_weights()
    assert multipliers[0] == 1.0 and {1.0} < set(multipliers) <= {0.5, 1.0, 2.0}
    other = next(r for r, rho in enumerate(multipliers) if rho != 1.0)
    assert not torch.equal(before[0], before[other]) and not ran.ensemble.in_sync, "nothing is averaged"
    ran.steps(10)
    record = ran.records[1]
    best = min(range(4), key=lambda r: record["losses"][r])
    assert record["record"]["end"] == {"kind": "Adopt", "replica": best}
    assert ran.equal() and ran.ensemble.in_sync, "all are the winner now"
    assert not any(torch.equal(ran.weights(), old) for old in before)
    assert record["corrections"]["lr"] == record["multipliers"]["lr"][best], "and so are its values"
    ran.steps()
    assert ran.validation() < 1.2


@pytest.mark.parametrize(("replicas", "cycles"), [(1, 5), (2, 3), (4, 2)])
def test_a_trial_scores_each_candidate_from_the_same_weights_and_keeps_the_best(replicas: int, cycles: int) -> None:
    ran = run(lambda m: made("trial", candidates=(0.25, 1.0, 4.0, 16.0, 64.0), steps=20), together=replicas, constant=True, lr=3e-4)
    before = ran.weights()
    for cycle in range(cycles):
        assert ran.ensemble.cycle == cycle
        ran.steps(20)
        assert torch.equal(ran.weights(), before)
    controller = ran.controller
    assert controller is not None and controller.idle
    losses = controller.state_dict()["losses"]
    assert len(losses) == 5 and ran.ensemble.corrections["lr"] == (0.25, 1.0, 4.0, 16.0, 64.0)[losses.index(min(losses))] > 1
    ran.steps()
    assert ran.ensemble.corrections["lr"] > 1


def test_a_plateau_halves_the_rate_and_freezes() -> None:
    ran = run(lambda m: made("plateau", patience=2, least=0.2, freeze_after=100), together=1, constant=True, lr=1e-3).steps()
    moves = [record["record"]["decisions"][0]["factor"] for record in ran.records if record["record"]["decisions"]]
    assert moves.count(0.5) >= 2 and ran.ensemble.corrections["lr"] == 0.5 ** moves.count(0.5)
    assert set(moves[10:]) == {1.0}, "nothing moves after step 100"


def two_ranks(rank: int, world: int, file: str, settings: dict[str, Any]) -> tuple[list[float], list[float], float]:
    """Local gradients, so that replicas differ by more than their values: (weights, corrections by cycle, loss)."""
    controller = made(file, **settings)
    ran = run(lambda m: controller, together=1, rank=rank, ddp=False, constant=True, total=120, gradients="local", moments="reset").steps()
    ran.ensemble.converge()
    return ran.weights().tolist(), [record["corrections"]["lr"] for record in ran.records], ran.validation()


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("softmax", {"temperature": 0.01}),
        ("range_test", {"steps": 6, "lowest": 0.25, "doublings": 6}),
        ("population", {"ready": 1}),
        ("trial", {"steps": 30, "candidates": (0.1, 1.0, 10.0)}),
        ("plateau", {"patience": 2, "least": 0.1}),
    ],
)
def test_two_processes_decide_alike_and_end_alike(file: str, settings: dict[str, Any]) -> None:
    one, two = run_ranks(two_ranks, 2, file, settings)
    assert one == two, "weights, corrections and loss are the same to the bit on both ranks"
    assert len(set(one[1])) > 1, "it has decided something"
