"""Ranks that are not in the same run are told so before the first step, or where they part."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

import hdet
from hdet.run import same_run
from tests.harness import model, policies

from ..distributed import run_ranks
from .helpers import filled, same, told

Made = tuple[torch.optim.Optimizer, Any, dict[str, Any]]
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


def plain(*, kind: Any = ADAMW, lr: float = 1e-2, options: Any = None, **settings: Any) -> Made:
    """``options`` are the optimizer's, ``settings`` the Ensemble's."""
    return kind(model().parameters(), lr=lr, **(options or {})), None, settings


def scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> Made:
    optimizer = SGD(model().parameters(), lr=1e-2, momentum=0.9)
    return optimizer, make(optimizer), {}


def two_vectors(values: tuple[float, float], swapped: bool) -> Made:
    vectors = [nn.Parameter(torch.full((3,), value)) for value in values]
    return SGD(vectors[::-1] if swapped else vectors, lr=0.1), None, {}


def two_layers(rank: int, by: str, swapped: bool = True) -> Made:
    """Other initial values on each rank, and the two layers in another order on one."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    listed = list(net.named_parameters())
    if rank == 1 and swapped:
        listed = listed[2:] + listed[:2]
    optimizer = SGD(listed if by == "names" else [p for _, p in listed], lr=0.1)
    if by == "controller":
        return optimizer, None, {"search": hdet.AutoLR(net), "total_steps": 100}
    return optimizer, None, {"buffers": net} if by == "buffers" else {}


class Warm:
    """A schedule that holds what no other process has."""

    def __init__(self, rank: int) -> None:
        self.rank, self.shape = rank, 0.5

    def __call__(self, step: int) -> float:
        return min(1.0, self.shape + step / 10)


def closures(rank: int) -> Made:
    optimizer = SGD([{"params": [p]} for p in model().parameters()], lr=0.1)
    factors = [Warm(rank), lambda step: 0.5 + step / 10, Warm(rank + 1), lambda step: 0.5]
    return optimizer, torchs.LambdaLR(optimizer, factors), {}


def in_a_row(optimizer: Any, last: int) -> Any:
    both = [torchs.ConstantLR(optimizer, total_iters=5), torchs.StepLR(optimizer, last)]
    return torchs.SequentialLR(optimizer, both, [5])


def of_size(size: int) -> Made:
    return SGD([nn.Parameter(torch.zeros(size))], lr=0.1), None, {}


def softmax(scale: float) -> Made:
    return plain(total_steps=40, controller=hdet.SoftmaxController(scale, decay=None))


Cases = dict[str, tuple[str, Callable[[int, bool], Made]]]


def by_scheduler(differ: str, make: Callable[[Any, bool], Any]) -> Any:
    return differ, lambda _, odd: scheduled(lambda optimizer: make(optimizer, odd))


def by_optimizer(differ: str, kind: Callable[[bool], Any], options: Callable[[bool], Any]) -> Any:
    return differ, lambda _, odd: plain(kind=kind(odd), options=options(odd))


def by_setting(differ: str, value: Callable[[bool], Any], name: str = "", **more: Any) -> Any:
    return differ, lambda _, odd: plain(**{name or differ: value(odd)}, **more)


def by_search(differ: str, given: Callable[[bool], dict[str, Any] | None]) -> Any:
    def searched(_: int, odd: bool) -> Made:
        net, own = model(), given(odd)
        search = None if own is None else hdet.AutoLR(net, **own)
        return ADAMW(net.parameters()), None, {"search": search, "total_steps": 1500}

    return differ, searched


