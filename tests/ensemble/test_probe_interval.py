"""Probes that are cycles apart: one line for all replicas, by hand; the interval and resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hdet
from hdet.controllers.measurement import Watched
from hdet.controllers.points import LinePoints, RunningMean
from hdet.core.clock import Clock
from hdet.core.engine import KnobSpec
from tests.harness import Run, batch, loss_of, model, policies, probe

from ..distributed import run_ranks
from .helpers import TAKEN_BACK, same

EVERY, AFTER = 2, 0.5
ONE = [hdet.LearningRate(0.3)]


class Scored(hdet.ProbeController):
    """Remembers the weights that it scores."""

    def __init__(self, net: torch.nn.Module, **settings: Any) -> None:
        self.seen: list[torch.Tensor] = []

        def loss(scored: torch.nn.Module, data: Any) -> torch.Tensor:
            own = getattr(net, "module", net).parameters()
            self.seen.append(torch.cat([p.detach().double().flatten() for p in own]))
            return loss_of(scored, data)

        settings = {"average_every": EVERY} | settings
        super().__init__(loss, [batch(i) for i in range(2)], 2, model=net, **settings)


class Waits(Scored):
    """Remembers what it is asked, and moves nothing."""

    def __init__(self, net: torch.nn.Module, **settings: Any) -> None:
        super().__init__(net, **settings)
        self.asked: list[hdet.Evidence] = []

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        self.asked.append(evidence)
        return [hdet.Decision()] * len(evidence.knobs)


def points(
    trajectory: Sequence[torch.Tensor], first: int, length: int, rhos: Sequence[Any]
) -> list[torch.Tensor]:
    """By hand: anchor + rho (average - anchor), of the mean weights before and after each step."""
    sampled = [i for i in range(1, length + 1) if i > AFTER * length and (length - i) % EVERY == 0]
    anchor = trajectory[first]
    average = torch.stack([trajectory[first + i] for i in sampled]).mean(0)
    return [anchor + rho * (average - anchor) for rho in rhos]


class Grouped(Run):
    """Four co-resident replicas, with rates of two parameter groups.

    ``trajectory``: the mean weights before the first step and after each; ``rhos``: by step and
    replica, for each weight that of its group.
    """

    def __init__(self, controller: Callable[[torch.nn.Module], Any], **settings: Any) -> None:
        def two_groups(parameters: Any, **settings: Any) -> hdet.FusedAdamW:
            own = list(parameters)
            groups = [{"params": own[:2]}, {"params": own[2:], "lr": 3e-3}]
            return hdet.FusedAdamW(groups, **settings)

        defaults: dict[str, Any] = {"knobs": ONE, "every": 4, "lr": 1e-2, "scheduler": None}
        settings = defaults | settings
        super().__init__(together=4, controller=controller, optimizer=two_groups, **settings)
        self.trajectory, self.rhos = [self.mean()], []
        self.optimizer.register_step_post_hook(lambda *_: self.trajectory.append(self.mean()))

    def backward(self, report: dict[int, float] | None = None) -> torch.Tensor:
        self.rhos.append([])
        sizes = [p.numel() for p in self.net.parameters()]
        groups = torch.tensor([sum(sizes[:2]), sum(sizes[2:])])
        for k in range(4):
            with self.replicas.use(k):
                rhos = list(self.ensemble.multipliers.values())
            of_groups = torch.tensor([rhos[0], rhos[-1]], dtype=torch.float64)
            self.rhos[-1].append(of_groups.repeat_interleave(groups))
        return super().backward(report)

    def mean(self) -> torch.Tensor:
        return torch.stack(self.all_weights()).double().mean(0)

    def check(self, first: int, length: int, scored: int = 0) -> None:
        """The interval that has just ended is scored at its points, on two mini-batches."""
        seen = self.controller.seen[scored:]
        assert len(seen) == 4 * 2
        for k, point in enumerate(points(self.trajectory, first, length, self.rhos[-1])):
            assert (point - self.trajectory[first]).abs().max() > 2e-4
            for found in seen[2 * k : 2 * k + 2]:
                torch.testing.assert_close(found, point, rtol=0, atol=2e-6)


# -- the line ----------------------------------------------------------------------------------


@pytest.mark.parametrize("design", ["permutation", "orthogonal"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_every_replica_is_scored_on_the_line_by_hand(design: str, place: str) -> None:
    """At the multipliers of the interval's last cycle, though other cycles had others."""
    run = Grouped(
        lambda net: Scored(net, interval=3, place=place), design=design, weight_decay=0.1,
        knobs=[hdet.LearningRate(0.3, groups="each")],
    )  # fmt: skip
    for first, scored in ((0, 0), (12, 8)):
        run.steps(12).check(first, 12, scored)
        assert not same(run.rhos[first], run.rhos[first + 11])


