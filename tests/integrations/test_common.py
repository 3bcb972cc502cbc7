"""The contract of adapters, without a framework."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.integrations.common import (
    Adapter,
    complete_settings,
    keep_attributes,
    require,
)
from hdet.testing.adapters import Halved
from hdet.trial.rule import SCORES, STEPS

from ..trial.common import ALL, auto_run
from .frameworks import halved


class Own(Adapter):
    """Of no framework: notes what it is asked for."""

    def __init__(self, obstacle: str | None = None, scaler: Any = None) -> None:
        self.lines: list[str] = []
        super().__init__(self.lines.append)
        self.called: list[Any] = []
        self.obstacle, self.scaler, self.weight = obstacle, scaler, nn.Parameter(torch.tensor(2.0))
        self.without_sync = self.note_sync

    def find_obstacle(self) -> str | None:
        return self.obstacle

    def compute_loss(self, part: float | None) -> torch.Tensor | None:
        return None if part is None else part * self.weight

    def backward(self, loss: torch.Tensor) -> None:
        self.called.append(float(loss.detach()))
        super().backward(loss)

    @contextmanager
    def note_sync(self) -> Any:
        self.called.append("no sync")
        yield
        self.called.append("sync")

    def clip_gradients(self) -> None:
        self.called.append("clip")


MODEL = nn.Linear(1, 1)


def begun(
    settings: dict[str, Any], count: int = 1, logs: bool = True, states: Any = (), **own: Any
) -> Own:
    """``count``: of optimizers."""
    adapter = Own(**own)
    optimizers = [torch.optim.SGD(MODEL.parameters(), lr=1.0) for _ in range(count)]
    complete = [complete_settings(settings)] * count
    adapter.saved_states = states
    adapter.begin(optimizers, complete, MODEL, logs=logs)
    return adapter


def stepped(adapter: Own, ensemble: hdet.Ensemble | None = None, steps: int = 1) -> None:
    MODEL(torch.ones(1)).backward()
    for _ in range(steps):
        for one in adapter.ensembles:
            if ensemble in (None, one):
                one.optimizer.step()
        adapter.observe(0.5)
        adapter.end_step()


def test_importing_hdet_loads_no_framework_and_a_missing_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frameworks = {"accelerate", "lightning", "megatron", "torchtitan", "transformers"}
    assert "integrations" in hdet.__all__ and frameworks == set(hdet.integrations.__all__)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    message = "adapter of hdet needs accelerate, which cannot be imported.*: pip install accelerate"
    with pytest.raises(ImportError, match=message):
        require("accelerate")
    with pytest.raises(AttributeError, match="has no attribute 'keras'"):
        getattr(hdet.integrations, "keras")  # noqa: B009


def test_controllers_and_replicas_may_be_functions_of_the_model() -> None:
    controller, replicas, asked = Halved(), hdet.Replicas(0, 1), []
    given = begun({"controller": controller, "replicas": replicas, "seed": 1}).ensemble
    assert given.report() == "halves once" and given.replicas is replicas
    find = lambda module: asked.append(module) or replicas
    made = begun({"search": hdet.AutoLR, "replicas": find, "total_steps": 9000}).ensemble
    assert isinstance(made.search, hdet.AutoLR) and made.replicas is replicas and asked == [MODEL]


@pytest.mark.parametrize(("settings", "message"), [
    ({"every": 3}, "unexpected keyword argument 'every'"),
    ({"optimizer": None}, "multiple values for argument 'optimizer'"),
    (hdet.AutoLR, "must be a mapping"),
])  # fmt: skip
def test_what_is_no_setting_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        complete_settings(settings)


def test_where_nothing_says_what_is_searched_the_first_steps_are_looked_at() -> None:
    for settings in ({}, {"seed": 1, "total_steps": 9000}):
        scaler = torch.amp.GradScaler("cpu")
        for free in begun(settings, 2, scaler=scaler, obstacle="is bad").ensembles:
            auto = free.search
            assert isinstance(auto, hdet.AutoLR) and auto.budget == 0
            assert "only how far" in auto.report()
            assert auto.before_step is None
    searched = {
        "controller": None,
        "search": None,
        "knobs": [hdet.LearningRate()],
        "sync": hdet.Sync(2),
    }
    for name, value in {**searched, "design": "permutation"}.items():
        assert begun({name: value}).ensemble.search is None, name


def test_a_trial_has_the_frameworks_scaler_and_its_clipping_before_the_users_own_step() -> None:
    scaler, own = torch.amp.GradScaler("cpu"), []
    search = lambda module: hdet.AutoLR(module, before_step=lambda: own.append(adapter.called))
    adapter = begun({"search": search, "total_steps": 9000}, scaler=scaler)
    adapter.ensemble.search._prepare_step()
    assert adapter.ensemble.search.scaler_in_use is scaler and own == [["clip"]]


def test_each_optimizer_has_an_ensemble_with_its_state_or_none_has() -> None:
    records: list[int] = []
    log = lambda record, step: records.append(step)
    settings = {"controller": halved, "sync": hdet.Sync(1), "log": log}
    before = begun(settings, 2)
    stepped(before, before.ensembles[1], 2)
    said = ["hdet, halved: halves once"] * 2  # of each
    assert before.lines == [*said, "hdet, step 1: lr: halved"] and records == [1, 2]
    states = before.save_states()
    after = begun(settings, 2, logs=False, states=states)
    assert [of.corrections["lr"] for of in after.ensembles] == [1.0, 0.5]
    stepped(after)
    assert after.ensembles[1].cycle == 3 and records == [1, 2]
    with pytest.raises(ValueError, match="is of 2 optimizers, and there are 1: make the same ones"):
        begun(settings, 1, states=states)


@pytest.mark.parametrize(("count", "given", "obstacle", "message"), [
    (2, {"controller": Halved()}, None, "each with a controller of its own: pass a function"),
    (2, {"search": hdet.AutoLR(MODEL)}, None, "each with a search of its own: pass a function"),
    (2, {"search": hdet.AutoLR}, "is bad", "AutoLR trains copies of a run with one optimizer, and"),
    (1, {"search": hdet.AutoLR}, "is bad", "AutoLR is bad"),
    (1, {"search": lambda model: 5}, None, "search must be an hdet.AutoLR"),
])  # fmt: skip
def test_a_search_that_cannot_be_is_refused(
    count: int, given: Any, obstacle: str | None, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        begun({**given, "total_steps": 9000}, count, obstacle=obstacle)


BEGINS: dict[str, tuple[Any, Any]] = {
    "an Ensemble": ({"seed": 0.5}, ()),
    "a state": ({}, [{}, {}]),
    "a search": ({"search": hdet.AutoLR(MODEL), "seed": 0.5, "total_steps": 9000}, ()),
    "a search's state": ({"search": hdet.AutoLR(MODEL), "total_steps": 9000}, [{}]),
}


@pytest.mark.parametrize("refused", BEGINS)
def test_a_beginning_that_was_refused_leaves_nothing_to_the_next(refused: str) -> None:
    """Neither an Ensemble on an optimizer nor a second clipping in a search."""
    settings, states = BEGINS[refused]
    count, right = 1 if "search" in settings else 2, {**settings, "seed": 1}
    adapter, optimizers = Own(), [torch.optim.SGD(MODEL.parameters(), lr=1.0) for _ in range(count)]
    adapter.saved_states = states
    with pytest.raises(ValueError, match="seed must be|lacks"):
        adapter.begin(optimizers, [right, settings][-count:], MODEL, logs=True)
    assert adapter.ensembles == [] and adapter.saved_states == states
    assert "search" not in settings or settings["search"].framework is None
    adapter.saved_states = ()
    adapter.begin(optimizers, [right] * count, MODEL, logs=True)
    assert [ensemble.optimizer for ensemble in adapter.ensembles] == optimizers
    for ensemble in adapter.ensembles:
        if ensemble.search is not None:
            ensemble.search._prepare_step()
            assert adapter.called == ["clip"]


def test_arms_that_were_to_be_spread_are_refused_beside_a_frameworks_scaler() -> None:
    """accelerate makes the Ensemble before its adapter."""
    optimizer, search = torch.optim.SGD(MODEL.parameters()), hdet.AutoLR(MODEL, spread_arms=True)
    local = hdet.Sync(gradients="local", moments="keep")
    ensemble = hdet.Ensemble(optimizer, search=search, sync=local, total_steps=9000)
    with pytest.raises(ValueError, match="no GradScaler"):
        search.framework = Own(scaler=torch.amp.GradScaler("cpu"))
    assert search.framework is None
    search.framework = Own()
    ensemble.close()


def test_metrics_have_the_names_of_records_and_saved_corrections_are_told_once() -> None:
    adapter = begun({"controller": halved, "sync": hdet.Sync(2)})
    stepped(adapter, steps=8)
    by_kind = {"corrections": 0.5, "multipliers": 1.0, "values": 0.5}
    metrics = {f"hdet/{kind}/lr": value for kind, value in by_kind.items()}
    assert adapter.metrics() == {**metrics, "hdet/cycle": 4.0}
    for _ in range(2):
        assert adapter.save_states() == [adapter.ensemble.state_dict()]
        [said] = [line for line in adapter.lines if "saved" in line]
        assert said == (
            "hdet, step 8: saved with the correction 0.5 of lr, which only hdet reads. To go on "
            "without hdet, multiply your lr by it"
        )
    assert {name.split("/")[0] for name in begun({}, 2).metrics()} == {"optimizer 0", "optimizer 1"}


@pytest.mark.parametrize("controller", [halved, Halved()], ids=["function", "object"])
def test_a_group_is_added_in_mid_run(controller: Any) -> None:
    adapter = begun({"controller": controller, "sync": hdet.Sync(2)})
    first = adapter.ensemble
    stepped(adapter, steps=3)
    adapter.add_group(0, {"params": [adapter.weight], "lr": 0.1})
    ensemble = adapter.ensemble
    rates = [group["lr"] for group in ensemble.optimizer.param_groups]
    assert ensemble is not first and rates == [0.5, 0.05] and ensemble.corrections == {"lr": 0.5}
    assert (ensemble.steps_done, ensemble.cycle) == (3, 1) and len(ensemble.parameters) == 3
    stepped(adapter)
    assert ensemble.cycle == 2
    with adapter.enter("rescheduling"):
        assert [group["lr"] for group in ensemble.optimizer.param_groups] == [1.0, 0.1]


def test_losses_are_computed_again_in_parts_and_synchronised_once() -> None:
    adapter = Own()
    assert float(adapter.compute_again([1.0, 2.0, 3.0])) == 12 and float(adapter.weight.grad) == 6
    assert adapter.called == ["no sync", 2.0, "sync", "no sync", 4.0, "sync", 6.0]
    adapter.called.clear()
    with torch.no_grad():
        assert float(adapter.compute_again([None, 2.0])) == 4 and not adapter.called
        assert adapter.compute_again([None]) is None


def test_plain_attributes_are_put_back_and_others_left_alone() -> None:
    tensor, lists = torch.zeros(1), {"a": [1, {"b": (2, None)}]}
    owner = SimpleNamespace(count=1, lists=lists, tensor=tensor, mixed=[tensor])
    with pytest.raises(KeyError), keep_attributes(owner):
        owner.count, owner.mixed = 2, owner.mixed + [1]
        owner.lists["a"][1]["b"] = 3
        owner.tensor += 1
        raise KeyError
    assert (owner.count, owner.lists) == (1, {"a": [1, {"b": (2, None)}]})
    assert (float(owner.tensor), len(owner.mixed)) == (1.0, 2)


def test_a_shadow_reports_what_its_controller_does() -> None:
    shadow = hdet.Shadow(Halved())
    assert shadow.report() == "halves once (reported only: nothing is moved)"


@pytest.mark.parametrize("broken", [False, True], ids=["of all arms", "of those that diverge"])
def test_batches_without_a_loss_are_left_out_of_a_trial(broken: bool) -> None:
    """As a training_step leaves them out, which returns None for reasons of its own, or because a
    loss is not finite."""
    run, left_out = auto_run(0.03), []

    def closure(data: Any) -> Any:
        losses = run.losses(data)
        if run.index in (3, 40) if not broken else float(losses.detach().mean()) > 3:
            left_out.append(run.index)
            return None
        return losses

    run.closure = closure
    found = run.steps(ALL).search.interval
    assert left_out and not found.moves
    assert {len(arm.losses) for arm in found.trial.arms} == {
        0,
        SCORES if broken else SCORES - 1,
    }  # 0: of rates that are far too high


def test_a_trial_without_any_loss_is_refused_by_name() -> None:
    for at in (1, STEPS):
        run = auto_run(0.03)
        run.closure = lambda data, run=run, at=at: run.losses(data) if run.index < at else None
        with pytest.raises(ValueError, match="returned no losses on any rank: return them"):
            run.steps(ALL)
