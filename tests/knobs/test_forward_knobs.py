"""Knobs that act inside `with ensemble.explore():`: their values there, at rest, after errors."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.harness import force, policies

from ..distributed import run_ranks
from .helpers import LOCAL, Net, adamw, backward, ensemble, given


class Held:
    """A value of the user's, the knob that moves it, and how often it was written."""

    def __init__(self, value: float) -> None:
        self.value, self.writes = value, 0

    def knob(self, **settings: Any) -> hdet.Scalar:
        return hdet.Scalar("mine", lambda: self.value, self.write, **settings)

    def write(self, value: float) -> None:
        self.value = value
        self.writes += 1


def dropping(**settings: Any) -> tuple[Net, hdet.Ensemble]:
    net = Net()
    return net, ensemble(net, [hdet.Dropout(net)], **LOCAL, **settings)


def test_only_the_tasks_that_are_named_move_and_each_has_a_knob() -> None:
    tasks = {"click": 1.0, "like": 0.5}
    run = ensemble(Net(), [hdet.LossWeights(tasks, tasks=["like"])], **LOCAL)
    assert list(run.multipliers) == ["loss_weight/like"]
    with run.explore():
        assert tasks["like"] == 0.5 * run.multipliers["loss_weight/like"] != 0.5
        assert tasks["click"] == 1.0


def test_a_linear_scale_adds_and_may_pass_zero() -> None:
    held = Held(0.0)
    run = ensemble(Net(), [held.knob(scale="linear", unit=2.0, spread=0.5)], **LOCAL)
    with run.explore():
        assert held.value == pytest.approx(2.0 * (run.multipliers["mine"] - 1)) and held.value != 0
    assert held.value == 0.0
    force(run, math.exp(-1.5))
    assert held.value == pytest.approx(-3.0) == run.values()["mine"]


def test_the_users_setter_is_called_for_new_values_only() -> None:
    held, net = Held(4.0), Net()
    run = ensemble(net, [held.knob()], **LOCAL)
    for _ in range(3):
        backward(net)
        run.optimizer.step()
        run.step()
    assert held.writes == 0
    force(run, 2.0)
    assert (held.value, held.writes) == (8.0, 1)
    with run.rescheduling():  # a schedule of the user's own
        assert held.value == 4.0
        held.value = 3.0
    run.step()
    assert held.value == 6.0 and run._schedule.knobs[0].scheduled == [3.0]


def test_an_average_that_rounds_a_buffer_is_not_taken_for_a_value_of_the_users() -> None:
    net = Net()
    del net.temperature
    net.register_buffer("temperature", torch.tensor(1.0))
    run = ensemble(net, [hdet.Temperature(net)])
    run._schedule.knobs[0].correction = 2.0
    for _ in range(3):
        run._schedule.write()
        net.temperature.copy_(torch.nextafter(net.temperature, torch.tensor(9.0)))
        run._schedule.check_unwritten()
    run._schedule.write()
    assert float(net.temperature) == 2.0 and run._schedule.knobs[0].scheduled_value() == 1.0
    net.temperature.fill_(3.0)
    with pytest.raises(ValueError, match="temperature is 3, and was left at 2"):
        run._schedule.check_unwritten()


@pytest.mark.parametrize("unit", [None, 2.0])
def test_a_value_that_is_set_between_steps_is_the_base_of_exploring(unit: float | None) -> None:
    held = Held(4.0)
    run = ensemble(Net(), [held.knob(scale="linear" if unit else "log", unit=unit)], **LOCAL)
    force(run, 2.0)
    for _ in range(3):
        base = held.value * 0.5
        run.set_value("mine", base)
        rho = run.multipliers["mine"]
        with run.explore():
            assert held.value == pytest.approx(base + unit * (rho - 1) if unit else base * rho)
        run.step()
        assert held.value == pytest.approx(base) and run.values()["mine"] == pytest.approx(base)


