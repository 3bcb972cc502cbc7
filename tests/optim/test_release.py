"""Gradient release: a step for each parameter in the backward pass."""

from __future__ import annotations

import copy
import math
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import hdet
from hdet.optim import FusedAdamW, FusedLion, FusedMuon, FusedScheduleFreeAdamW, FusedSGD
from hdet.testing.rules import BF16, assert_equal, through_a_file, values
from tests.distributed import run_ranks

from .common import BACKENDS, plans_made
from .sharded import model_of, train, weights

SMALL: dict[str, Any] = {"master_weights": "split24", "moment_dtype": "8bit"}


def model_and_batches(dtype: torch.dtype) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64), nn.Linear(64, 4))
    return model.to(dtype), [torch.randn(8, 64, dtype=dtype) for _ in range(6)]


def pair(make: Any, dtype: torch.dtype, backend: str = "auto", **options: Any) -> Any:
    """The same run twice, of which the second releases gradients."""
    found = []
    for releases in (False, True):
        model, batches = model_and_batches(dtype)
        groups = [
            {"params": list(model[0].named_parameters()), "lr": 1e-2},
            {"params": [(f"late.{name}", p) for name, p in model[2:].named_parameters()]},
        ]
        optimizer = make(groups, lr=3e-3, backend=backend, **options)
        if releases:
            optimizer.release_gradients()
        found.append((model, optimizer))
    return found, batches


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def step(model: nn.Module, optimizer: Any, batch: Tensor, scale: float = 1.0) -> None:
    (scale * loss_of(model, batch)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("make", "dtype", "options"),
    [
        (FusedAdamW, BF16, SMALL),
        (FusedAdamW, BF16, {"stochastic_rounding": True, "max_grad_norm": math.inf}),
        (FusedAdamW, torch.float32, {"ema": (0.5, 0.9)}),
        (partial(FusedSGD, momentum=0.9, weight_decay=0.1), torch.float32, {}),
        (FusedLion, BF16, {"master_weights": "fp32"}),
        (FusedScheduleFreeAdamW, torch.float32, {"warmup_steps": 2}),
        (
            partial(FusedMuon, use_muon=lambda name, p: p.ndim == 2),
            torch.float32,
            {"splits": {"2.weight": (40, 24), "3.weight": (1, 3)}},
        ),
    ],
)
def test_a_run_is_bitwise_the_usual_one(
    make: Any, dtype: torch.dtype, options: dict[str, Any], backend: str
) -> None:
    """With a scheduler, and through a checkpoint."""
    runs, batches = pair(make, dtype, backend, **options)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(of, 0.5) for _, of in runs]
    for number, batch in enumerate(batches):
        for (model, optimizer), schedule in zip(runs, schedules, strict=True):
            step(model, optimizer, batch)
            schedule.step()
        (usual, a), (released, b) = runs
        assert_equal(values(b), values(a))
        assert [float(a.state[p]["step"]) for p in usual.parameters()] == [
            float(b.state[p]["step"]) for p in released.parameters()
        ]
        if a.max_grad_norm is not None:
            torch.testing.assert_close(b.grad_norm, a.grad_norm)
            assert b.gradient_norms().keys() == a.gradient_norms().keys()
            assert not b.step_skipped
        if number == 2:
            saved = copy.deepcopy((released.state_dict(), b.state_dict()))
            step(released, b, batch)  # goes elsewhere
            released.load_state_dict(saved[0])
            b.load_state_dict(saved[1])


def test_of_gradients_one_is_there_at_a_time() -> None:
    alive: list[Any] = []
    most = 0

    def count(param: nn.Parameter) -> None:
        nonlocal most
        alive.append(weakref.ref(param.grad))
        most = max(most, sum(one() is not None for one in alive))

    watched, batches = model_and_batches(BF16)
    for param in watched.parameters():
        param.register_post_accumulate_grad_hook(count)  # before the optimizer's
    optimizer = FusedAdamW(watched.parameters(), **SMALL)
    optimizer.release_gradients()
    for batch in batches:
        step(watched, optimizer, batch)
    assert most == 1 and len(alive) == 6 * len(batches)


