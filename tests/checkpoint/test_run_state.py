"""What is stored of a run, once or for each rank, and other numbers of replicas."""

from __future__ import annotations

import json
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hdet import checkpoint
from hdet.checkpoint import CheckpointError

from .. import harness
from ..adversary.common import bits
from ..distributed import run_ranks
from . import helpers
from .helpers import Run, alone, ddp, mlp


class Odd(torch.optim.Optimizer):
    """Keeps nested state, a count that is no tensor, and reads -0 + 0."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group, p in ((g, p) for g in self.param_groups for p in g["params"]):
            if p.grad is not None:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                rows = p.grad.flatten(1).abs().sum(1) if p.dim() > 1 else p.grad.abs()
                before = state.get("factors", {}).get("rows", 0)
                state["factors"] = {"rows": before + rows if p.dim() > 1 else rows}
                state["list"] = [p.grad.clone()]
                p.add_(p.grad, alpha=-group["lr"])


def test_an_optimizer_with_state_of_any_shape(tmp_path: Path) -> None:
    """Also for parameters that have not had a gradient yet."""
    run = alone(Odd)
    with torch.no_grad():
        run.net[0].weight[0, 0] = -0.0
    before = bits(run.net[0].weight)
    checkpoint.save(tmp_path, run.state, 0)
    assert run.optimizer.calls == 0 and not run.optimizer.state
    assert bits(run.net[0].weight) == before
    run.net[2].bias.requires_grad_(False)
    run.steps(3).net[2].bias.requires_grad_(True)
    checkpoint.save(tmp_path, run.state, 3)
    other = alone(Odd)
    checkpoint.load(tmp_path, other.state)
    assert other.facts() == run.facts() and len(other.optimizer.state) == 3
    assert other.resumed().steps(2).facts() == run.steps(2).facts()


def grown(rank: int, world: int, root: str, mode: Callable[..., Run], loads: bool) -> Any:
    run = mode(rank, world)
    if loads:
        checkpoint.load(root, run.state)
        before = run.facts()
        run.index = int(run.extra["index"])
        run.steps(3)
        run.ensemble.converge()
    else:
        checkpoint.save(root, run.steps(10).state, 10)
        before = run.facts()
    names = (
        "cycle", "step", "corrections", "bases", "controller_state", "scheduled", "scheduler",
    )  # fmt: skip
    kept = {name: before["ensemble"][name] for name in names}
    return before["model"], before["optimizer"], before["rates"], kept, run.facts()["model"]


@pytest.mark.parametrize(("few", "many"), [(2, 4), (4, 3)])
def test_another_number_of_replicas_goes_on_with_values_corrections_and_velocities(
    tmp_path: Path, few: int, many: int
) -> None:
    saved = run_ranks(grown, few, str(tmp_path), ddp, False)
    loaded = run_ranks(grown, many, str(tmp_path), ddp, True)
    for result in [*saved, *loaded]:
        assert result[:4] == saved[0][:4]
    assert all(result[4] == loaded[0][4] for result in loaded)
    assert saved[0][3]["corrections"] != [1.0]


def test_private_moments_with_another_number_of_replicas(tmp_path: Path) -> None:
    """Replica r takes those of r mod the saved number."""
    saved = run_ranks(grown, 2, str(tmp_path), helpers.local, False)
    assert saved[0][1] != saved[1][1] and saved[0][0] == saved[1][0]
    loaded = run_ranks(grown, 3, str(tmp_path), helpers.local, True)
    assert [rank[1] for rank in loaded] == [saved[0][1], saved[1][1], saved[0][1]]
    shared = run_ranks(grown, 2, str(tmp_path), ddp, True)  # shared gradients need equal ones
    assert [rank[1] for rank in shared] == [saved[0][1]] * 2


def own_counters(rank: int, world: int, root: str, loads: bool) -> list[float]:
    run = helpers.local(rank, world, moments="average")
    if loads:
        checkpoint.load(root, run.state)
    else:
        run.steps(5)
        for state in run.optimizer.state.values():
            state["step"] += 10 * rank  # as where a GradScaler has skipped steps of one replica
        checkpoint.save(root, run.state, 5)
    return [float(state["step"]) for state in run.optimizer.state.values()]


def holders(folder: Path) -> dict[str, list[list[int]]]:
    """Ranks that hold each of the different contents of a tensor."""
    index = json.loads((folder / "state.json").read_text())["tensors"]
    return {name: [chunk["holders"] for chunk in chunks] for name, chunks in index.items()}


def test_averaged_moments_are_stored_once_and_counters_for_each_replica(tmp_path: Path) -> None:
    counters = [[5.0] * 4, [15.0] * 4]
    assert run_ranks(own_counters, 2, str(tmp_path), False) == counters
    assert run_ranks(own_counters, 2, str(tmp_path), True) == counters
    found = holders(tmp_path / "step-00000005")
    assert found["optimizer.state.0.weight.exp_avg"] == [[0, 1]]
    assert found["optimizer.state.0.weight.step"] == [[0], [1]]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_parameter("$frozen", nn.Parameter(torch.randn(3), requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def own_buffers(rank: int, world: int, root: str, averaged: bool, loads: bool) -> Any:
    net = Normed()
    wrapped = DistributedDataParallel(torch.compile(net, backend="eager"), broadcast_buffers=False)
    run = Run(wrapped, None, helpers.torch_adamw, rank, buffers=net if averaged else ())
    if loads:
        run.resume(root)
    else:
        checkpoint.save(root, run.steps(5).state, 5)
    return run.facts()["model"]


@pytest.mark.parametrize("averaged", [True, False])
def test_buffers_that_are_not_averaged_are_each_ranks_own(tmp_path: Path, averaged: bool) -> None:
    saved = run_ranks(own_buffers, 2, str(tmp_path), averaged, False)
    assert run_ranks(own_buffers, 2, str(tmp_path), averaged, True) == saved
    assert (saved[0] != saved[1]) is not averaged
    found = holders(tmp_path / "step-00000005")
    found = {name: ranks for name, ranks in found.items() if name.startswith("model.")}
    assert found.pop("model.norm.num_batches_tracked")
    statistics, once = [[0, 1]] if averaged else [[0], [1]], [[0, 1]]
    assert found == {
        **{f"model.{n}": once for n in ("embed.weight", "norm.weight", "norm.bias", "$frozen")},
        **{f"model.norm.running_{n}": statistics for n in ("mean", "var")},
    }  # a tied one once


class Loader:
    """As a stateful data loader."""

    at, asked = 0, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def things() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    return {"loader": Loader(), "generator": torch.Generator(), "scaler": scaler, "epoch": 0}


def state_with(extra: Any) -> checkpoint.RunState:
    run = alone()
    return checkpoint.RunState(run.net, run.ensemble, extra)


def test_extra_has_objects_with_a_state_generators_and_plain_values(tmp_path: Path) -> None:
    extra, other = things(), things()
    state, objects, draw = state_with(extra), dict(other), partial(torch.rand, 3)
    assert extra["loader"].asked == 0, "a data loader may start its workers for it"
    extra["loader"].at, extra["epoch"] = 17, 3
    extra["scaler"].load_state_dict({**extra["scaler"].state_dict(), "scale": 32.0})
    draw(generator=extra["generator"].manual_seed(5))
    checkpoint.save(tmp_path, state, 1)

    assert checkpoint.load(tmp_path, state_with(None)) == 1  # what nobody asks for is left
    assert checkpoint.load(tmp_path, state_with(other)) == 1
    assert other["loader"].at == 17 and other["epoch"] == 3 and other["scaler"].get_scale() == 32.0
    assert all(other[key] is objects[key] for key in ("loader", "generator", "scaler"))
    theirs, ours = (draw(generator=values["generator"]) for values in (other, extra))
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("extra", [{"sampler": Loader()}, {"tokens": 0}], ids=list)
@pytest.mark.parametrize("saved", [None, {"epoch": 3}])
def test_an_extra_that_was_not_saved_is_refused_by_its_key(tmp_path: Path, saved, extra) -> None:
    checkpoint.save(tmp_path, state_with(saved), 1)
    fresh, given = alone().steps(1), dict(extra)
    before, (key,) = fresh.facts(), extra
    with pytest.raises(CheckpointError, match=rf"it has no extra\['{key}'\]"):
        checkpoint.load(tmp_path, checkpoint.RunState(fresh.net, fresh.ensemble, given))
    assert fresh.facts() == before and given == extra


def together(count: int) -> harness.Run:
    net = mlp(torch.bfloat16)
    return harness.Run(net=net, together=count, optimizer=helpers.fused_fp32, every=4)


def state_of(run: harness.Run) -> checkpoint.RunState:
    return checkpoint.RunState(run.net, run.ensemble)


def all_of(run: harness.Run) -> Any:
    """Parameters and masters of each replica."""
    params, optimizer = list(run.net.parameters()), run.optimizer
    of = lambda k: [*optimizer.replica_parameters(k), *optimizer.masters(params, k)]
    return bits([of(k) for k in run.replicas.local])


@pytest.mark.parametrize("at", [4, 6])
def test_coresident_replicas(tmp_path: Path, at: int) -> None:
    """One of them is stored: they are equal then. So another number can take over."""
    run = together(3).steps(at)
    with run.replica(1), pytest.raises(ValueError, match="inside `with replicas.use"):
        state_of(run)
    folder = checkpoint.save(tmp_path, state_of(run), at)
    mean = {name: p.detach().clone() for name, p in run.net.named_parameters()}
    assert not any("replica" in name for name in holders(folder))
    other = together(3).steps(2)
    before, hooks = all_of(other), other.optimizer.register_load_state_dict_post_hook
    refuses = hooks(lambda _: 1 / 0)
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        checkpoint.load(tmp_path, state_of(other))
    refuses.remove()
    assert all_of(other) == before
    other.index = checkpoint.load(tmp_path, state_of(other))
    first, *others = all_of(other)
    assert others == [first] * 2, "before anybody uses them"
    assert all_of(other.steps(5)) == all_of(run.steps(5))
    five = together(5)
    checkpoint.load(tmp_path, state_of(five))
    five.steps(5)
    assert run_ranks(taken_over, 2, str(folder)) == [bits(dict(mean))] * 2


def taken_over(rank: int, world: int, path: str) -> Any:
    """By replicas of a process each."""
    run = harness.Run(rank, net=mlp(torch.bfloat16), optimizer=helpers.fused_fp32, every=4)
    checkpoint.load(path, state_of(run))
    return bits({name.removeprefix("module."): p for name, p in run.net.named_parameters()})


def recipe(rank: int, world: int) -> bool:
    run = ddp(rank, world).steps(7)
    run.ensemble.converge()  # on all ranks
    states = [run.saved()]
    torch.distributed.broadcast_object_list(states)
    fresh = ddp(rank, world).loaded(states[0])
    fresh.generator.set_state(run.generator.get_state())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fresh.steps(8).facts() == run.steps(8).facts()


def test_what_the_first_rank_has_saved_by_torch_save_goes_on_everywhere() -> None:
    assert run_ranks(recipe, 2) == [True, True]


VALUES: dict[str, Any] = {
    "tuple": (3, (1, [2, 3]), 1.5),  # as random.getstate() is
    "keys": {0: "a", (1, 2): {"b": None}, "$tensor": 1}, "$b": {"$$": 1, "c": [{"$tensor": 2}]},
    "kinds": [OrderedDict(b=1, a=2), Counter("aab"), {1, 2}, torch.Size([2]), b"\0x"],
    "numbers": [1e300, -0.0, float("inf"), float("nan"), -(10**5000), True],
    "text": "\ud800 \u00fc",
    "a.b": torch.zeros(1),
    "a": {"b": torch.ones(2, 3).t(), "views": [t := torch.arange(6.0), t[:2], t[3:]]},
    "tensors": [
        torch.tensor(3, dtype=torch.int16), torch.zeros(0, 3), torch.ones(2, dtype=torch.bool),
        torch.tensor([1 + 2j], dtype=torch.complex128), torch.arange(3).to(torch.float8_e4m3fn),
    ],
}  # fmt: skip


def test_what_extra_can_hold_comes_back(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state_with(dict(VALUES)), 1)
    given: dict[str, Any] = {}
    checkpoint.load(tmp_path, state_with(given))
    assert bits(given) == bits(VALUES)
    assert [type(value) for value in given["kinds"]] == [type(value) for value in VALUES["kinds"]]
    assert type(given["tuple"]) is tuple and list(given["keys"]) == list(VALUES["keys"])