def test_scoring_leaves_replicas_as_they_were() -> None:
    three, one = (
        Grouped(lambda net, i=i: Waits(net, interval=i)).steps(25).all_weights() for i in (3, 1)
    )
    assert same(three, one)


def processes(rank: int, world: int) -> Any:
    run = Run(
        rank, controller=lambda net: Scored(net, interval=2), every=6, optimizer=torch.optim.SGD,
        weight_decay=0.1, lr=1e-2,
    )  # fmt: skip
    trajectory, rhos = [run.weights()], []
    run.optimizer.register_step_pre_hook(lambda *_: rhos.append(run.ensemble.multipliers["lr"]))
    run.optimizer.register_step_post_hook(lambda *_: trajectory.append(run.weights()))
    return trajectory, rhos, run.steps(12).controller.seen


def test_ranks_score_one_line() -> None:
    ranks = run_ranks(processes, 3)
    steps = zip(*(rank[0] for rank in ranks), strict=True)
    trajectory = [torch.stack(step).double().mean(0) for step in steps]
    for _, rhos, seen in ranks:
        assert len(set(rhos)) > 1 or rhos[0] == 1.0
        (point,) = points(trajectory, 0, 12, rhos[-1:])
        assert len(seen) == 2 and (point - trajectory[0]).abs().max() > 1e-3
        torch.testing.assert_close(seen[0], point, rtol=0, atol=2e-6)


def test_an_average_in_between_changes_nothing_of_the_line() -> None:
    run = Grouped(lambda net: Scored(net, interval=3)).steps(6)
    run.ensemble.converge()
    run.steps(6).check(0, 12)


def test_a_cycle_that_is_taken_back_begins_the_interval_anew() -> None:
    run = Grouped(lambda net: Scored(net, interval=2), divergence=TAKEN_BACK, total=100).steps(4)
    for _ in range(4):
        run.step(dict.fromkeys(range(4), 1e9))
    assert run.ensemble.engine.rollbacks == 1
    begun, scored = run.index, len(run.controller.seen)
    run.trajectory[begun] = run.mean()
    assert len(run.steps(4).controller.seen) == scored
    run.steps(4).check(begun, 8, scored)


def test_a_resumed_run_keeps_what_was_learned_and_begins_its_interval_anew() -> None:
    run, other = (Grouped(lambda net: Scored(net, interval=2), total=80) for _ in range(2))
    other.loaded(run.steps(20).saved())  # two and a half intervals
    assert other.controller.last == run.controller.last != [0.0]
    other.trajectory = [other.mean()]
    assert not other.steps(4).controller.seen
    other.steps(4).check(0, 8)


# -- what the rule sees ------------------------------------------------------------------------


def test_the_rule_is_asked_at_the_ends_of_intervals_and_believes_them_to_be_cycles() -> None:
    run = Grouped(lambda net: Waits(net, interval=3), total=44).steps()
    asked = run.controller.asked
    assert [evidence.step for evidence in asked] == [12, 24, 36]
    assert all("probe" in evidence.measured and evidence.sync_interval == 12 for evidence in asked)
    assert asked[0].multipliers[0] == pytest.approx([float(rho[0]) for rho in run.rhos[11]])


@pytest.mark.parametrize("cycles", [1, 5, 10])
def test_a_peak_inside_of_an_interval_is_seen(cycles: int) -> None:
    """Votes count after the peak at 5 % of the run, and at 90 % of it on the way down all rests."""
    controller = probe(model(), interval=cycles)
    controller.start(hdet.Run(Clock(1, total_steps=100), [KnobSpec("lr", 0.3)], 4, [0.0]))
    idle_from = None
    for cycle in range(1, 101):
        phase = min(cycle / 5, (100 - cycle) / 95)
        measured = {"probe": [[1.0] * 8] * 4} if cycle % cycles == 0 and not controller.idle else {}
        controller.learn(
            hdet.Evidence(
                cycle=cycle, step=cycle, total_steps=100, warmup_steps=0, sync_interval=1,
                knobs=["lr"], multipliers=[[0.7, 0.9, 1.1, 1.3]], losses=[1.0] * 4,
                measured=measured, scheduled=[phase], peak=[1.0], floor=[0.0], values=[phase],
                corrections=[1.0],
            )
        )  # fmt: skip
        idle_from = cycle if controller.idle and idle_from is None else idle_from
    assert controller.warm == [True] and idle_from == 15