OF_SEARCH: dict[str, Any] = {
    "budget": 0.5, "before_step": print, "scaler": torch.amp.GradScaler("cpu"), "place": "host",
    "val_batches": (print, [1]), "spread_arms": False, "report_only": True,
}  # fmt: skip
NAME = "parameters[0].name"
CASES: Cases = {
    "T_max": by_scheduler("scheduler.T_max", lambda o, odd: torchs.CosineAnnealingLR(o, 30 + odd)),
    "a scheduler on one rank only": by_scheduler(
        "scheduler.class", lambda o, odd: None if odd else torchs.StepLR(o, 10)
    ),
    "inside of a SequentialLR": by_scheduler(
        "scheduler of the parameter groups._schedulers[1].step_size",
        lambda o, odd: in_a_row(o, 10 + odd),
    ),
    "betas": by_optimizer(
        "optimizer.groups[0].betas[1]", lambda _: ADAMW, lambda odd: {"betas": (0.9, 0.9 * odd)}
    ),
    "class": by_optimizer(
        "optimizer.class", lambda odd: torch.optim.Adam if odd else ADAMW,
        lambda _: {"weight_decay": 0},
    ),
    "order": ("the order of the parameters", lambda _, odd: two_vectors((0.0, 10.0), odd)),
    "order, by param_names": (NAME, lambda rank, _: two_layers(rank, "names")),
    "order, by the buffers' module": (NAME, lambda rank, _: two_layers(rank, "buffers")),
    "order, by the controller's model": (NAME, lambda rank, _: two_layers(rank, "controller")),
    "total_steps": by_setting("total_steps", lambda odd: 40 + odd),
    "warmup_steps": by_setting("warmup_steps", lambda odd: 2 * odd, total_steps=40),
    "controller": ("controller.temperature", lambda _, odd: softmax(1.0 + odd)),
    "a search on one rank only": by_search("search", lambda odd: {} if odd else None),
    **{name: by_search(f"search.{name}", lambda odd, given={name: value}: given if odd else {})
       for name, value in OF_SEARCH.items()},
    "scheduled": by_setting("scheduled values.lr[0]", lambda odd: 1e-3 * (1 + odd), "lr"),
    "seed": by_setting("seed", int),
    "T": by_setting("sync.every", lambda odd: 5 + odd, "every"),
    "shapes": ("parameters[0].shape[0]", lambda _, odd: of_size(3 + odd)),
    "version": ("the version of hdet", lambda *_: plain()),
    "knobs": by_setting(
        "knobs.lr.grid.spread", lambda odd: [hdet.LearningRate(0.1 + 0.1 * odd)], "knobs"
    ),
}  # fmt: skip
ALIKE: Cases = {
    "closures": ("", lambda rank, _: closures(rank)),
    "initial values": ("", lambda rank, _: two_layers(rank, "buffers", swapped=False)),
    "equal vectors in another order": ("", lambda _, odd: two_vectors((1.0, 1.0), odd)),
    "foreach": ("", lambda _, odd: plain(options={"foreach": odd})),
    "averages kept by one rank": by_search(
        "", lambda odd: {"budget": 0, "on_restart": print if odd else None}
    ),
}


def weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def steps(optimizer: Any, ensemble: hdet.Ensemble, count: int, loss: float | None = 1.0) -> None:
    for _ in range(count):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
        ensemble.step(loss, closure=lambda: torch.ones(4))


def start(rank: int, case: str) -> str:
    differ, make = (CASES | ALIKE)[case]
    optimizer, scheduler, settings = make(rank, rank == 1)
    settings = policies(**{"every": 5 if differ else 2, **settings})
    ensemble = hdet.Ensemble(optimizer, scheduler, **settings)
    stepped: list[torch.Tensor] = []
    optimizer.register_step_post_hook(lambda *_: stepped.extend(weights(optimizer)))
    version = f"0.{rank % 2}" if case == "version" else same_run.version
    try:
        with mock.patch.object(same_run, "version", version):
            steps(optimizer, ensemble, 1 if differ else 4)
    except hdet.ReplicaDisagreement as error:
        assert same(stepped, weights(optimizer)), "nothing was averaged"
        return str(error)
    return "no error"


def start_all(rank: int, world: int) -> dict[str, str]:
    """In one process group: after each error it is still of use, because nobody waits."""
    return {case: start(rank, case) for case in CASES | ALIKE}


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return run_ranks(start_all, 3)


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_named_before_anything_is_averaged(
    said: list[dict[str, str]], case: str
) -> None:
    (message,) = {messages[case] for messages in said}
    assert f"{CASES[case][0]} differs between ranks: ranks 0, 2: " in message
    assert "; rank 1: " in message and "\n" not in message and len(message) < 600


