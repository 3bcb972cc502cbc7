"""Ranks that are not in the same run: told before the first step, or at the end of the cycle in which they part. On every rank alike."""

from __future__ import annotations

from collections.abc import Callable
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
from .helpers import told

Made = tuple[torch.optim.Optimizer, Any, dict[str, Any]]


def plain(
    *,
    kind: Any = torch.optim.AdamW,
    lr: float = 1e-2,
    total_steps: int | None = None,
    options: Any = None,
    **settings: Any,
) -> Made:
    """``options`` are the optimizer's, ``settings`` the Ensemble's."""
    return (
        kind(model().parameters(), lr=lr, **(options or {})),
        None,
        {"total_steps": total_steps, **settings},
    )


def scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> Made:
    optimizer = torch.optim.SGD(model().parameters(), lr=1e-2, momentum=0.9)
    return optimizer, make(optimizer), {}


def two_vectors(values: tuple[float, float], *, swapped: bool) -> Made:
    vectors = [nn.Parameter(torch.full((3,), value)) for value in values]
    return torch.optim.SGD(vectors[::-1] if swapped else vectors, lr=0.1), None, {}


def two_layers(rank: int, *, by: str, swapped: bool = True) -> Made:
    """Other initial values on each rank, and the two layers in another order on one."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layers = list(net)[:: -1 if rank == 1 and swapped else 1]
    if by == "param_names":
        names = dict(net.named_parameters())
        listed = [
            (name, names[name])
            for layer in layers
            for name in names
            if names[name] in set(layer.parameters())
        ]
        return torch.optim.SGD(listed, lr=0.1), None, {}
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    if by == "buffers":
        return optimizer, None, {"buffers": net}
    return optimizer, None, {"controller": hdet.AutoLR(net), "total_steps": 100}


class Warm:
    """A schedule that holds what no other process has."""

    def __init__(self, rank: int) -> None:
        self.rank, self.shape = rank, 0.5

    def __call__(self, step: int) -> float:
        return min(1.0, self.shape + step / 10)


def closures(rank: int) -> Made:
    optimizer = torch.optim.SGD([{"params": [p]} for p in model().parameters()], lr=0.1)
    factors = [Warm(rank), lambda step: 0.5 + step / 10, Warm(rank + 1), lambda step: 0.5]
    return optimizer, torchs.LambdaLR(optimizer, factors), {}


SCHEDULER, BY_GROUP, OPTIMIZER = (
    "scheduler's class and settings",
    "scheduler's settings by parameter group",
    "optimizer's class and settings",
)
ORDER, NAMES = "order of the parameters", "names of the parameters"
CASES: dict[str, tuple[str | None, Callable[[int, bool], Made]]] = {
    "T_max": (
        SCHEDULER,
        lambda r, odd: scheduled(lambda o: torchs.CosineAnnealingLR(o, 30 + 10 * odd)),
    ),
    "gamma": (
        SCHEDULER,
        lambda r, odd: scheduled(lambda o: torchs.ExponentialLR(o, 0.9 + 0.01 * odd)),
    ),
    "class of the scheduler": (
        SCHEDULER,
        lambda r, odd: scheduled(
            lambda o: torchs.StepLR(o, 10) if odd else torchs.ExponentialLR(o, 0.9)
        ),
    ),
    "a scheduler on one rank only": (
        SCHEDULER,
        lambda r, odd: scheduled(lambda o: None if odd else torchs.StepLR(o, 10)),
    ),
    "pct_start": (
        BY_GROUP,
        lambda r, odd: scheduled(
            lambda o: torchs.OneCycleLR(o, 0.1, 40, pct_start=0.3 + 0.1 * odd)
        ),
    ),
    "inside of a SequentialLR": (
        BY_GROUP,
        lambda r, odd: scheduled(
            lambda o: torchs.SequentialLR(
                o, [torchs.ConstantLR(o, total_iters=5), torchs.StepLR(o, 10 + odd)], [5]
            )
        ),
    ),
    "betas": (OPTIMIZER, lambda r, odd: plain(options={"betas": (0.9, 0.99 + 0.001 * odd)})),
    "decay": (OPTIMIZER, lambda r, odd: plain(options={"weight_decay": 0.1 * odd})),
    "eps": (OPTIMIZER, lambda r, odd: plain(options={"eps": 1e-8 * (1 + odd)})),
    "momentum": (
        OPTIMIZER,
        lambda r, odd: plain(kind=torch.optim.SGD, options={"momentum": 0.9 * odd}),
    ),
    "class": (
        OPTIMIZER,
        lambda r, odd: plain(
            kind=torch.optim.Adam if odd else torch.optim.AdamW, options={"weight_decay": 0.0}
        ),
    ),
    "clipping": (
        OPTIMIZER,
        lambda r, odd: plain(kind=hdet.FusedAdamW, options={"max_grad_norm": 1.0 + odd}),
    ),
    "order": (ORDER, lambda r, odd: two_vectors((0.0, 10.0), swapped=odd)),
    "order, by param_names": (NAMES, lambda r, odd: two_layers(r, by="param_names")),
    "order, by the buffers' module": (NAMES, lambda r, odd: two_layers(r, by="buffers")),
    "order, by the controller's model": (NAMES, lambda r, odd: two_layers(r, by="controller")),
    "total_steps": ("total_steps", lambda r, odd: plain(total_steps=40 + odd)),
    "warmup_steps": ("warmup_steps", lambda r, odd: plain(total_steps=40, warmup_steps=2 * odd)),
    "controller": (
        "controller",
        lambda r, odd: plain(
            total_steps=40, controller=hdet.SoftmaxController(1.0 + odd, decay=None)
        ),
    ),
    "weights": ("weights", lambda r, odd: plain(weights="softmax" if odd else "mean")),
    "bucket_bytes": ("bucket_bytes", lambda r, odd: plain(bucket_bytes=4096 * (1 + odd))),
    "scheduled rates": ("scheduled rates", lambda r, odd: plain(lr=1e-3 * (1 + odd))),
    "seed": ("seed", lambda r, odd: plain(seed=int(odd))),
    "sync_interval": ("sync_interval", lambda r, odd: plain(every=5 + odd)),
    "shapes": (
        "shapes",
        lambda r, odd: (torch.optim.SGD([nn.Parameter(torch.zeros(3 + odd))], lr=0.1), None, {}),
    ),
    "version": ("version of hdet", lambda r, odd: plain()),
    "knobs": ("knobs", lambda r, odd: plain(knobs=[hdet.LearningRate(0.1 + 0.1 * odd)])),
    # what may differ
    "closures": (None, lambda r, odd: closures(r)),
    "initial values": (None, lambda r, odd: two_layers(r, by="buffers", swapped=False)),
    "equal vectors in another order": (None, lambda r, odd: two_vectors((1.0, 1.0), swapped=odd)),
    "foreach": (None, lambda r, odd: plain(options={"foreach": odd})),
}


def trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def steps(
    optimizer: torch.optim.Optimizer, ensemble: hdet.Ensemble, count: int, loss: float | None = 1.0
) -> list[torch.Tensor]:
    """The weights after the last step of the optimizer, in which something may then be averaged."""
    for _ in range(count):
        for p in trained(optimizer):
            p.grad = torch.ones_like(p)
        optimizer.step()
        stepped = [p.detach().clone() for p in trained(optimizer)]
        ensemble.step(loss, closure=lambda: torch.ones(4))
    return stepped


def start(rank: int, world: int, case: str) -> str:
    differ, make = CASES[case]
    optimizer, scheduler, settings = make(rank, rank == 1)
    ensemble = hdet.Ensemble(
        optimizer, scheduler, **policies(**{"every": 5 if differ else 2, **settings})
    )
    stepped: list[torch.Tensor] = []
    optimizer.register_step_post_hook(
        lambda *_: stepped.extend(p.detach().clone() for p in trained(optimizer))
    )
    try:
        with mock.patch.object(
            same_run, "version", f"0.{rank % 2}" if case == "version" else same_run.version
        ):
            steps(optimizer, ensemble, 1 if differ else 4)
    except hdet.ReplicaDisagreement as error:
        assert all(map(torch.equal, stepped, trained(optimizer))), "nothing was averaged"
        return str(error)
    return "no error"


def start_all(rank: int, world: int) -> dict[str, str]:
    """In one process group: after each error it is still of use, because nobody was left waiting."""
    return {case: start(rank, world, case) for case in CASES}


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return run_ranks(start_all, 3)


@pytest.mark.parametrize("case", [case for case, (differ, _) in CASES.items() if differ])
def test_what_differs_is_named_before_anything_is_averaged(
    said: list[dict[str, str]], case: str
) -> None:
    messages, differ = [messages[case] for messages in said], CASES[case][0]
    assert (
        len(set(messages)) == 1
        and differ is not None
        and differ in messages[0]
        and "differ" in messages[0]
    )
    assert "ranks 0,2" in messages[0] or "ranks 0 and 2" in messages[0] or "0, 2" in messages[0], (
        messages[0]
    )
    assert "\n" not in messages[0] and len(messages[0]) < 600


@pytest.mark.parametrize("case", [case for case, (differ, _) in CASES.items() if not differ])
def test_what_may_differ_is_let_pass(said: list[dict[str, str]], case: str) -> None:
    assert [messages[case] for messages in said] == ["no error"] * 3


def stages(rank: int, world: int, broken: bool) -> str:
    """Members 0 and 1 of two replicas hold different parts, with different optimizers and numbers of groups."""
    stage = rank // 2
    torch.manual_seed(stage)
    replicas = hdet.Replicas.from_layout(pp=2)
    groups = [{"params": list(nn.Linear(3, 3).parameters())} for _ in range(1 + stage)]
    momentum = 0.5 if broken and rank == 3 else 0.9
    optimizer = (
        torch.optim.SGD(groups, lr=0.1, momentum=momentum)
        if stage
        else torch.optim.AdamW(groups, lr=0.1)
    )
    ensemble = hdet.Ensemble(
        optimizer, torchs.StepLR(optimizer, 3), replicas=replicas, sync=hdet.Sync(2)
    )
    return told(lambda: steps(optimizer, ensemble, 4, 1.0 if stage else None))


def test_stages_of_a_pipeline_have_settings_of_their_own() -> None:
    assert run_ranks(stages, 4, False) == ["no error"] * 4
    messages = run_ranks(stages, 4, True)
    assert (
        len(set(messages)) == 1
        and "optimizer's class and settings" in messages[0]
        and "rank 3" in messages[0]
    )


# -- in the course of a run ----------------------------------------------------------------------------------------------------


def drifting(rank: int, world: int, how: str) -> Any:
    """(steps done, message) of the first error."""
    optimizer = torch.optim.SGD(model().parameters(), lr=1e-2)
    # Two lambdas look alike from outside, and so does a scheduler that the user steps.
    drifts = rank == 1
    scheduler = (
        torchs.LambdaLR(optimizer, lambda step: 1.0 if step < 7 or not drifts else 0.5)
        if how == "lambda"
        else None
    )
    own = (
        torchs.ExponentialLR(optimizer, 0.99 if drifts else 0.98)
        if how == "the user's own"
        else None
    )
    ensemble = hdet.Ensemble(optimizer, scheduler, sync=hdet.Sync(5 if how != "converge" else 50))
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


@pytest.mark.parametrize(
    ("how", "at"), [("lambda", 10), ("the user's own", 5), ("by hand", 10), ("converge", 10)]
)
def test_values_that_part_are_noticed_at_the_end_of_the_cycle(how: str, at: int) -> None:
    found = run_ranks(drifting, 3, how)
    assert len(set(found)) == 1 and found[0][0] == at, found
    assert "the values of lr differ between replicas" in found[0][1]


def converge_first(rank: int, world: int, outputs: int) -> Any:
    net = nn.Linear(3, 2 + rank * outputs, bias=False)
    with torch.no_grad():
        net.weight.fill_(rank)
    ensemble = hdet.Ensemble(torch.optim.SGD(net.parameters(), lr=0.1))
    return told(ensemble.converge), net.weight.unique().tolist(), ensemble.in_sync


def test_a_converge_before_the_first_step_compares_too() -> None:
    assert all("shapes and dtypes" in message for message, _, _ in run_ranks(converge_first, 2, 1))
    assert run_ranks(converge_first, 2, 0) == [("no error", [0.5], True)] * 2
