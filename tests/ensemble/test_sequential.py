"""One controller, and then another: who decides when, replicas that part only then, refusals."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.distributed import run_ranks
from tests.harness import Run, batch, model, probe, taught

from .helpers import on_all_ranks

TOTAL, EVERY, OVER = 200, 4, 20
SOFTMAX = functools.partial(hdet.SoftmaxController, decay=None)


class First(hdet.Controller):
    """Doubles the rate in its second cycle, and is finished after its fifth, at step `OVER`."""

    name = "first"
    needs_replicas = False
    state_keys = ("cycles",)
    cycles = 0.0

    @property
    def finished(self) -> bool:
        return self.cycles >= OVER // EVERY

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        self.cycles += 1
        return [hdet.Decision(factor=2.0 if self.cycles == 2 else 1.0) for _ in evidence.knobs]


class Listener(hdet.Controller):
    """Writes down when it was asked, and doubles the rate once, at its third cycle."""

    name = "listener"
    needs_replicas = False
    state_keys = ("steps",)

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        self.steps.append(float(evidence.step))
        return [hdet.Decision(factor=2.0 if len(self.steps) == 3 else 1.0) for _ in evidence.knobs]


def chained(then: Any, first: Any = None, **settings: Any) -> Run:
    settings = {"lr": 1e-3, "total": TOTAL, "every": EVERY, "data": taught, **settings}
    return Run(controller=hdet.SequentialController(first or First(), then), **settings)


def test_the_other_decides_from_the_next_cycle_on() -> None:
    then = Listener()
    run = chained(then).steps(OVER - 1)
    assert not run.controller.handed_over and not then.steps
    run.step()
    assert run.controller.handed_over and run.ensemble.corrections == {"lr": 2.0}
    assert run.steps().ensemble.corrections == {"lr": 4.0}
    assert then.steps == [float(step) for step in range(OVER + EVERY, TOTAL + 1, EVERY)]
    assert run.controller.first.cycles == OVER // EVERY


def test_co_resident_replicas_train_alike_until_the_probe_acts() -> None:
    """At a rate that is far too low it votes for more, and freezes at half of the run."""
    net = model()
    run = chained(probe(net, freeze_after=0.5), net=net, together=4, lr=1e-4, data=batch)
    while not run.controller.handed_over:
        assert run.equal() and not run.ensemble.engine.explores
        run.step()
    assert run.index == OVER
    assert not run.steps(3).equal() and run.ensemble.engine.explores
    assert run.steps().equal() and run.ensemble.corrections["lr"] > 2
    assert run.controller.then.frozen and run.controller.idle


@pytest.mark.parametrize("after", [8, 40])
def test_resumed_it_goes_on_where_it_was(after: int) -> None:
    first = chained(Listener()).steps(after)
    second = chained(Listener()).loaded(first.saved())
    assert second.controller.handed_over is first.controller.handed_over is (after > OVER)
    assert second.controller.then.steps == first.controller.then.steps
    assert second.ensemble.values() == first.ensemble.values()
    assert torch.equal(first.steps().weights(), second.steps().weights())
    assert first.controller.then.steps == second.controller.then.steps
    with pytest.raises(ValueError, match="controller"):
        Run(controller=Listener(), total=TOTAL).ensemble.load_state_dict(
            first.ensemble.state_dict()
        )


@pytest.mark.filterwarnings("ignore:one replica")
def test_a_schedule_that_falls_from_the_beginning_has_had_its_peak() -> None:
    """A probe that had not seen the peak would wait for it, and probe, to the end."""
    net = model()
    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=TOTAL)
    run = chained(probe(net), net=net, scheduler=cosine, every=20).steps(TOTAL * 3 // 4)
    assert run.controller.handed_over and run.controller.then.warm == [True] and run.controller.idle


def test_a_damaged_state_changes_nothing() -> None:
    run = chained(Listener())
    state, controller = run.ensemble.state_dict(), run.controller
    whole = copy.deepcopy(state["controller_state"])
    for broken, said in (
        ({**whole, "first": {}, "handed_over": True}, "First's state lacks"),
        ({"first": {}}, "SequentialController's state lacks"),
        ({**whole, "handed_over": True}, "has handed over before the first was finished"),
    ):
        with pytest.raises(ValueError, match=said):
            run.ensemble.load_state_dict({**state, "controller_state": broken})
    assert controller.then.steps == []
    assert not controller.then.frozen and not controller.handed_over


def test_what_is_no_other_controller_is_refused() -> None:
    first: Any = First()
    for other in (Listener, 3, None):
        with pytest.raises(TypeError, match="then must be a controller"):
            hdet.SequentialController(first, other)
        with pytest.raises(TypeError, match="first must be a controller"):
            hdet.SequentialController(other, first)
    with pytest.raises(ValueError, match="both controllers have a measurement 'probe'"):
        hdet.SequentialController(probe(model()), probe(model()))
    with pytest.raises(ValueError, match="pass decay=None"):
        hdet.SequentialController(first, hdet.SoftmaxController(decay="floor"))


class Fussy(Listener):
    def start(self, run: hdet.Run) -> None:
        raise ValueError(f"{run.total_steps} steps are too few")


def test_what_follows_asks_for_what_it_needs() -> None:
    """As if it were alone: a run that suits it, and replicas, of which one explores nothing."""
    with pytest.raises(ValueError, match=f"{TOTAL} steps are too few"):
        chained(Fussy())
    with pytest.warns(UserWarning, match="one replica explores nothing"):
        both = chained(SOFTMAX()).controller
    assert both.name == "first, then softmax" and both.needs_replicas and not both.idle


@pytest.mark.filterwarnings("ignore")
def test_a_knob_that_the_training_loss_cannot_judge_needs_two_controllers_that_can() -> None:
    net = nn.Sequential(nn.Dropout(0.1), model())

    def build(judges: bool, held_out: bool) -> None:
        first = First()
        first.judges_held_out = judges
        then, knobs = probe(net, held_out=held_out), [hdet.LearningRate(), hdet.Dropout(net)]
        chained(then, first, net=net, knobs=knobs, gradients="local", moments="keep")

    build(True, True)
    for judges, held_out in ((False, True), (True, False)):
        with pytest.raises(ValueError, match="'dropout'.*held_out=True"):
            build(judges, held_out)


def two_processes(rank: int, world: int) -> Any:
    """[(handed over, weights are equal on all ranks) before the end of each step], corrections."""
    run = chained(SOFTMAX(1e-3), rank=rank)
    seen: list[tuple[bool, bool]] = []
    run.optimizer.register_step_post_hook(
        lambda *_: seen.append((run.controller.handed_over, on_all_ranks(run.weights())))
    )
    return seen, run.steps(60).ensemble.corrections


def test_processes_part_when_the_other_acts_and_agree_on_everything() -> None:
    (seen, corrections), (others, same) = run_ranks(two_processes, 2)
    assert seen == others and corrections == same and corrections["lr"] not in (1.0, 2.0)
    assert seen == [(False, True)] * OVER + [(True, False)] * (60 - OVER)
