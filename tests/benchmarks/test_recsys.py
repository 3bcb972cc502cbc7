"""benchmarks.recsys: the interaction log is a pure function with the properties it claims, the model has the paper's four groups and can
learn from it; the command runs."""

from __future__ import annotations

import math
import runpy
import sys
import warnings

import pytest
import torch
from torch.nn import functional as F

from benchmarks.recsys.recommender import TASKS, InteractionLog, Interactions, Recommender, engagement_losses

LOG = InteractionLog()


def sample(size: int = 64, position: float = 0.5, seed: int = 0, stream: str = "train", index: int = 0) -> Interactions:
    return LOG.sample(size, position, seed=seed, stream=stream, index=index)


def same(a: Interactions, b: Interactions) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def frequencies(items: torch.Tensor) -> torch.Tensor:
    return torch.bincount(items.flatten(), minlength=LOG.items) / items.numel()


# -- the log ---------------------------------------------------------------------------------------------------------------


def test_the_same_arguments_give_the_same_interactions_and_others_give_others() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = sample()
    assert same(first, InteractionLog().sample(64, 0.5, seed=0, stream="train", index=0))
    assert torch.equal(before, torch.get_rng_state())  # the user's generator is not touched
    assert not any(same(first, other) for other in (sample(seed=1), sample(stream="validation"), sample(index=1), sample(position=0.6)))
    assert not same(first, InteractionLog(world=1).sample(64, 0.5, seed=0, stream="train", index=0))


def test_users_follow_zipf() -> None:
    users = sample(100_000)[0]
    harmonic = sum(1 / rank for rank in range(1, LOG.users + 1))
    for rank in (1, 2, 10):
        assert (users == rank - 1).float().mean().item() == pytest.approx(1 / rank / harmonic, rel=0.1)


def test_tasks_are_correlated_but_not_the_same() -> None:
    correlations = torch.corrcoef(sample(50_000)[3].T)
    others = correlations[~torch.eye(len(TASKS), dtype=torch.bool)]
    assert 0.15 < others.min() and others.max() < 0.8


def test_items_drift_over_the_year() -> None:
    def distance(a: float, b: float) -> float:
        """Total variation between the items that are shown."""
        x, y = (frequencies(sample(50_000, position, index=i)[1]) for i, position in enumerate((a, b)))
        return 0.5 * (x - y).abs().sum().item()

    assert distance(0.5, 0.5) < 0.05
    assert distance(0.0, 0.5) > 0.3
    turned = F.cosine_similarity(LOG._traits.at(0.0), LOG._traits.at(1.0))
    assert turned.min() < 0.3 and 0.5 < turned.mean() < 0.8  # by up to 90 degrees, 45 on average: cos is 2 / pi


def test_the_history_tells_of_the_interest() -> None:
    _, items, history, engagement = sample(50_000)
    traits = LOG._traits.at(0.5)
    affinity = (traits[history].mean(1) * traits[items]).sum(1)
    alike = affinity > affinity.median()
    assert engagement[alike].mean() > engagement[~alike].mean() + 0.1


# -- the model -------------------------------------------------------------------------------------------------------------


def test_groups_are_the_papers() -> None:
    model = Recommender(20, 10, 3)
    groups = {group["name"]: group for group in model.parameter_groups(weight_decay=0.5)}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "embedding": 0.5, "no_decay": 0.0, "non_embedding": 0.5, "transformer": 0.5
    }  # fmt: skip
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = {group: sorted(names[p] for p in found["params"]) for group, found in groups.items()}
    assert held["embedding"] == ["item.weight", "place.weight", "user.weight"]
    assert held["non_embedding"] == ["hidden.weight", "out.weight"]
    assert held["transformer"] == [f"block.{name}.weight" for name in ("down", "out", "qkv", "up")]


def test_losses_are_means_over_tasks() -> None:
    model, batch = Recommender(LOG.users, LOG.items, LOG.history), sample(3)
    logits = model(*batch[:3]).double()
    expected = [
        sum(math.log1p(math.exp(-z if y else z)) for z, y in zip(row, seen, strict=True)) / len(TASKS)
        for row, seen in zip(logits.tolist(), batch[3].tolist(), strict=True)
    ]
    assert engagement_losses(model, batch).tolist() == pytest.approx(expected, rel=1e-5)


def test_training_beats_constants_and_does_not_reach_the_noise_floor() -> None:
    log = InteractionLog(users=10, items=10)
    held_out = log.sample(4096, 1.0, seed=0, stream="validation", index=0)
    torch.manual_seed(0)
    model = Recommender(log.users, log.items, log.history)
    untrained = engagement_losses(model, held_out).mean().item()
    optimizer = torch.optim.AdamW(model.parameter_groups(0.01), lr=1e-2, betas=(0.9, 0.95))
    for step in range(120):
        optimizer.zero_grad()
        engagement_losses(model, log.sample(128, step / 120, seed=0, stream="train", index=step)).mean().backward()
        optimizer.step()
    trained = engagement_losses(model, held_out).mean().item()
    constant = F.binary_cross_entropy(held_out[3].mean(0).expand_as(held_out[3]), held_out[3]).item()
    assert log.noise_floor(4096, 1.0) + 0.02 < trained < constant - 0.02 < untrained - 0.04


@pytest.mark.parametrize("options", [[], ["--paper"]])
def test_the_command_runs(options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One process: no replicas, but every line of the loop."""
    monkeypatch.setattr(sys, "argv", ["recsys", "--steps", "20", "--sync-interval", "5", *options])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_module("benchmarks.recsys", run_name="__main__")
    assert 0.5 < float(capsys.readouterr().out.split("held-out loss")[1].split()[0]) < 0.8  # ln 2 is 0.693
