"""Probes that are several cycles apart: one line for all replicas, by hand; the default interval, refusals, votes, resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hdet
from hdet.core.clock import Clock
from hdet.core.engine import KnobSpec
from tests.harness import Run, batch, loss_of, model, policies, probe

from ..distributed import run_ranks

EVERY, AFTER = 2, 0.5


class Scored(hdet.ProbeController):
    """Remembers the weights that it scores."""

    def __init__(self, net: torch.nn.Module, **settings: Any) -> None:
        self.seen: list[torch.Tensor] = []
        net_of = net.module if hasattr(net, "module") else net

        def loss(scored: torch.nn.Module, data: Any) -> torch.Tensor:
            self.seen.append(
                torch.cat([p.detach().double().flatten() for p in net_of.parameters()])
            )
            return loss_of(scored, data)

        super().__init__(
            loss, [batch(i) for i in range(2)], 2, model=net, **{"average_every": EVERY} | settings
        )


def points(
    trajectory: Sequence[torch.Tensor], first: int, length: int, rhos: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """By hand: anchor + rho (average - anchor). ``trajectory``: the mean weights before the first step and after each."""
    samples = [
        trajectory[first + i]
        for i in range(1, length + 1)
        if i > AFTER * length and (length - i) % EVERY == 0
    ]
    anchor, average = trajectory[first], torch.stack(samples).mean(0)
    return [anchor + rho * (average - anchor) for rho in rhos]


class Grouped(Run):
    """Co-resident replicas; rates of two parameter groups. ``trajectory``: the mean weights before the first step and after each; ``rhos``: for
    each weight that of its group."""

    def __init__(
        self, count: int, controller: Callable[[torch.nn.Module], Any], **settings: Any
    ) -> None:
        def two_groups(parameters: Any, lr: float, weight_decay: float) -> hdet.FusedAdamW:
            own = list(parameters)
            return hdet.FusedAdamW(
                [{"params": own[:2]}, {"params": own[2:], "lr": 3e-3}],
                lr=lr,
                weight_decay=weight_decay,
            )

        settings = {
            "knobs": [hdet.LearningRate(0.3, groups="each")],
            "every": 4,
            "lr": 1e-2,
            "scheduler": None,
        } | settings
        super().__init__(together=count, controller=controller, optimizer=two_groups, **settings)
        self.trajectory, self.rhos = [self.mean()], []
        self.optimizer.register_step_post_hook(lambda *_: self.trajectory.append(self.mean()))

    def backward(self, report: dict[int, float] | None = None) -> torch.Tensor:
        self.rhos.append([])
        for k in range(self.replicas.count):
            with self.replicas.use(k):
                one, *two = self.ensemble.multipliers.values()
            of_each = [
                torch.full((p.numel(),), one if i < 2 else [one, *two][-1]).double()
                for i, p in enumerate(self.net.parameters())
            ]
            self.rhos[-1].append(torch.cat(of_each))
        return super().backward(report)

    def mean(self) -> torch.Tensor:
        return torch.stack(self.all_weights()).double().mean(0)


# -- the line ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("design", ["permutation", "orthogonal"])
@pytest.mark.parametrize(
    ("settings", "error"),
    [({}, 2e-6), ({"place": "host"}, 2e-6)],
)
def test_every_replica_is_scored_on_the_line_by_hand(
    design: str, settings: dict[str, Any], error: float
) -> None:
    """At the multipliers of the interval's last cycle, though other cycles had others; with decay, and several groups."""
    run = Grouped(
        4, lambda net: Scored(net, interval=3, **settings), design=design, weight_decay=0.1
    ).steps(24)
    seen = run.controller.seen
    assert len(seen) == 2 * 4 * 2  # two intervals, four replicas, two mini-batches
    for i, first in enumerate((0, 12)):
        before, now = run.rhos[first], run.rhos[first + 11]
        assert any(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
        for k, point in enumerate(points(run.trajectory, first, 12, now)):
            assert (point - run.trajectory[first]).abs().max() > 100 * error or settings
            for scored in seen[8 * i + 2 * k : 8 * i + 2 * k + 2]:
                torch.testing.assert_close(scored, point, rtol=0, atol=error)


def test_scoring_leaves_replicas_as_they_were() -> None:
    def weights(interval: int) -> list[torch.Tensor]:
        return Grouped(4, lambda net: Waits(net, interval=interval)).steps(25).all_weights()

    assert all(map(torch.equal, weights(3), weights(1)))


class Waits(Scored):
    """Remembers what it is asked, and moves nothing."""

    def __init__(self, net: torch.nn.Module, **settings: Any) -> None:
        super().__init__(net, **settings)
        self.asked: list[hdet.Evidence] = []

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        self.asked.append(evidence)
        return [hdet.Decision()] * len(evidence.knobs)


def processes(rank: int, world: int) -> Any:
    run = Run(
        rank,
        controller=lambda net: Scored(net, interval=2),
        every=6,
        optimizer=torch.optim.SGD,
        weight_decay=0.1,
        lr=1e-2,
    )
    trajectory, rhos = [run.weights()], []
    run.optimizer.register_step_pre_hook(lambda *_: rhos.append(run.ensemble.multipliers["lr"]))
    run.optimizer.register_step_post_hook(lambda *_: trajectory.append(run.weights()))
    return trajectory, rhos, run.steps(12).controller.seen


def test_ranks_score_one_line() -> None:
    ranks = run_ranks(processes, 3)
    trajectory = [
        torch.stack([w.double() for w in step]).mean(0)
        for step in zip(*(rank[0] for rank in ranks), strict=True)
    ]
    for _, rhos, seen in ranks:
        assert len(set(rhos)) > 1 or rhos[0] == 1.0
        (point,) = points(trajectory, 0, 12, [torch.tensor(rhos[-1], dtype=torch.float64)])
        assert len(seen) == 2 and (point - trajectory[0]).abs().max() > 1e-3
        torch.testing.assert_close(seen[0], point, rtol=0, atol=2e-6)


# -- what the rule sees --------------------------------------------------------------------------------------------------


def test_the_rule_is_asked_at_the_ends_of_intervals_and_believes_them_to_be_cycles() -> None:
    run = Grouped(
        4, lambda net: Waits(net, interval=3), knobs=[hdet.LearningRate(0.3)], total=44
    ).steps()
    asked = run.controller.asked
    assert [evidence.step for evidence in asked] == [12, 24, 36]
    assert all("probe" in evidence.measured and evidence.sync_interval == 12 for evidence in asked)
    assert asked[0].multipliers[0] == pytest.approx([float(rho[0]) for rho in run.rhos[11]])


@pytest.mark.parametrize("cycles", [1, 5, 10])
def test_a_peak_inside_of_an_interval_is_seen(cycles: int) -> None:
    """A twentieth of the run up to it, and down from there: votes count afterwards, and at 90 % of it on the way down all rests."""
    controller = probe(model(), interval=cycles)
    controller.start(hdet.Run(Clock(1, total_steps=100), [KnobSpec("lr", 0.3)], 4, [0.0]))
    idle_from = None
    for cycle in range(1, 101):
        phase = min(cycle / 5, (100 - cycle) / 95)
        measured = {"probe": [[1.0] * 8] * 4} if cycle % cycles == 0 and not controller.idle else {}
        controller.learn(
            hdet.Evidence(
                cycle=cycle, step=cycle, total_steps=100, warmup_steps=0, sync_interval=1, knobs=["lr"], multipliers=[[0.7, 0.9, 1.1, 1.3]],
                losses=[1.0] * 4, measured=measured, scheduled=[phase], peak=[1.0], floor=[0.0], values=[phase], corrections=[1.0],
            )
        )  # fmt: skip
        idle_from = cycle if controller.idle and idle_from is None else idle_from
    assert controller.warm == [True] and idle_from == 15


def test_a_rise_takes_two_intervals() -> None:
    run = Grouped(
        4,
        lambda net: probe(net, interval=2),
        knobs=[hdet.LearningRate(0.3)],
        total=80,
        warmup_steps=0,
    )
    with run.ensemble.rescheduling():
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-5
    corrections = [run.ensemble.corrections["lr"] for _ in range(4) if run.steps(4)]
    assert corrections[:3] == [1.0] * 3 and corrections[3] > 1.5


def test_it_rests_before_an_interval_would_end_too_late() -> None:
    run = Grouped(
        4, lambda net: Scored(net, interval=3, freeze_after=26), knobs=[hdet.LearningRate(0.3)]
    ).steps(26)
    assert (
        run.controller.idle
        and len(run.controller.seen) == 16
        and run.ensemble.multipliers == {"lr": 1.0}
    )
    run.steps(14)


def test_an_average_in_between_changes_nothing_of_the_line() -> None:
    run = Grouped(4, lambda net: Scored(net, interval=3), knobs=[hdet.LearningRate(0.3)])
    run.steps(6)
    run.ensemble.converge()
    run.steps(6)
    for k, point in enumerate(points(run.trajectory, 0, 12, run.rhos[11])):
        torch.testing.assert_close(run.controller.seen[2 * k], point, rtol=0, atol=2e-6)


def test_a_cycle_that_is_taken_back_begins_the_interval_anew() -> None:
    settings = {
        "knobs": [hdet.LearningRate(0.3)],
        "divergence": hdet.Divergence(rollback="device"),
        "total": 100,
    }
    run = Grouped(4, lambda net: Scored(net, interval=2), **settings).steps(4)
    for _ in range(4):
        run.step(dict.fromkeys(range(4), 1e9))
    assert run.ensemble.engine.rollbacks == 1
    begun, before = run.index, len(run.controller.seen)
    run.trajectory[begun] = run.mean()
    run.steps(4)
    assert len(run.controller.seen) == before
    run.steps(4)
    for k, point in enumerate(points(run.trajectory, begun, 8, run.rhos[-1])):
        torch.testing.assert_close(run.controller.seen[before + 2 * k], point, rtol=0, atol=2e-6)


def test_a_resumed_run_keeps_what_was_learned_and_begins_its_interval_anew() -> None:
    def make() -> Grouped:
        return Grouped(
            4, lambda net: Scored(net, interval=2), knobs=[hdet.LearningRate(0.3)], total=80
        )

    run = make().steps(20)  # two and a half intervals
    other = make().loaded(run.saved())
    assert other.controller.last == run.controller.last != [0.0]
    other.trajectory = [other.mean()]
    other.steps(4)
    assert not other.controller.seen
    other.steps(4)
    for k, point in enumerate(points(other.trajectory, 0, 8, other.rhos[-1])):
        torch.testing.assert_close(other.controller.seen[2 * k], point, rtol=0, atol=2e-6)


# -- the interval's length -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "interval", "expected"),
    [(400, 20, 1), (400, 10, 1), (419, 10, 3), (1000, 10, 5), (1000, 1, 50), (3, 5, 1)],
)
def test_by_default_averages_are_over_a_fortieth_of_the_run(
    total: int, interval: int, expected: int
) -> None:
    run = Run(together=2, controller="probe", total=total, every=interval)
    assert run.ensemble.engine.controller.losses.cycles == expected


