"""The line on real tensors: points by hand, what is left untouched, weights taken back, closures, refusals, whole runs, resume."""

from __future__ import annotations

import functools
import gc
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.checks import _check_alike as check_alike
from hdet.core.controllers import Decision, Evidence, LineRule
from hdet.line import Way
from tests.ensemble.helpers import model

# -- the way -------------------------------------------------------------------------------------------------------------

RHOS = (1.0, 2.0, 0.5, 0.0, 8.0, 0.0, 1.0, 0.5)


def way_of(of: torch.dtype, **settings: Any) -> tuple[list[torch.Tensor], Way, list[torch.Tensor], list[torch.Tensor]]:
    """Tensors, their way after two samples, the anchor and the mean by hand (in float64), on memory that is full of NaN."""
    torch.manual_seed(0)
    tensors = [torch.randn(5, 3).to(of), torch.randn(7).to(of)]
    way = Way(tensors, None, settings.pop("dtype", None), settings.pop("place", "device"))
    for room in (*way._anchor, *way._mean):
        room.fill_(math.nan)
    anchor = [t.double().clone() for t in tensors]
    way.begin()
    seen = []
    for _ in range(2):
        for t in tensors:
            t.add_(torch.randn_like(t))
        way.add()
        seen.append([t.double().clone() for t in tensors])
    for t in tensors:
        t.add_(torch.randn_like(t))
    return tensors, way, anchor, [(a + b) / 2 for a, b in zip(*seen, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "settings", "error"),
    [
        (torch.float32, {}, 1e-5),
        (torch.float64, {}, 1e-12),
        (torch.float32, {"place": "host"}, 1e-5),
        (torch.float32, {"dtype": torch.bfloat16}, 0.2),
        (torch.bfloat16, {}, 0.04),
        (torch.bfloat16, {"dtype": torch.bfloat16}, 0.2),
    ],
)
def test_points_are_those_by_hand_in_any_order_and_weights_are_afterwards_what_they_were(
    dtype: torch.dtype, settings: dict[str, Any], error: float
) -> None:
    tensors, way, anchor, mean = way_of(dtype, **settings)
    before = [t.clone() for t in tensors]
    with way.scored() as put:
        for i, rho in enumerate(RHOS):
            rhos = (rho, RHOS[-i - 1])  # each tensor at its own, as with several knobs
            put(rhos)
            for t, a, m, r in zip(tensors, anchor, mean, rhos, strict=True):
                torch.testing.assert_close(t.double(), a + r * (m - a), rtol=0, atol=error * max(1.0, r))
    assert all(map(torch.equal, tensors, before))
    assert way.samples == 0
    way.take_back()
    rounded = settings.get("dtype", dtype)
    assert all(torch.equal(t, a.to(rounded).to(dtype)) for t, a in zip(tensors, anchor, strict=True))


def test_an_error_inside_leaves_weights_and_anchor_alone() -> None:
    tensors, way, anchor, _ = way_of(torch.float32)
    before = [t.clone() for t in tensors]
    with pytest.raises(ZeroDivisionError), way.scored() as put:
        put((2.0, 0.0))
        raise ZeroDivisionError
    assert all(map(torch.equal, tensors, before))
    way.take_back()
    assert all(torch.equal(t, a.float()) for t, a in zip(tensors, anchor, strict=True))


# -- whole runs ----------------------------------------------------------------------------------------------------------