def test_what_is_written_inside_explore_is_refused() -> None:
    net, run = dropping()
    says = r"dropout was changed to 0.5 inside `with ensemble.explore"
    with pytest.raises(ValueError, match=says), run.explore():
        net.drop.p = 0.5
    assert net.drop.p == 0.2
    with pytest.raises(KeyError), run.explore():  # what happened first counts
        net.drop.p = 0.5
        raise KeyError
    assert net.drop.p == 0.2
    run.step()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.off = nn.Dropout(0.1), nn.Dropout2d(0.4), nn.Dropout(0.0)
        self.attention, self.linear = nn.MultiheadAttention(4, 2, dropout=0.2), nn.Linear(4, 1)


@pytest.mark.parametrize(("rho", "settings", "expected"), [
    (1.5, {}, [0.15, 0.6, 0.0, 0.3]), (1.5, {"modules": ["b"]}, [0.1, 0.6, 0.0, 0.2]),
    (1.5, {"modules": ["a", "off"], "scale": "linear", "unit": 0.2}, [0.2, 0.4, 0.1, 0.2]),
    (1.99, {"bounds": (0.0, 0.5)}, [0.199, 0.5, 0.0, 0.398]),
])  # fmt: skip
def test_dropout_moves_what_it_is_told_to(rho: float, settings: Any, expected: list[float]) -> None:
    net = Dropping()
    made = {"optimizer": torch.optim.SGD(net.parameters(), 0.1), "controller": given(rho), **LOCAL}
    with ensemble(net, [hdet.Dropout(net, **settings)], **made).explore():
        assert [net.a.p, net.b.p, net.off.p, net.attention.dropout] == pytest.approx(expected)