def test_a_rise_takes_two_intervals() -> None:
    run = Grouped(lambda net: probe(net, interval=2), total=80, warmup_steps=0)
    with run.ensemble.rescheduling():
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-5
    corrections = [run.steps(4).ensemble.corrections["lr"] for _ in range(4)]
    assert corrections[:3] == [1.0] * 3 and corrections[3] > 1.5


def test_it_rests_before_an_interval_would_end_too_late() -> None:
    run = Grouped(lambda net: Scored(net, interval=3, freeze_after=26)).steps(26)
    assert run.controller.idle and len(run.controller.seen) == 16
    assert run.ensemble.multipliers == {"lr": 1.0}
    run.steps(14)


# -- the interval's length ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "every", "expected"),
    [(400, 20, 1), (400, 10, 1), (419, 10, 3), (1000, 10, 5), (1000, 1, 50), (3, 5, 1)],
)
def test_by_default_a_fortieth_of_a_run_is_averaged(total: int, every: int, expected: int) -> None:
    run = Run(together=2, controller="probe", total=total, every=every)
    assert run.controller.losses.cycles == expected


def cycles(interval: int | None, **settings: Any) -> int:
    net = model()
    controller = probe(net, interval=interval, held_out=True)
    settings = {"every": 2, "total_steps": 200} | settings
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hdet.Ensemble(optimizer, controller=controller, **policies(**settings))
    return controller.losses.cycles


DIRECT = hdet.Scalar("x", lambda: 0.5, lambda x: None, 0.1, affects_eval_loss=True)


@pytest.mark.filterwarnings("ignore:one replica")
@pytest.mark.parametrize(("settings", "message"), [
    ({"gradients": "local", "moments": "keep"}, "gradients='local'"),
    ({"knobs": [hdet.LearningRate(0.1, bounds=(1e-3, 1.0))]}, "'lr'.*without bounds"),
    ({"knobs": [DIRECT]}, "'x'.*without bounds"),
])  # fmt: skip
def test_replicas_on_no_line_have_one_cycle_or_a_refusal(settings: Any, message: str) -> None:
    assert cycles(None) == 5
    assert cycles(None, **settings) == cycles(1, **settings) == 1
    with pytest.raises(ValueError, match=message):
        cycles(2, **settings)


@pytest.mark.filterwarnings("ignore:one replica")
def test_an_interval_longer_than_the_run_is_refused() -> None:
    assert cycles(100) == 100
    assert cycles(7, total_steps=None) == 7 and cycles(None, total_steps=None) == 1
    with pytest.raises(ValueError, match="interval is 101 cycles, but the run has 100"):
        cycles(101)


@pytest.mark.parametrize(("settings", "message"), [
    *(({name: wrong}, name) for name, wrong in (
        ("interval", 0), ("interval", 1.5), ("interval", True), ("place", "disk"), ("chunks", 1),
        ("average_every", 0),
    )),
    ({"batches": [1, 2]}, "batches holds 2"),
    ({"batches": torch.utils.data.DataLoader([1] * 8)}, "must be a list, or a function of the"),
    ({"loss_fn": 3}, "loss_fn must be a function"),
])  # fmt: skip
def test_settings_are_validated(settings: dict[str, Any], message: str) -> None:
    given = {"loss_fn": loss_of, "batches": [0] * 8, "model": model(), **settings}
    with pytest.raises((ValueError, TypeError), match=message):
        hdet.ProbeController(**given)


# -- averages and lines of tensors --------------------------------------------------------------


