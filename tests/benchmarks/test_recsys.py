"""benchmarks.recsys: the interaction log is a pure function with the properties it claims, the model has the paper's four groups and can
learn from it; the command runs."""

from __future__ import annotations

import runpy
import sys
import warnings

import pytest
import torch
from torch.nn import functional as F

from benchmarks.recsys.recommender import InteractionLog, Interactions, Recommender, engagement_losses

LOG = InteractionLog()


def sample(size: int = 64, position: float = 0.5, seed: int = 0, stream: str = "train", index: int = 0) -> Interactions:
    return LOG.sample(size, position, seed=seed, stream=stream, index=index)


def same(a: Interactions, b: Interactions) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- the log ---------------------------------------------------------------------------------------------------------------


def test_the_same_arguments_give_the_same_interactions_and_others_give_others() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = sample()
    assert same(first, InteractionLog().sample(64, 0.5, seed=0, stream="train", index=0))
    assert torch.equal(before, torch.get_rng_state())  # the user's generator is not touched
    assert not any(same(first, other) for other in (sample(seed=1), sample(stream="validation"), sample(index=1), sample(position=0.6)))
    assert not same(first, InteractionLog(world=1).sample(64, 0.5, seed=0, stream="train", index=0))


# -- the model -------------------------------------------------------------------------------------------------------------


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