def test_every_argument_of_a_search_is_compared() -> None:
    may_differ = {"model", "on_restart"}
    assert OF_SEARCH.keys() == inspect.signature(hdet.AutoLR).parameters.keys() - may_differ


@pytest.mark.parametrize("case", ALIKE)
def test_what_may_differ_is_let_pass(said: list[dict[str, str]], case: str) -> None:
    assert [messages[case] for messages in said] == ["no error"] * 3


def stages(rank: int, world: int, broken: bool) -> str:
    """Members 0 and 1 of two replicas hold different parts, with different optimizers."""
    stage = rank // 2
    torch.manual_seed(stage)
    replicas = hdet.Replicas.from_layout(pp=2)
    groups = [{"params": list(nn.Linear(3, 3).parameters())} for _ in range(1 + stage)]
    make = partial(SGD, momentum=0.5 if broken and rank == 3 else 0.9) if stage else ADAMW
    optimizer = make(groups, lr=0.1)
    scheduler = torchs.StepLR(optimizer, 3)
    ensemble = hdet.Ensemble(optimizer, scheduler, replicas=replicas, sync=hdet.Sync(2))
    return told(lambda: steps(optimizer, ensemble, 4, 1.0 if stage else None))


def test_stages_of_a_pipeline_have_settings_of_their_own() -> None:
    assert run_ranks(stages, 4, False) == ["no error"] * 4
    (message,) = set(run_ranks(stages, 4, True))
    assert "optimizer.groups[0].momentum differs between ranks: rank 2: 0.9; rank 3: 0.5" in message


def drifting(rank: int, world: int, how: str) -> Any:
    """(steps done, message) of the first error."""
    optimizer, drifts = SGD(model().parameters(), lr=1e-2), rank == 1
    # Two lambdas look alike from outside, and so does a scheduler that the user steps.
    scheduler, own = None, None
    if how == "lambda":
        scheduler = torchs.LambdaLR(optimizer, lambda step: 0.5 if drifts and step >= 7 else 1.0)
    if how == "the user's own":
        own = torchs.ExponentialLR(optimizer, 0.99 if drifts else 0.98)
    ensemble = hdet.Ensemble(optimizer, scheduler, sync=hdet.Sync(50 if how == "converge" else 5))
    for step in range(1, 21):
        if how in ("by hand", "converge") and drifts and step == 7:
            ensemble.set_value("lr", 0.5 * ensemble.value("lr"))
        message = told(lambda: steps(optimizer, ensemble, 1))
        if how == "converge" and step == 10:
            message = told(ensemble.converge)
        if message != "no error":
            return step, message
        if own is not None:
            with ensemble.rescheduling():
                own.step()
    return message


NOTICED = {"lambda": 10, "the user's own": 5, "by hand": 10, "converge": 10}


def drifting_all(rank: int, world: int) -> list[Any]:
    return [drifting(rank, world, how) for how in NOTICED]


def test_values_that_part_are_noticed_at_the_end_of_the_cycle() -> None:
    first, *others = run_ranks(drifting_all, 3)
    assert others == [first] * 2 and [step for step, _ in first] == [*NOTICED.values()]
    assert all("the values of lr differ between replicas" in message for _, message in first)


def converge_first(rank: int, world: int, outputs: int) -> Any:
    net = nn.Linear(3, 2 + rank * outputs, bias=False)
    filled(net, rank)
    ensemble = hdet.Ensemble(SGD(net.parameters(), lr=0.1))
    return told(ensemble.converge), net.weight.unique().tolist(), ensemble.in_sync


def test_a_converge_before_the_first_step_compares_too() -> None:
    for message, _, _ in run_ranks(converge_first, 2, 1):
        assert "parameters[0].shape" in message
    assert run_ranks(converge_first, 2, 0) == [("no error", [0.5], True)] * 2