def data(key: int, count: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """A target that the model can reach, and noise."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).requires_grad_(False)
    generator = torch.Generator().manual_seed(key)
    x = torch.randn(count, 6, generator=generator)
    return x, 3 * teacher(x) + 0.1 * torch.randn(count, 1, generator=generator)


def losses_of(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    dtype = next(net.parameters()).dtype
    return ((net(batch[0].to(dtype)) - batch[1].to(dtype)).float() ** 2).mean(1)


class Run:
    """One process, one replica."""

    def __init__(self, lr: float = 3e-4, *, total: int = 200, net: nn.Module | None = None, line: Any = "line", **settings: Any) -> None:
        self.net = model() if net is None else net
        make: Callable[..., Any] = settings.pop("optimizer", torch.optim.AdamW)
        self.optimizer = make(self.net.parameters(), lr=lr, weight_decay=0.0)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, total, cycle_momentum=False)
        self.line = hdet.LineController(self.net) if line == "line" else line
        self.records: list[dict[str, Any]] = []
        self.ensemble = hdet.Ensemble(
            self.optimizer, self.scheduler, controller=self.line, log=lambda record, step: self.records.append(record),
            **({"sync_interval": total // 100} | settings),
        )  # fmt: skip
        self.closure: Callable[[tuple[torch.Tensor, torch.Tensor]], Any] | None = lambda batch: losses_of(self.net, batch)
        self.index = 0

    def steps(self, count: int) -> Run:
        for _ in range(count):
            batch = data(self.index)
            self.optimizer.zero_grad()
            loss = losses_of(self.net, batch).mean()
            loss.backward()
            self.optimizer.step()
            self.ensemble.step(loss.detach(), closure=None if self.closure is None else functools.partial(self.closure, batch))
            self.index += 1
        return self

    def notes(self) -> list[str]:
        return [note for record in self.records for note in record["notes"]]

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()]).clone()

    def validation(self) -> float:
        with torch.no_grad():
            return losses_of(self.net, data(10_000, 512)).mean().item()


class Fixed(LineRule):
    """Scores at 0, 1 and 2 and says this at the first end, and nothing later."""

    def __init__(self, **decision: Any) -> None:
        super().__init__()
        self.decision = Decision(**decision)

    def decide(self, evidence: Evidence) -> list[Decision]:
        if evidence.line is None or self.stage >= 0:
            return [Decision()] * len(evidence.knobs)
        self.stage = 0.0
        for line in evidence.line:
            line.difference(2.0, 1.0)
            line.difference(1.0, 0.0)
        return [self.decision] * len(evidence.knobs)


def test_from_30_times_too_low_and_too_high_it_beats_the_fixed_schedule() -> None:
    right = 0.03
    best = Run(right, line=None).steps(200).validation()
    for start in (right / 30, right * 30):
        steered, fixed = Run(start).steps(200), Run(start, line=None).steps(200)
        assert steered.validation() < 0.5 * fixed.validation(), (steered.validation(), fixed.validation(), best)
        assert (steered.ensemble.corrections["lr"] > 1) is (start < right)


def test_scoring_leaves_the_run_alone() -> None:
    """With a rule that does nothing, training is bit for bit what it is without a controller: modes, BatchNorm, dropout, random states."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    ends = []
    for scored in (False, True):
        run = Run(0.03, net=(model := net()), line=hdet.LineController(model, rule=Fixed()) if scored else None)
        run.net[2].eval()  # type: ignore[index,operator]  # a mode of its own
        modes: list[bool] = []

        def closure(batch: Any, net: nn.Module = model, modes: list[bool] = modes) -> torch.Tensor:
            modes.append(any(module.training for module in net.modules()))
            return losses_of(net, batch) + torch.rand(32) + random.random()

        run.closure = closure
        torch.manual_seed(3)
        random.seed(3)
        run.steps(12)
        assert [module.training for module in run.net] == [True, True, False, True]  # type: ignore[attr-defined]
        assert modes == [False] * len(modes) and (len(modes) > 1) is scored
        ends.append((run.net.state_dict(), torch.rand(3), random.random()))
    (one, drawn, number), (two, drawn_too, number_too) = ends
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert torch.equal(drawn, drawn_too) and number == number_too


def test_there_are_two_copies_of_the_parameters_and_no_third() -> None:
    weight = nn.Parameter(torch.zeros(1000, 1000))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    ensemble = hdet.Ensemble(optimizer, controller=hdet.LineController(rule=Fixed()), sync_interval=1, total_steps=100)
    counted = []

    def closure() -> torch.Tensor:
        gc.collect()
        counted.append(len({x.data_ptr() for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.numel() == 1_000_000}))
        return torch.rand(4)

    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.grad = None
    ensemble.step(1.0, closure)
    assert counted and set(counted) == {3}  # the parameters are the third


@pytest.mark.parametrize("kind", ["stock", "fused", "fused with masters", "fused with split masters"])
def test_a_restart_takes_weights_back_and_begins_with_fresh_moments(kind: str) -> None:
    settings: dict[str, Any] = {"optimizer": torch.optim.AdamW if kind == "stock" else hdet.FusedAdamW}
    net = model()
    if "masters" in kind:
        net = net.bfloat16()
        masters = "split" if "split" in kind else "fp32"
        settings["optimizer"] = lambda p, **more: hdet.FusedAdamW(p, master_weights=masters, **more)
    run = Run(0.3, net=net, line=hdet.LineController(net, rule=Fixed(factor=0.1, over=8, restart=True)), total=400, **settings)
    begin = run.weights()
    run.steps(3)
    assert not torch.equal(run.weights(), begin)
    run.steps(1)
    assert torch.equal(run.weights(), begin)
    for p in net.parameters():
        state = run.optimizer.state[p]
        assert not state["exp_avg"].any() and not state["exp_avg_sq"].any() and not torch.as_tensor(state["step"]).any()
        if "master_param" in state:
            (master,) = run.optimizer.masters([p])
            assert master is not None and torch.equal(master.bfloat16(), p)
    scheduled = run.ensemble.schedule.values()[0]
    assert run.ensemble.values()["lr"] == pytest.approx(scheduled * 0.1 / 8)
    run.steps(1)
    assert (run.weights() - begin).abs().max() < 3 * 0.3 * 0.1 / 8


# -- closures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: torch.rand(4, 2), r"shape \(4, 2\)"), (lambda: 1.0, "got float"), (lambda: torch.arange(4), r"shape \(4,\)"),
        (lambda: torch.tensor(1.0), "gave 1 losses"), (lambda: None, "gave 0 losses"), (lambda: torch.empty(0), "gave 0 losses"),
    ],
)  # fmt: skip
def test_a_closure_that_says_nothing_of_use_is_refused_and_weights_stay(answer: Callable[[], Any], message: str) -> None:
    run = Run(total=400).steps(3)
    run.closure = lambda batch: answer()
    seen: list[torch.Tensor] = []
    step = run.optimizer.step
    run.optimizer.step = lambda: (step(), seen.append(run.weights()))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=message):
        run.steps(1)
    assert torch.equal(run.weights(), seen[-1])


