"""What adapters share, without a framework."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hdet.core.sequential import SequentialController, Shadow
from torch import nn

import hdet
from hdet.integrations.common import attributes_kept, check_settings, losses_anew, make, numbers, require, states, step, wants_trial
from hdet.trial.rule import SCORES, STEPS

from ..trial.common import ALL, auto_run
from .frameworks import MEASURED, MOVED, Halved, Measured


def test_importing_hdet_loads_no_framework_and_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "integrations" in hdet.__all__ and {"accelerate", "lightning", "megatron", "torchtitan", "transformers"} == set(
        hdet.integrations.__all__
    )
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match="this adapter of hdet needs accelerate, which cannot be imported here.*: pip install accelerate"):
        require("accelerate")
    with pytest.raises(AttributeError, match="has no attribute 'keras'"):
        getattr(hdet.integrations, "keras")  # noqa: B009


def test_controllers_and_replicas_may_be_functions_of_the_model() -> None:
    model, controller, replicas, asked = nn.Linear(1, 1), Halved(), hdet.Replicas(0, 1), []
    [given] = ensembles(model, 1, {"controller": controller, "replicas": replicas, "seed": 1})
    assert given.engine.controller is controller and given.replicas is replicas and given.engine.seed == 1
    functions = {"controller": hdet.AutoLR, "replicas": lambda module: asked.append(module) or replicas, "total_steps": 9000}
    [made] = ensembles(model, 1, functions)
    auto = made.engine.controller
    assert isinstance(auto, hdet.AutoLR) and made.replicas is replicas and asked == [model]
    assert wants_trial(auto) and wants_trial(Shadow(auto)) and not wants_trial(controller) and not wants_trial(None)
    with pytest.raises(TypeError, match="no setting 'every' here, only controller, design, divergence"):
        check_settings({"every": 3})
    with pytest.raises(TypeError, match="controller must be an object of a class from hdet.Controller, got 'auto': pass hdet.AutoLR"):
        ensembles(model, 1, {"controller": "auto"})
    with pytest.raises(TypeError, match="no setting 'optimizer'"):
        check_settings({"optimizer": None})


def test_where_nothing_says_what_is_searched_the_first_steps_are_looked_at() -> None:
    model, scaler, clip = nn.Linear(1, 1), torch.amp.GradScaler("cpu"), lambda: None
    for settings in ({}, {"seed": 1, "total_steps": 9000}):
        for free in ensembles(model, 2, settings, scaler=scaler, clip=clip, no_copies={"is bad": True}):
            auto = free.engine.controller
            assert isinstance(auto, hdet.AutoLR) and auto.budget == 0 and not wants_trial(auto) and "only how far" in auto.report()
            assert auto.scaler is None and auto.before_step is None
    for name, value in {"controller": None, "knobs": [hdet.LearningRate()], "sync": hdet.Sync(2), "design": "permutation"}.items():
        [given] = ensembles(model, 1, {name: value})
        assert given.engine.controller is None, name


def test_a_trial_has_the_frameworks_scaler_and_its_clipping_before_the_users_own_step() -> None:
    model, scaler, called = nn.Linear(1, 1), torch.amp.GradScaler("cpu"), []
    for own, expected in ((None, ["clip"]), (lambda: called.append("own"), ["clip", "own"])):
        controller = lambda module, own=own: hdet.AutoLR(module, before_step=own)
        [made] = ensembles(model, 1, {"controller": controller, "total_steps": 9000}, scaler=scaler, clip=lambda: called.append("clip"))
        made.engine.controller.before_step()
        assert made.engine.controller.scaler is scaler and called == expected
        called.clear()


def ensembles(model: nn.Module, optimizers: int, settings: dict[str, Any], **others: Any) -> list[hdet.Ensemble]:
    made = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(optimizers)]
    return make(made, [settings] * optimizers, model, **{"tell": lambda line: None, "first": True, "no_copies": {}, **others})


def test_each_optimizer_has_an_ensemble_with_its_state_or_none_has() -> None:
    model, lines, records = nn.Linear(1, 1), [], []
    settings = {"controller": lambda module: Halved(), "sync": hdet.Sync(1), "log": lambda record, step: records.append(step)}
    before = ensembles(model, 2, settings, tell=lines.append)
    model(torch.ones(1)).backward()
    for _ in range(2):
        before[1].optimizer.step()
        before[1].step(0.5)
    assert lines == ["hdet, halved: halves once", "hdet, step 1: lr: halved"] and records == [1, 2]
    states = [ensemble.state_dict() for ensemble in before]
    after = ensembles(model, 2, settings, states=states, first=False)
    assert [of.corrections["lr"] for of in after] == [1.0, 0.5] and [of.log for of in after] == [None, None]
    with pytest.raises(ValueError, match="the state is of 2 optimizers, and there are 1: make the same ones"):
        ensembles(model, 1, settings, states=states)
    for count, controller, others, message in (
        (2, Halved(), {}, "several optimizers, each with a controller of its own: pass a function"),
        (2, hdet.AutoLR, {}, "AutoLR trains copies of a run with one optimizer, and there are 2: train all parameters with one"),
        (1, hdet.AutoLR, {"no_copies": {"is good": False, "is bad": True}}, "AutoLR is bad"),
    ):
        with pytest.raises(ValueError, match=message):
            ensembles(model, count, {"controller": controller, "total_steps": 9000}, **others)


def test_settings_are_a_dict() -> None:
    for given, name in ((hdet.AutoLR, "AutoLR"), (Halved(), "Halved"), ([1], "list")):
        with pytest.raises(TypeError, match=f"must be a dict by name, such as {{'controller': hdet.AutoLR}}, got {name}$"):
            check_settings(given)  # type: ignore[arg-type]


def test_moves_and_what_was_measured_are_told_and_logged_by_the_records_names() -> None:
    model, lines, records = nn.Linear(1, 1), [], []
    settings = {"controller": lambda module: Measured(), "sync": hdet.Sync(2), "log": lambda record, step: records.append(record)}
    one, two = ensembles(model, 2, settings, tell=lines.append)
    model(torch.ones(1)).backward()
    seen = []
    for _ in range(8):
        one.optimizer.step()
        step(one, 0.5)
        seen.append({name: value for name, value in numbers(one).items() if name.split("/")[1] in ("slopes", "errors", "t")})
    assert lines == [f"hdet, step 2: {MOVED.format(value=0.5)}"]
    first = {"hdet/slopes/lr": 0.25, "hdet/errors/lr": 0.05, "hdet/t/lr": 5.0}
    assert seen == [{}, first, first, *[MEASURED] * 5]  # it has measured nothing after the second cycle
    for record, at in ((records[0], seen[1]), (records[1], seen[3])):
        assert {f"hdet/{kind}/lr": record[kind]["lr"] for kind in ("slopes", "errors", "t")} == at
    assert {name for name in numbers(one, two) if "/t/" in name} == {"optimizer 0/hdet/t/lr"}
    states([two])
    assert len(lines) == 1
    [state] = states([one])
    assert state == one.state_dict() and len(lines) == 2 and states([one]) and len(lines) == 2  # once
    assert lines[1].startswith("hdet, step 8: saved with the correction 0.5 of lr, which only hdet reads. To go on without hdet, multiply")


def test_losses_anew_are_summed_and_synchronised_once() -> None:
    weight, seen = nn.Parameter(torch.tensor(2.0)), []

    @contextmanager
    def no_sync() -> Any:
        seen.append("no sync")
        yield
        seen.append("sync")

    def losses() -> torch.Tensor:
        return losses_anew(
            parts, lambda part: part and part * weight, backward=lambda loss: (seen.append(float(loss.detach())), loss.backward()), no_sync=no_sync,
        )  # fmt: skip

    parts: list[float | None] = [1.0, 2.0, 3.0]
    assert float(losses()) == 12 and float(weight.grad) == 6 and not losses().requires_grad
    assert seen[:7] == ["no sync", 2.0, "sync", "no sync", 4.0, "sync", 6.0]
    seen.clear()
    with torch.no_grad():
        assert float(losses()) == 12 and not seen
        parts = [None, 2.0]
        assert float(losses()) == 4
        parts = [None]
        assert losses() is None


def test_plain_attributes_are_put_back_and_others_left_alone() -> None:
    tensor = torch.zeros(1)
    owner = SimpleNamespace(count=1, lists={"a": [1, {"b": (2, None)}]}, tensor=tensor, mixed=[tensor])
    with pytest.raises(KeyError), attributes_kept(owner):
        owner.count, owner.mixed = 2, owner.mixed + [1]
        owner.lists["a"][1]["b"] = 3
        owner.tensor += 1
        raise KeyError
    assert (owner.count, owner.lists, float(owner.tensor), len(owner.mixed)) == (1, {"a": [1, {"b": (2, None)}]}, 1.0, 2)


def test_controllers_made_of_others_report_what_those_do() -> None:
    assert hdet.Controller().report() == "" and Shadow(Halved()).report() == "halves once (told only: nothing is moved)"
    auto = hdet.AutoLR(nn.Linear(1, 1))
    assert SequentialController(auto, Halved()).report() == f"{auto.report()}; then: halves once" and auto.report()
    with pytest.raises(ValueError, match="AutoLR searches in the first steps of a run: pass it as the first controller"):
        SequentialController(Halved(), auto)
    assert SequentialController(hdet.SoftmaxController(decay=None), Halved()).report() == "halves once"


@pytest.mark.parametrize("broken", [False, True], ids=["of all arms", "of those that diverge"])
def test_batches_without_a_loss_are_left_out_of_a_trial(broken: bool) -> None:
    """As a training_step leaves them out, which returns None for reasons of its own, or because a loss is not finite."""
    run, left_out = auto_run(0.03), []

    def closure(data: Any) -> Any:
        losses = run.losses(data)
        if run.index in (3, 40) if not broken else float(losses.detach().mean()) > 3:
            left_out.append(run.index)
            return None
        return losses

    run.closure = closure
    found = run.steps(ALL).controller.interval
    assert left_out and not found.moves
    assert {len(arm.losses) for arm in found.trial.arms} == {0, SCORES if broken else SCORES - 1}  # 0: of rates that are far too high


def test_a_trial_without_any_loss_is_refused_by_name() -> None:
    for at in (1, STEPS):
        run = auto_run(0.03)
        run.closure = lambda data, run=run, at=at: run.losses(data) if run.index < at else None
        with pytest.raises(ValueError, match="returned no losses on any rank: return them"):
            run.steps(ALL)