def of(interval: int | None, **settings: Any) -> hdet.ProbeController:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    controller = probe(net, interval=interval, held_out=True)
    hdet.Ensemble(
        optimizer,
        controller=controller,
        **policies(**({"every": 2, "total_steps": 200} | settings)),
    )
    return controller


@pytest.mark.filterwarnings("ignore:one replica")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradients": "local", "moments": "keep"}, "gradients='local'"),
        ({"knobs": [hdet.LearningRate(0.1, bounds=(1e-3, 1.0))]}, "'lr'.*without bounds"),
        (
            {"knobs": [hdet.Scalar("x", lambda: 0.5, lambda x: None, 0.1, affects_eval_loss=True)]},
            "'x'.*without bounds",
        ),
    ],
)
def test_where_replicas_lie_on_no_line_there_is_one_cycle_or_a_refusal(
    settings: dict[str, Any], message: str
) -> None:
    assert of(None).losses.cycles == 5
    assert of(None, **settings).losses.cycles == of(1, **settings).losses.cycles == 1
    with pytest.raises(ValueError, match=message):
        of(2, **settings)


@pytest.mark.filterwarnings("ignore:one replica")
def test_an_interval_longer_than_the_run_is_refused() -> None:
    assert of(100).losses.cycles == 100
    assert (
        of(7, total_steps=None).losses.cycles == 7 and of(None, total_steps=None).losses.cycles == 1
    )
    with pytest.raises(ValueError, match="interval is 101 cycles, but the run has 100"):
        of(101)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval": 0}, "interval"),
        ({"interval": 1.5}, "interval"),
        ({"interval": True}, "interval"),
        ({"place": "disk"}, "place"),
        ({"chunks": 1}, "chunks"),
        ({"average_every": 0}, "average_every"),
        ({"average_from": 1.0}, "average_from"),
        ({"batches": [1, 2]}, "batches holds 2"),
    ],
)
def test_settings_are_validated(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hdet.ProbeController(
            **{"loss_fn": loss_of, "batches": [0] * 8, "model": model(), **settings}
        )