@pytest.mark.parametrize("released", [False, True])
def test_micro_batches(released: bool) -> None:
    """A parameter that has no gradient in the last one is stepped, too."""
    ((model, a), (other, b)), batches = pair(FusedAdamW, BF16, **SMALL)
    if not released:
        other, b = pair(FusedAdamW, BF16, **SMALL)[0][0]
    extra = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    for optimizer, one in zip((a, b), extra, strict=True):
        optimizer.add_param_group({"params": [("extra", one)]})
    for first, last in zip(batches[::2], batches[1::2], strict=True):
        (loss_of(model, first) + extra[0].sum()).backward()
        loss_of(model, last).backward()
        a.step()
        a.zero_grad()
        with b.keep_gradients():
            with b.keep_gradients():  # of a function that is called inside
                extra[1].sum().backward()
            loss_of(other, first).backward()
        loss_of(other, last).backward()
        b.step()
        b.zero_grad()
    assert_equal([*other.parameters(), extra[1]], [*model.parameters(), extra[0]])
    late, _ = model_and_batches(BF16)
    optimizer = FusedAdamW(late.parameters())
    with optimizer.keep_gradients():
        optimizer.release_gradients()
        loss_of(late, batches[0]).backward()
    assert all(p.grad is not None for p in late.parameters())


