"""A search ends: a controller takes over, it is frozen, or a run goes on without one."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

import hdet
from tests.harness import Run, Scripted, model, probe, taught

TOTAL, EVERY, OVER = 200, 4, 28
"""`OVER`: a search without a trial."""
SOFTMAX = functools.partial(hdet.SoftmaxController, decay=None)


class Listener(hdet.Controller):
    """Writes down when it was asked, and doubles the rate once, at its third cycle."""

    name, needs_replicas, state_keys = "listener", False, ("steps", "seen")

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []
        self.seen = 0

    def observe(self, evidence: hdet.Evidence) -> None:
        self.seen += 1

    def restart(self) -> None:
        self.seen = 0

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        self.steps.append(float(evidence.step))
        factor = 2.0 if len(self.steps) == 3 else 1.0
        return [hdet.Decision(factor=factor) for _ in evidence.knobs]


def chained(then: Any, **settings: Any) -> Run:
    search = lambda net: hdet.AutoLR(net, budget=0, report_only=True)
    settings = {"lr": 1e-3, "total": TOTAL, "every": EVERY, "data": taught, **settings}
    return Run(search=search, controller=then, **settings)


def test_the_controller_decides_from_the_next_cycle_on() -> None:
    then = Listener()
    run = chained(then).steps(OVER)
    assert run.search.done and not then.steps and then.seen == OVER // EVERY
    assert run.steps().ensemble.corrections == {"lr": 2.0}
    assert then.steps == [float(step) for step in range(OVER + EVERY, TOTAL + 1, EVERY)]
    assert then.seen == OVER // EVERY


def test_where_a_search_begins_again_the_controller_does() -> None:
    """What it has seen was of other weights."""
    run = Run(
        search=lambda net: hdet.AutoLR(net, budget=0), controller=Listener(), lr=30.0, total=TOTAL,
        every=EVERY, data=taught,
    ).steps(OVER)  # fmt: skip
    assert run.ensemble.corrections["lr"] < 1 and run.search.done
    assert run.controller.seen == 1, "the cycle that ended with the search"


@pytest.mark.parametrize("after", [8, 40])
@pytest.mark.filterwarnings("ignore:saved during AutoLR", "ignore:AutoLR. the checkpoint was saved")
def test_resumed_it_goes_on_where_it_was(after: int) -> None:
    first = chained(Listener()).steps(after)
    second = chained(Listener()).loaded(first.saved())
    assert second.search.done is first.search.done is (after > OVER)
    assert second.controller.steps == first.controller.steps
    assert second.ensemble.values() == first.ensemble.values()
    if after > OVER:  # else it searches again, from these weights
        assert torch.equal(first.steps().weights(), second.steps().weights())
        assert first.controller.steps == second.controller.steps
    with pytest.warns(UserWarning, match="saved with an AutoLR, and this run has none"):
        Run(controller=Listener(), total=TOTAL).ensemble.load_state_dict(
            first.ensemble.state_dict()
        )
    alone = Run(controller=Listener(), total=TOTAL).ensemble.state_dict()
    with pytest.raises(ValueError, match="saved without a search, this run has one"):
        chained(Listener()).ensemble.load_state_dict(alone)
    with pytest.raises(ValueError, match="the AutoLR's state lacks 'cost'"):
        chained(Listener()).ensemble.check_state({**alone, "search": {"done": True}})


def test_a_controller_that_leaves_the_schedule_cannot_follow_a_search() -> None:
    with pytest.raises(ValueError, match="pass decay=None"):
        chained(hdet.SoftmaxController(decay="floor"))


class Fussy(Listener):
    def start(self, run: hdet.Run) -> None:
        raise ValueError(f"{run.total_steps} steps are too few")


def test_what_follows_asks_for_what_it_needs() -> None:
    """As if it were alone: a run that suits it, and replicas, of which one explores nothing."""
    with pytest.raises(ValueError, match=f"{TOTAL} steps are too few"):
        chained(Fussy())
    with pytest.warns(UserWarning, match="one replica explores nothing"):
        chained(SOFTMAX())


def test_what_only_reports_leaves_a_rollback_to_the_run() -> None:
    """As it is without it, bitwise."""
    found = []
    for search in (None, lambda net: hdet.AutoLR(net, report_only=True)):
        run = Run(
            search=search, total=1500, every=4, data=taught, closure=True, lr=1e-3, spread=0.0,
            divergence=hdet.Divergence(rollback="device"),
        )  # fmt: skip
        for step in range(12):
            loss = run.backward()
            for p in run.net.parameters():
                p.grad = torch.full_like(p, float("nan")) if step == 5 else p.grad
            run.optimizer.step()
            run.ensemble.step(loss, closure=lambda run=run: run.losses(run.batches()[0]))
            run.index += 1
        found.append((run.weights(), [record["rolled_back"] for record in run.records]))
    (plain, rolled_back), (weights, ours) = found
    assert ours == rolled_back == [False, True, False] and torch.equal(weights, plain)


class Odd(Listener):
    planned: Any = hdet.Plan()

    def plan(self) -> hdet.Plan:
        return self.planned


TABLE, NAMES = "must be 1 rows .one a knob. of 1 positive", r"measures must be .* names .*\[\], got"


@pytest.mark.parametrize(("wrong", "error", "message"), [
    *((hdet.Plan(multipliers=x), ValueError, TABLE) for x in ([[1.0, 1.1]], [1.0], 5.0, [[0.0]])),
    *((hdet.Plan(measures=x), ValueError, NAMES) for x in (["mine"], "mine", 5)),
    *((x, TypeError, "has planned .*must return an hdet.Plan") for x in (None, [hdet.Plan()])),
])  # fmt: skip
def test_a_plan_that_cannot_be_is_refused_before_anything_has_changed(
    wrong: Any, error: type[Exception], message: str
) -> None:
    """A new run's, one within it, and that of a state. The run can go on, or be saved."""
    refused = lambda: pytest.raises(error, match=f"controller 'listener'.*{message}")
    controller, optimizer = Odd(), torch.optim.SGD(model().parameters(), lr=0.1)
    controller.planned = wrong
    with refused():
        hdet.Ensemble(optimizer, controller=controller)
    assert "step" not in vars(optimizer)
    run, other = (Run(controller=Odd(), every=4, spread=0.0) for _ in range(2))
    run.steps(11)
    run.controller.planned = wrong
    with refused():
        run.step()
    assert run.controller.steps == [4.0, 8.0, 12.0], "it has decided to move the rate"
    assert (run.ensemble.cycle, run.ensemble.corrections) == (2, {"lr": 1.0})
    state, before = run.saved(), other.ensemble.state_dict()
    other.controller.planned = wrong
    with refused():
        other.ensemble.load_state_dict(state["ensemble"])
    assert other.ensemble.state_dict() == before
    for one in (run, other):
        one.controller.planned = hdet.Plan()
    other.loaded(state)
    for one in (run, other):
        one.index = 12
        assert one.steps(8).ensemble.cycle == 4
    assert torch.equal(run.weights(), other.weights())


