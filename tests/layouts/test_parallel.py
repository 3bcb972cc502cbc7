"""examples/parallel.py: tp 2 x pp 2 x dp 2 on eight processes is the same model's run on two.

In float64: sums over tp and micro-batches have another order there, nothing else differs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import parallel
from tests.distributed import run_ranks
from tests.layouts.common import full

STEPS, INTERVAL = 8, 4
ARGUMENTS = ["--steps", str(STEPS), "--sync-interval", str(INTERVAL), "--max-lr", "3e-3"]

# Measured: 1.3e-15 in weights and 9e-16 in losses over all steps. A gradient that is small against
# its rounding would be magnified by Adam; three digits are left for that and other machines.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


def train(rank: int, world: int, arguments: list[str]) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    try:
        return collect(arguments)
    finally:
        torch.set_default_dtype(torch.float32)


def collect(arguments: list[str]) -> dict[str, Any]:
    run: dict[str, Any] = {"losses": [], "rates": [], "own": [], "weights": [], "records": []}

    def after_step(step: int, stage: Any, ensemble: Any, losses: list[torch.Tensor]) -> None:
        run["losses"].append([loss.item() for loss in losses])
        run["rates"].append(ensemble.values()["lr"])
        # This rank's part, and the parameters of its stage, gathered over tp.
        named = dict(stage.named_parameters())
        own = {name: getattr(p, "to_local", p.detach)().clone() for name, p in named.items()}
        run["own"].append(own)
        run["weights"].append({name: full(p) for name, p in named.items()})
        if ensemble.history and ensemble.history[-1]["step"] == step:
            run["records"].append(ensemble.history[-1])

    parallel.train(parallel.arguments(arguments), after_step)
    return run


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Something to predict."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    for number in range(4):
        words = draw.choices(["one ", "two ", "three ", "\n"], [4, 3, 2, 1], k=5000)
        (folder / f"{number}.txt").write_text("".join(words))
    return folder


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def eight(text: Path) -> Ranks:
    return run_ranks(train, 8, [*ARGUMENTS, "--data", str(text)])


@pytest.fixture(scope="module")
def two(text: Path) -> Ranks:
    return run_ranks(train, 2, [*ARGUMENTS, "--data", str(text), "--tp", "1", "--pp", "1"])


REPLICAS = [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_losses_and_base_values_are_those_of_two_ranks(eight: Ranks, two: Ranks) -> None:
    for replica, ranks in enumerate(REPLICAS):
        theirs = torch.tensor(two[replica]["losses"])
        for rank in ranks[2:]:  # the last stage
            torch.testing.assert_close(torch.tensor(eight[rank]["losses"]), theirs, **TOLERANCE)
        assert all(eight[rank]["losses"] == [[]] * STEPS for rank in ranks[:2])
    first, reference = eight[0]["records"], two[0]["records"]
    for run in eight:
        assert run["rates"] == pytest.approx(two[0]["rates"], rel=1e-12)
        assert len(run["records"]) == STEPS // INTERVAL
        for ours, same, other in zip(run["records"], first, reference, strict=True):
            assert ours["losses"] == same["losses"], "bitwise, on every rank"
            assert ours["losses"] == pytest.approx(other["losses"], rel=1e-12)
            assert ours["multipliers"] == other["multipliers"]
    corrections = [record["corrections"]["lr"] for record in reference]
    assert all(abs(correction - 1) > 1e-4 for correction in corrections)  # the controller acts


def test_weights_are_those_of_two_ranks(eight: Ranks, two: Ranks) -> None:
    """At every step, of each replica, within cycles and after them."""
    for replica, ranks in enumerate(REPLICAS):
        for step, theirs in enumerate(two[replica]["weights"]):
            parts = [eight[rank]["weights"][step] for rank in ranks]
            assert {name for part in parts for name in part} == set(theirs)
            for name, ours in (pair for part in parts for pair in part.items()):
                torch.testing.assert_close(ours, theirs[name], **TOLERANCE)


def test_peers_part_and_meet_and_shards_stay_apart(eight: Ranks) -> None:
    """And copies of the tied embedding stay one, bitwise."""
    for step in range(STEPS):
        own = [run["own"][step] for run in eight]
        for ranks in REPLICAS:  # copies on both stages and tp ranks
            first, *others = (own[rank]["tokens.weight"] for rank in ranks)
            assert all(torch.equal(first, other) for other in others), f"step {step}"
        for one, other in zip(*REPLICAS, strict=True):
            pairs = zip(own[one].values(), own[other].values(), strict=True)
            met = all(torch.equal(a, b) for a, b in pairs)
            assert met == (step % INTERVAL == INTERVAL - 1)
        for rank in (0, 2, 4, 6):
            for name, ours in own[rank].items():
                # shards differ, what is whole on both tp ranks does not
                split = name.split(".")[-2] in ("q", "k", "v", "up", "out", "down")
                assert torch.equal(ours, own[rank + 1][name]) != split