def mean_of(tensors: Sequence[torch.Tensor]) -> RunningMean:
    return RunningMean([(tensors, lambda: [None] * len(tensors))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_average_is_the_mean_of_its_samples(dtype: torch.dtype) -> None:
    """Of contiguous and other tensors, also when one has moved."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.zeros(size, dtype=dtype) for size in ((5, 3), (), (0,))]
    tensors = [*map(torch.nn.Parameter, tensors), torch.zeros(4, 3, dtype=dtype).t()]
    average, samples = mean_of(tensors), []
    for n in range(4):
        if n == 2:
            tensors[0].data = tensors[0].data.clone()
        for tensor in tensors:
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
        samples.append([tensor.detach().clone() for tensor in tensors])
        average.add()
    for mean, of in zip(average.means, zip(*samples, strict=True), strict=True):
        expected = torch.stack(of).double().mean(0)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-6)
    means = [mean.to(dtype, copy=True) for mean in average.means]
    average.exchange()
    assert same(tensors, means)
    average.exchange()
    assert same(tensors, samples[-1])


RHOS = (1.0, 2.0, 0.5, 8.0, 1.0, 0.5)


class Line(LinePoints):
    """Through tensors, each of them with a knob of its own."""

    def __init__(self, tensors: Sequence[torch.Tensor], masters: Any = None, place: str = "device"):
        groups = [{"params": [tensor]} for tensor in tensors]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        knobs = hdet.LearningRate(groups="each").bind(optimizer)
        masters, replicas = masters or (lambda: [None] * len(tensors)), hdet.Replicas.single()
        self.rho: Sequence[float] = ()
        settings = Clock(10), replicas, lambda: [self.rho]
        super().__init__(Watched(optimizer, [tensors], [masters], knobs, *settings), place)

    @contextmanager
    def at_multipliers(self, rho: Sequence[float]) -> Iterator[None]:
        self.rho = rho
        with self.at(0):
            yield


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_a_line_follows_masters(masters: str) -> None:
    """At a tiny rate the parameters stand still; far out on the line bfloat16 shows the way."""
    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = hdet.FusedSGD([parameter], lr=1e-4, master_weights=masters)
    line = Line([parameter], lambda: optimizer.masters([parameter], 0))
    line.begin()
    for _ in range(4):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        line.add()
    assert torch.equal(parameter, torch.ones_like(parameter))
    expected = torch.full((8,), 1 - 2000 * 2.5e-4)
    with torch.no_grad(), line.at_multipliers((2000.0,)):
        torch.testing.assert_close(parameter.float(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize(("dtype", "place", "error"), [
    (torch.float32, "device", 1e-5), (torch.float64, "device", 1e-12),
    (torch.float32, "host", 1e-5), (torch.bfloat16, "device", 0.04),
])  # fmt: skip
def test_points_of_a_line_are_those_by_hand(dtype: torch.dtype, place: str, error: float) -> None:
    """On memory full of NaN, after two samples."""
    torch.manual_seed(0)
    tensors = [torch.randn(5, 3).to(dtype), torch.randn(7).to(dtype)]
    line, seen = Line(tensors, place=place), []
    for room in line.origin:
        room.fill_(math.nan)
    line.begin()
    for n in range(4):
        if n in (1, 2):
            line.add()
        seen.append([t.double().clone() for t in tensors])
        for t in tensors:
            t.add_(torch.randn_like(t))
    origin, *samples = seen[:3]
    mean = [(a + b) / 2 for a, b in zip(*samples, strict=True)]
    before = [t.clone() for t in tensors]
    for i, rho in list(enumerate(RHOS)) * 2:  # what has been scored may be scored again
        rhos = (rho, RHOS[-i - 1])  # each tensor at its own, as with several knobs
        with line.at_multipliers(rhos):
            for t, a, m, r in zip(tensors, origin, mean, rhos, strict=True):
                expected, atol = a + r * (m - a), error * max(1.0, r)
                torch.testing.assert_close(t.double(), expected, rtol=0, atol=atol)
        assert same(tensors, before)
    with pytest.raises(ZeroDivisionError), line.at_multipliers((2.0, 0.5)):
        raise ZeroDivisionError
    assert same(tensors, before) and same([kept.double() for kept in line.origin], origin)


def test_a_model_that_is_cast_before_the_first_sample_is_put_back_to_the_bit() -> None:
    """Half of the digits would be lost in an average that was made for what it was before."""
    layer = torch.nn.Linear(3, 2)
    average = mean_of(list(layer.parameters()))
    torch.nn.init.constant_(layer.double().weight, 0.1)
    average.add()
    for _ in range(2):
        average.exchange()
    assert layer.weight.unique().tolist() == [0.1]