def test_a_plan_lets_no_replicas_differ_in_a_knob_with_spread_0() -> None:
    """Outer, which cannot have replicas that differ and share gradients, knows by the spreads."""
    controller, optimizer = Odd(), torch.optim.SGD(model().parameters(), lr=0.1)
    controller.planned = hdet.Plan(multipliers=[[0.5, 1.5]])
    with pytest.raises(ValueError, match="'listener': .* knob 'lr', whose spread is 0"):
        hdet.Ensemble(
            optimizer, knobs=[hdet.LearningRate(spread=0)], controller=controller,
            replicas=hdet.Replicas(0, 2, None), sync=hdet.Sync(converge=hdet.converge.Outer()),
        )  # fmt: skip


@pytest.mark.filterwarnings("error")
def test_a_refused_load_warns_of_nothing() -> None:
    run = chained(Listener()).steps(40)
    state = run.ensemble.state_dict()
    with pytest.raises(ValueError, match="corrections"):
        run.ensemble.load_state_dict({**state, "corrections": [-1.0]})
    shadowed = hdet.Shadow(hdet.SoftmaxController())
    with pytest.warns(UserWarning, match="one replica explores nothing"):
        assert chained(shadowed).controller is shadowed, "it moves nothing, so it may follow"


# -- copies of the parameters ------------------------------------------------------------------

SIZE = 300_000


