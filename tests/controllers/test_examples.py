"""The five controllers of examples/controllers: third-party code of at most 60 lines on public names, in one process and in two."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from tests.controllers.runs import Run, build, loss_of, losses_of
from tests.controllers.runs import batch as batch_of
from tests.distributed import run_ranks

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
    theirs = Run(lambda m: made("softmax", temperature=1e-3), constant=True, lr=1e-4).train()
    ours = Run(lambda m: hdet.SoftmaxController(1e-3, decay=None), constant=True, lr=1e-4).train()
    assert theirs.ensemble.corrections["lr"] == pytest.approx(ours.ensemble.corrections["lr"], rel=1e-9)
    assert theirs.ensemble.corrections["lr"] != 1


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_range_test_goes_back_each_time_and_finds_a_better_rate(replicas: int) -> None:
    run = Run(lambda m: made("range_test", steps=20, lowest=1.0, doublings=8), replicas=replicas, constant=True, lr=1e-4, steps=400)
    before = run.weights()
    for cycle in range(3):
        run.train(20)
        assert all(map(torch.equal, run.weights(), before)), "each value is tried from the same weights"
        assert run.ensemble.values()["lr"] == pytest.approx(1e-4 * 2 ** (cycle + 1))
    run.train()
    assert run.history[-1]["corrections"]["lr"] > 4
    plain = Run(lambda m: None, replicas=replicas, constant=True, lr=1e-4, steps=400).train()
    assert run.loss() < plain.loss()


def test_a_population_parts_and_adopts_the_winner() -> None:
    run = Run(lambda m: made("population", ready=2, factors=(0.5, 1.0, 2.0)), constant=True, lr=1e-3)
    assert run.replicas is not None
    run.train(10)
    sets = run.replicas.sets(list(run.model.parameters()))
    multipliers, before = run.history[0]["multipliers"]["lr"], [own[0].detach().clone() for own in sets]
    assert multipliers[0] == 1.0 and {1.0} < set(multipliers) <= {0.5, 1.0, 2.0}
    other = next(r for r, rho in enumerate(multipliers) if rho != 1.0)
    assert not torch.equal(before[0], before[other]) and not run.ensemble.in_sync, "nothing is averaged"
    run.train(10)
    record = run.history[1]
    best = min(range(4), key=lambda r: record["losses"][r])
    assert record["record"]["end"] == {"kind": "Adopt", "replica": best}
    assert all(torch.equal(own[0], sets[0][0]) for own in sets) and run.ensemble.in_sync, "all are the winner now"
    assert not any(torch.equal(sets[0][0], old) for old in before)
    assert record["corrections"]["lr"] == record["multipliers"]["lr"][best], "and so are its values"
    run.train()
    assert run.loss() < 1.2


@pytest.mark.parametrize(("replicas", "cycles"), [(1, 5), (2, 3), (4, 2)])
def test_a_trial_scores_each_candidate_from_the_same_weights_and_keeps_the_best(replicas: int, cycles: int) -> None:
    run = Run(lambda m: made("trial", candidates=(0.25, 1.0, 4.0, 16.0, 64.0), steps=20), replicas=replicas, constant=True, lr=3e-4)
    before = run.weights()
    for cycle in range(cycles):
        assert run.ensemble.cycle == cycle
        run.train(20)
        assert all(map(torch.equal, run.weights(), before))
    controller = run.controller
    assert controller is not None and controller.idle
    losses = controller.state_dict()["losses"]
    assert len(losses) == 5 and run.ensemble.corrections["lr"] == (0.25, 1.0, 4.0, 16.0, 64.0)[losses.index(min(losses))] > 1
    run.train()
    assert run.ensemble.corrections["lr"] > 1


def test_a_plateau_halves_the_rate_and_freezes() -> None:
    run = Run(lambda m: made("plateau", patience=2, least=0.2, freeze_after=100), replicas=1, constant=True, lr=1e-3)
    run.train()
    moves = [record["record"]["decisions"][0]["factor"] for record in run.history if record["record"]["decisions"]]
    assert moves.count(0.5) >= 2 and run.ensemble.corrections["lr"] == 0.5 ** moves.count(0.5)
    assert set(moves[10:]) == {1.0}, "nothing moves after step 100"


def two_ranks(rank: int, world: int, file: str, settings: dict[str, Any]) -> tuple[list[float], list[float], float]:
    """Local gradients, so that replicas differ by more than their values: (weights of the first layer, corrections by cycle, loss)."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    controller, corrections = made(file, **settings), []
    ensemble = hdet.Ensemble(
        optimizer, None, knobs=[hdet.LearningRate(0.3)], sync=hdet.Sync(10, gradients="local", moments="reset"), total_steps=120, controller=controller, log=lambda record, _: corrections.append(record["corrections"]["lr"]),
    )  # fmt: skip
    for step in range(120):
        loss = loss_of(model, batch_of(1000 * step + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        data = batch_of(1000 * step + rank)
        ensemble.step(loss, closure=lambda data=data: losses_of(model, data))
    ensemble.converge()
    return model[0].weight.detach().flatten().tolist(), corrections, float(loss_of(model, batch_of(99, 512)))


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