def test_an_error_of_the_closures_own_passes_and_weights_stay() -> None:
    run = Run(total=400).steps(3)
    calls = []

    def closure(batch: Any) -> torch.Tensor:
        calls.append(run.weights())
        if len(calls) == 2:
            raise RuntimeError("mine")
        return losses_of(run.net, batch)

    run.closure = closure
    seen: list[torch.Tensor] = []
    step = run.optimizer.step
    run.optimizer.step = lambda: (step(), seen.append(run.weights()))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="mine"):
        run.steps(1)
    assert torch.equal(run.weights(), seen[-1]) and not torch.equal(calls[1], seen[-1])


def test_without_a_closure_there_is_a_note_and_no_move() -> None:
    run = Run()
    run.closure = None
    with pytest.warns(UserWarning, match="closure"):
        run.steps(20)
    assert run.ensemble.corrections == {"lr": 1.0} and run.line.rule.stage == -1
    assert any("closure" in note for note in run.notes())


def test_the_controllers_warm_up_delays_the_first_reading_and_the_anchor_stays() -> None:
    run = Run(warmup_steps=10)
    run.steps(11)
    assert run.line.rule.stage == -1 and run.line._begun == 0
    run.steps(1)
    assert run.line.rule.stage == 2


def test_a_cycle_that_is_taken_back_begins_the_interval_anew() -> None:
    run = Run(total=400, divergence=hdet.Divergence(rollback="device"), sync_interval=5)
    run.steps(21)
    begun = run.line._begun
    with torch.no_grad():
        next(run.net.parameters()).fill_(math.nan)
    run.steps(4)
    assert run.records[-1]["rolled_back"] and begun is not None and run.line._begun is None
    run.steps(1)
    assert run.line._begun == 25


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused_by_name() -> None:
    def build(**settings: Any) -> hdet.Ensemble:
        net = model()
        optimizer = hdet.FusedAdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
        if settings.pop("together", False):
            settings["replicas"] = hdet.CoresidentReplicas(net, 2)
        return hdet.Ensemble(optimizer, controller=hdet.LineController(net), **({"total_steps": 100} | settings))

    optimizer = torch.optim.AdamW(model().parameters())
    (knob,) = hdet.LearningRate().bind(optimizer)
    knob.key, knob.name = "betas", "beta2"
    with pytest.raises(ValueError, match="'beta2' is no learning rate"):
        hdet.LineController().follow_run(optimizer, lambda tensors: lambda: [None] * len(tensors), [knob], 100)
    with pytest.raises(ValueError, match="pass total_steps"):
        build(total_steps=None)
    with pytest.raises(ValueError, match="co-resident"):
        build(together=True)
    with pytest.raises(ValueError, match=r"converge is ExactLocal\("):
        build(converge=hdet.converge.ExactLocal())
    two: Any = SimpleNamespace(count=2, local=[0])
    with pytest.raises(ValueError, match="gradients is 'local'"):
        check_alike(two, "local", hdet.converge.Plain())
    build(gradients="local", moments="keep")  # one replica: the same as shared


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"model": 1}, TypeError), ({"rule": object()}, TypeError), ({"rule": LineRule(), "freeze_after": 0.5}, ValueError),
        ({"place": "disk"}, ValueError), ({"dtype": torch.int32}, ValueError),
    ],
)  # fmt: skip
def test_settings_are_validated(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(settings))):
        hdet.LineController(**settings)


# -- resume --------------------------------------------------------------------------------------------------------------


def test_a_run_resumes_from_a_checkpoint_and_the_interval_begins_anew() -> None:
    first, second = Run(1e-3).steps(44), Run(1e-3)
    second.net.load_state_dict(first.net.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.ensemble.load_state_dict(first.ensemble.state_dict())
    second.index = 44
    assert second.line.rule.state_dict() == first.line.rule.state_dict()
    assert second.ensemble.values() == first.ensemble.values() and second.ensemble.corrections["lr"] > 1
    second.steps(1)
    assert second.line._begun == 44
    second.steps(155)
    assert second.line.idle and second.validation() < 0.5 * Run(1e-3, line=None).steps(200).validation()