class Large(nn.Module):
    """Of one weight, of which all but a few numbers are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE // 300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[:6, :1]


def copies(run: Run) -> int:
    run.optimizer.zero_grad()
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return len({x.data_ptr() for x in tensors if x.numel() == SIZE})


@pytest.mark.filterwarnings("ignore:one replica")
@pytest.mark.parametrize(("settings", "total", "needed", "over"), [
    ({"controller": lambda net: probe(net, freeze_after=0.5)}, 200, 2, 200),
    # of a trial: the run and its copy, its beginning and five arms
    ({"search": hdet.AutoLR}, 1000, 8, 60),
    ({"search": lambda net: hdet.AutoLR(net, budget=0.9),
      "controller": lambda net: probe(net, freeze_after=0.95)}, 240, 8, 240),
])  # fmt: skip
def test_copies_are_kept_while_they_are_needed(
    settings: dict[str, Any], total: int, needed: int, over: int
) -> None:
    """The parameters are one, and what has to wait for another has none yet."""

    def run(steps: int) -> Run:
        return Run(
            net=Large(), optimizer=torch.optim.SGD, lr=1e-3, total=total, every=2, data=taught,
            closure=True, **settings,
        ).steps(steps)  # fmt: skip

    ran = run(7)
    assert copies(ran) == needed
    ran.ensemble.close()
    assert copies(ran) == 1
    del ran
    ran = run(over)
    assert all(one.idle for one in [ran.controller] if one) and copies(ran) == 1
    ran.ensemble.close()
    assert copies(ran) == 1


# -- turned off ---------------------------------------------------------------------------------

GONE = "saved with controller 'scripted', and this run has none: the corrections lr 0.5 stay as"


def saved(**settings: Any) -> tuple[Run, dict[str, Any]]:
    """In the middle of a cycle, after a move: the rate is halved at the end of the first."""
    run = Run(**{"controller": Scripted([0.5]), **settings}).steps(13)
    run.ensemble.converge()
    return run, run.saved()


def resumed(state: dict[str, Any], **settings: Any) -> Run:
    return Run(**settings).loaded(state)


@pytest.mark.parametrize(
    "scheduler", ["one cycle", lambda o: torchs.CosineAnnealingLR(o, 40), None]
)
def test_without_a_controller_the_corrected_rate_goes_on(scheduler: Any) -> None:
    """It does what the controller, which moves nothing any more, has left, and loads silently."""
    run, state = saved(scheduler=scheduler, spread=0.0)
    with pytest.warns(UserWarning, match=GONE + ".*are tried$"):
        off = resumed(state, scheduler=scheduler, spread=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        later = resumed(off.saved(), scheduler=scheduler, spread=0.0)
    assert later.ensemble.corrections == off.ensemble.corrections == {"lr": 0.5}
    for _ in range(13, 40):
        run.step(), off.step()
        assert off.rate == run.rate
    assert torch.equal(off.weights(), run.weights())


@pytest.mark.parametrize(("spread", "told"), [(0.3, True), (0.0, False)])
def test_a_probe_is_turned_off_and_a_spread_that_stays_is_said(spread: float, told: bool) -> None:
    """With several replicas the average goes on as long as they differ."""
    settings: dict[str, Any] = {"together": 4, "total": 60, "lr": 1e-5}
    _, state = saved(**settings, controller=probe)
    state["ensemble"]["corrections"] = [1.75]
    with pytest.warns(UserWarning, match="controller 'ProbeController'.* lr 1.75 stay") as caught:
        off = resumed(state, **settings, spread=spread)
    assert any("LearningRate(0)" in str(one.message) for one in caught) == told
    assert off.steps().ensemble.corrections == {"lr": 1.75} and off.equal()
    assert (len(set(off.records[-1]["multipliers"]["lr"])) > 1) == told


def test_another_controller_is_refused_with_the_way_out() -> None:
    said = r"controller 'scripted', this run has 'SoftmaxController'.*controller=None, "
    with pytest.raises(ValueError, match=said + "which keeps the corrections"):
        resumed(saved()[1], controller=hdet.SoftmaxController(decay=None))


def test_a_decay_that_stands_for_the_schedule_cannot_be_left_alone() -> None:
    """Without its controller the rate would stay where it is to the end."""
    run, state = saved(together=4, controller=hdet.SoftmaxController())
    said = "'SoftmaxController'.*in the place of the schedule.*freeze_after=1"
    with pytest.raises(ValueError, match=said):
        resumed(state, together=4)
    frozen = hdet.SoftmaxController(freeze_after=1)
    values = resumed(state, together=4, controller=frozen).steps().ensemble.values()
    assert frozen.frozen and values["lr"] < state["ensemble"]["bases"][0]
    assert not run.steps().controller.frozen


def sequence(o: torch.optim.Optimizer) -> torchs.LRScheduler:
    return torchs.SequentialLR(
        o, [torchs.LinearLR(o, 0.1, total_iters=3), torchs.CosineAnnealingLR(o, 37)], [3]
    )


LAMBDA: Any = lambda o: torchs.LambdaLR(o, lambda step: 1 - step / 41)
ONE_CYCLE: Any = lambda o: torchs.OneCycleLR(o, 3e-3, 41, cycle_momentum=False)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("scheduler", "by_hand", "kept"), [
    (LAMBDA, 0, 0), (LAMBDA, 1, 1), (ONE_CYCLE, 1, 1),
    (lambda o: torchs.CosineAnnealingLR(o, 41), 0, 1),
    (lambda o: torchs.StepLR(o, 10), 0, 1),
    (sequence, 0, 1),
])  # fmt: skip
def test_what_becomes_of_the_rate_without_hdet(scheduler: Any, by_hand: bool, kept: bool) -> None:
    """As docs/faq.md says."""
    run, _ = saved(scheduler=scheduler, spread=0.0)
    correction = run.ensemble.corrections["lr"]
    bare, other = (torch.optim.AdamW(run.net.parameters(), lr=3e-3) for _ in range(2))
    schedule, own = scheduler(bare), scheduler(other)
    bare.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    schedule.load_state_dict(copy.deepcopy(run.scheduler.state_dict()))
    if by_hand:
        for group in bare.param_groups:
            for key in {"initial_lr", "max_lr", "min_lr"} & group.keys():
                group[key] *= correction
        schedule.base_lrs = [rate * correction for rate in schedule.base_lrs]
    for _ in range(13):
        own.step()
    for _ in range(20):
        schedule.step(), own.step()
        expected = (correction if kept else 1.0) * other.param_groups[0]["lr"]
        assert bare.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9)