def test_clipping_is_by_the_norm_of_the_step_before() -> None:
    """And by that of each parameter: what the other optimizer is given."""
    ((model, a), (other, b)), batches = pair(FusedSGD, torch.float32)
    norm = 0.0
    limits = [math.inf, 0.5, 0.5, 0.1, math.inf, 0.5]
    for number, (batch, most) in enumerate(zip(batches, limits, strict=True)):
        b.max_grad_norm = most
        scale = min(1.0, most / (norm + 1e-6))
        loss_of(model, batch).mul(3.0**number).backward()
        gradients = [p.grad for p in model.parameters()]
        norms = [float(g.norm()) for g in gradients]
        for gradient, norm in zip(gradients, norms, strict=True):
            gradient.mul_(scale * min(1.0, most / (scale * norm + 1e-6)))
        a.step()
        a.zero_grad()
        step(other, b, batch, 3.0**number)
        norm = math.hypot(*norms)
        assert float(b.grad_norm) == pytest.approx(norm, rel=1e-4)
        names = [name for group in b.param_groups for name in group["param_names"]]
        found = {name: float(norm) for name, norm in b.gradient_norms().items()}
        assert found == pytest.approx(dict(zip(names, norms, strict=True)), rel=1e-4)
        for one, two in zip(other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keeper", ["its state_dict", "distributed checkpoints", "copies"])
def test_clipping_resumes_bitwise(keeper: str) -> None:
    """Also after a norm that is not finite, and in another process, as it were."""
    (_, (model, optimizer)), batches = pair(FusedAdamW, torch.float32, max_grad_norm=0.01)
    for batch, scale in zip(batches[:3], (1.0, 3.0, math.nan), strict=True):
        step(model, optimizer, batch, scale)
    (_, (other, resumed)), _ = pair(FusedAdamW, torch.float32, max_grad_norm=0.01)
    other.load_state_dict(model.state_dict())
    if keeper == "its state_dict":
        resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    elif keeper == "copies":  # which release gradients, too
        other, resumed = pickle.loads(pickle.dumps(copy.deepcopy((model, optimizer))))
    else:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=flat))
        set_optimizer_state_dict(other, resumed, saved, options=flat)
    for batch in batches[3:]:
        with plans_made() as made:
            step(model, optimizer, batch)
        made.assert_not_called()
        step(other, resumed, batch)
        assert_equal(list(other.parameters()), list(model.parameters()))
    assert float(optimizer.grad_norm) > 0.02, "this clips"
    optimizer.max_grad_norm = None
    step(model, optimizer, batches[0])
    step(other, resumed, batches[0])  # a norm that nobody goes by is not kept
    kept = [[key for key in of.state[p]] for of in (optimizer, resumed) for p in of.state]
    assert {"global_norm" in keys for keys in kept[: len(kept) // 2]} == {False}
    assert {"global_norm" in keys for keys in kept[len(kept) // 2 :]} == {True}


def test_a_norm_passes_through_others_and_is_forgotten_by_those_that_do_not_go_by_it() -> None:
    (_, (model, optimizer)), batches = pair(FusedAdamW, torch.float32, max_grad_norm=0.01)
    step(model, optimizer, batches[0])
    saved = optimizer.state_dict()
    for state in saved["state"].values():  # torch's optimizer of a bfloat16 model casts so
        state["global_norm"] = state["global_norm"].bfloat16()
    optimizer.load_state_dict(saved)
    norm = optimizer.state[model[0].weight]["global_norm"]
    assert norm.dtype == torch.float32 and norm > 0.02, "this clips"
    step(model, optimizer, batches[1])
    ((other, usual), _), _ = pair(FusedAdamW, torch.float32, max_grad_norm=0.01)
    usual.load_state_dict(through_a_file(optimizer.state_dict()))
    assert all("global_norm" in state for state in usual.state.values())
    other[0](batches[2]).sum().backward()
    usual.step()  # of some parameters
    assert not any("global_norm" in state for state in usual.state.values())


CHANGES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "a parameter goes": lambda groups: groups[0]["params"].pop(0),
    "to another group": lambda groups: groups[1]["params"].append(groups[0]["params"].pop(0)),
    "another order": lambda groups: groups.reverse(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_groups_that_are_written_to(change: str) -> None:
    options = {"stochastic_rounding": True}  # by the parameters' numbers
    ((model, a), (other, b)), batches = pair(FusedAdamW, BF16, **options)
    for number, batch in enumerate(batches[:4]):
        for one, optimizer in ((model, a), (other, b)):
            if number == 2:
                for group in optimizer.param_groups:
                    del group["param_names"]
                CHANGES[change](optimizer.param_groups)
            step(one, optimizer, batch)
            one.zero_grad()
    assert_equal(list(other.parameters()), list(model.parameters()))


def test_what_is_written_to_a_parameter_that_has_no_plan_is_its_master() -> None:
    (_, (model, optimizer)), batches = pair(FusedAdamW, BF16, master_weights="fp32")
    step(model, optimizer, batches[0])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model[0](batches[1]).float().sum().backward()  # plans for model[0] alone
    optimizer.step()
    with torch.no_grad():
        model[3].weight.fill_(3.0)
    (master,) = optimizer.masters([model[3].weight])
    assert (master == 3).all()


def test_a_norm_that_is_not_finite_skips_its_parameter_and_is_forgotten() -> None:
    (_, (model, optimizer)), batches = pair(FusedSGD, torch.float32, max_grad_norm=0.5)
    step(model, optimizer, batches[0])
    before = [p.detach().clone() for p in model.parameters()]
    hook = model[0].weight.register_hook(lambda g: g * math.inf)
    for skips, batch in ((True, batches[1]), (False, batches[2])):
        step(model, optimizer, batch)
        hook.remove()
        pairs = zip(before, model.parameters(), strict=True)
        assert [not torch.equal(*each) for each in pairs] == [not skips, *[True] * 5]
        assert optimizer.step_skipped == float(skips)


def test_what_is_refused() -> None:
    (_, (model, optimizer)), batches = pair(FusedAdamW, torch.float32)
    with pytest.raises(RuntimeError, match="without loss.backward"):
        optimizer.step()
    loss_of(model, batches[0]).backward()
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: loss_of(model, batches[0]))
    with pytest.raises(RuntimeError, match="keep_gradients"):
        loss_of(model, batches[1]).backward()
    optimizer.zero_grad()
    optimizer.step()
    with pytest.raises(ValueError, match="releases gradients"):
        hdet.Ensemble(optimizer, total_steps=100)
    with pytest.raises(ValueError, match="releases gradients"):
        hdet.find_rate(model, optimizer, loss_of, batches, total_steps=100)
    wrapper: Any = torch.optim.SGD(model.parameters())
    wrapper.optimizer = optimizer
    with pytest.raises(ValueError, match="releases gradients"):
        hdet.find_rate(model, wrapper, loss_of, batches, total_steps=100)
    loss_of(model, batches[1]).backward()
    optimizer.param_groups[1]["lr"] *= 0.5  # as loops do that have their own schedule
    with pytest.raises(RuntimeError, match="was written after loss.backward"):
        optimizer.step()
    optimizer.param_groups[1]["lr"] *= 2
    optimizer.step()
    # as DistributedDataParallel does in one process
    handle = model[0].weight.register_post_accumulate_grad_hook(
        lambda p: setattr(p, "grad", torch.ones_like(p))
    )
    loss_of(model, batches[1]).backward()
    with pytest.raises(RuntimeError, match="DistributedDataParallel puts them back"):
        optimizer.step()
    handle.remove()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_gradients = True
    with pytest.raises(ValueError, match="zero_gradients"):
        loss_of(model, batches[1]).backward()
    optimizer.zero_gradients = False
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batches[1])).backward()
    with pytest.raises(RuntimeError, match="a GradScaler scales"):
        scaler.step(optimizer)
    driven = FusedAdamW(model.parameters())
    ensemble = hdet.Ensemble(driven, total_steps=100)
    with pytest.raises(ValueError, match="close"):
        driven.release_gradients()
    ensemble.close()
    muon = FusedMuon([nn.Parameter(torch.ones(4, 4))], max_grad_norm=1.0)
    muon.release_gradients()
    with pytest.raises(ValueError, match="max_grad_norm=None"):
        muon.param_groups[0]["params"][0].sum().backward()
    other, _ = model_and_batches(torch.float32)
    free = FusedScheduleFreeAdamW(other.parameters())
    free.release_gradients()
    free.eval()
    with pytest.raises(RuntimeError, match="train"):
        loss_of(other, batches[1]).backward()


def test_it_dies_with_its_optimizer() -> None:
    (_, (model, optimizer)), batches = pair(FusedAdamW, torch.float32)
    step(model, optimizer, batches[0])
    gone = weakref.ref(optimizer)
    del optimizer, _
    assert gone() is None
    loss_of(model, batches[0]).backward()
    assert all(p.grad is not None for p in model.parameters())


# -- several processes -----------------------------------------------------------------------------


def sharded_gradients_are_released(rank: int, world_size: int) -> None:
    runs = []
    for releases in (False, True):
        model = model_of("fsdp", BF16)
        optimizer = FusedAdamW(model.parameters(), lr=1e-2, **SMALL)
        if releases:
            optimizer.release_gradients()
        train(model, optimizer, "fsdp", range(2))
        if releases:  # through a checkpoint
            saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
            for state in saved["state"].values():  # until now a run of one process, with clipping
                state["global_norm"] = torch.tensor(3.0)
            other = model_of("fsdp", BF16)
            optimizer = FusedAdamW(other.parameters(), lr=1e-2, **SMALL)
            optimizer.release_gradients()
            other.load_state_dict(model.state_dict())
            set_optimizer_state_dict(other, optimizer, saved)
            model = other
        train(model, optimizer, "fsdp", range(2, 4))
        runs.append(weights(model, optimizer))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    plain = FusedAdamW(model_of("plain", BF16).parameters())
    plain.release_gradients()
    with pytest.raises(RuntimeError, match="fully_shard"):
        plain.param_groups[0]["params"][0].sum().backward()
    model = model_of("fsdp", BF16)
    clipped = FusedAdamW(model.parameters(), max_grad_norm=1.0)
    clipped.release_gradients()
    with pytest.raises(ValueError, match="max_grad_norm=None"):
        train(model, clipped, "fsdp", range(1))


def test_sharded_gradients_are_released() -> None:
    run_ranks(sharded_gradients_are_released, 2)