@pytest.mark.parametrize(("part", "modules", "message"), [
    ("", ["c"], "'c'"), ("", ["linear"], "'linear'"), ("", ["off"], "is 0"),
    ("linear", None, "Linear has no dropout above 0"),
])  # fmt: skip
def test_dropout_that_is_not_there_is_refused(part: str, modules: Any, message: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(ValueError, match=message):
        hdet.Dropout(Dropping().get_submodule(part), modules=modules).bind(optimizer)


def test_nothing_of_the_ensemble_may_be_called_inside_explore_but_observe() -> None:
    net, run = dropping()
    with run.explore():
        run.observe(1.0)
        with run.explore():  # again: nothing happens twice
            assert net.drop.p == 0.2 * run.multipliers["dropout"]
        assert net.drop.p == 0.2 * run.multipliers["dropout"]
        for call in (run.step, run.converge, run.state_dict, lambda: run.load_state_dict({})):
            with pytest.raises(ValueError, match="inside `with ensemble.explore"):
                call()
    run.step()
    run.close()
    with run.explore():  # of an Ensemble that is closed
        assert net.drop.p == 0.2


def test_who_forgets_to_explore_is_told_once_a_cycle() -> None:
    net, run = dropping(every=2, count=2)
    # the other replica is as this one
    run.replicas.sum_rows = lambda *rows, purpose: torch.stack([*rows, *rows])
    run._cycles.parameters.end_cycle = lambda *ending: []

    def cycle(explore: bool) -> list[str]:
        for _ in range(2):
            with run.explore() if explore else nullcontext():
                backward(net)
            run.optimizer.step()
            run.step()
        return [note for note in run.history[-1]["notes"] if "explore()" in note]

    with pytest.warns(UserWarning, match="replicas did not differ in dropout"):
        assert len(cycle(explore=False)) == 1
    assert cycle(explore=True) == []


def coresident(net: Net, **settings: Any) -> tuple[hdet.CoresidentReplicas, hdet.Ensemble, Any]:
    """Four that explore a temperature and a rate, and the temperature's multipliers."""
    replicas, optimizer = hdet.CoresidentReplicas(net, 4), adamw(net, hdet.FusedAdamW)
    knobs = [hdet.Temperature(net, 0.5), hdet.LearningRate(0.2)]
    run = hdet.Ensemble(optimizer, knobs=knobs, replicas=replicas, **policies(every=2, **settings))
    return replicas, run, run._engine.multipliers()[1]


def test_each_co_resident_replica_explores_its_own_value() -> None:
    net = Net()
    replicas, run, rho = coresident(net)
    assert len({*rho}) == 2
    for k in range(4):
        with replicas.use(k):
            assert net.temperature == 2.0
            with run.explore():
                assert net.temperature == 2.0 * rho[k] == run.value("temperature")
                says = f"inside that of replica {k}"
                if k:
                    with pytest.raises(ValueError, match=says), replicas.use(0), run.explore():
                        pass
                assert net.temperature == 2.0 * rho[k]
            assert net.temperature == 2.0
    with pytest.raises(ValueError, match="inside `with replicas.use"), run.explore():
        pass


def test_a_probe_scores_a_direct_knob_at_each_replicas_value_and_others_at_base_values() -> None:
    net, seen = Net(), []

    def loss_fn(model: Net, batch: torch.Tensor) -> torch.Tensor:
        seen.append((model.temperature, model.drop.p))
        return model(batch).square().mean()

    batches = [torch.randn(4, 4) for _ in range(2)]
    probe = hdet.ProbeController(loss_fn, batches, 2, model=net, held_out=True)
    replicas, run, rho = coresident(net, controller=probe)
    for _ in range(2):
        for k in range(4):
            with replicas.use(k), run.explore():
                backward(net)
        run.optimizer.step()
        run.step()
    assert seen == [(2.0 * rho[k], 0.2) for k in range(4) for _ in range(2)]
    assert net.temperature == run.values()["temperature"]


# -- a whole run -------------------------------------------------------------------------------


def squared(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (net(batch[0]).flatten() - batch[1]).square().mean()


def probe_of(net: nn.Module, batch: Any, **settings: Any) -> hdet.ProbeController:
    """On 8 batches that nobody trains on."""
    draw = lambda cycle: [batch(10**6 + 8 * cycle + i) for i in range(8)]
    return hdet.ProbeController(squared, draw, model=net, **settings)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop, self.linear = nn.Dropout(0.5), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.drop(x))


def endless(key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """New data in every step, of a linear rule: regularising can only do harm."""
    x = torch.randn(32, 12, generator=torch.Generator().manual_seed(key))
    return x, x @ torch.linspace(-1, 1, 12)


def too_regular(rank: int, world: int) -> Any:
    """Local gradients: each of four processes trains with its own dropout and its own decay."""
    net = Dropped()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=3.0)
    probe = probe_of(net, endless, average_every=2, held_out=True)
    run = hdet.Ensemble(
        optimizer, knobs=[hdet.Dropout(net, 0.4), hdet.WeightDecay(0.4)], total_steps=160,
        sync=hdet.Sync(10, gradients="local", moments="keep"), controller=probe,
    )  # fmt: skip
    seen = []
    for step in range(160):
        with run.explore():
            torch.manual_seed(4 * step + rank)
            squared(net, endless(4 * step + rank)).backward()
            seen.append(net.drop.p / run.values()["dropout"])
        optimizer.step()
        optimizer.zero_grad()
        run.step()
    decay, loss = optimizer.param_groups[0]["weight_decay"], squared(net, endless(-1)).item()
    return run.values(), run.corrections, net.drop.p, decay, seen[0], loss


def test_four_processes_give_up_dropout_and_decay_that_only_harm() -> None:
    ranks = run_ranks(too_regular, 4)
    values, corrections, p, decay, _, loss = ranks[0]
    assert corrections["dropout"] < 0.5 and corrections["weight_decay"] < 0.5 and loss < 1.0
    assert (p, decay) == (values["dropout"], values["weight_decay"])
    assert all(other[0] == values for other in ranks)
    # two replicas up, two down
    assert sorted(rank[4] for rank in ranks) == pytest.approx([0.6, 0.6, 1.4, 1.4])
