"""RunState under torch.distributed.checkpoint, other numbers of replicas, what each replica has for itself; steps that are none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet import checkpoint
from hdet.kernels.spec import rounding

from .. import harness
from ..adversary.common import bits
from ..distributed import run_ranks
from ..layouts.common import full
from . import helpers
from .helpers import Run, alone, ddp, mlp
from .test_folder import Loader

# -- steps that are none ---------------------------------------------------------------------------------------------------


def asked_for_state(rank: int, world: int, make: Callable[..., Any]) -> Any:
    torch.manual_seed(3)
    run, silent = ddp(rank, world, make), ddp(rank, world, make)
    counts = []
    for step in range(12):
        if step in (0, 1, 5, 10):
            with CommDebugMode() as comm:
                if step in (0, 5, 10):  # where a checkpoint can be had: before the first step, and at the end of a cycle
                    run.state.state_dict()
                if step or make is helpers.plain_sgd:
                    get_optimizer_state_dict(run.net, run.optimizer)  # it steps an optimizer without a state, with rate 0
            counts.append(comm.get_total_counts())
        assert run.facts() == silent.facts()
        run.step()
        silent.step()
    with CommDebugMode() as comm:
        run.ensemble.converge()  # would be seen
    silent.ensemble.converge()
    return counts, comm.get_total_counts() > 0, run.steps(3).facts() == silent.steps(3).facts()


@pytest.mark.parametrize("make", [helpers.torch_adamw, helpers.torch_sgd, helpers.plain_sgd, helpers.fused_split, helpers.FusedEightBit])
def test_asking_for_the_state_changes_nothing_and_communicates_nothing(make: Callable[..., Any]) -> None:
    assert run_ranks(asked_for_state, 2, make) == [([0, 0, 0, 0], True, True)] * 2


class Odd(torch.optim.Optimizer):
    """Keeps nested state, a count that is no tensor, and reads -0 + 0."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["factors"] = {
                        "rows": state.get("factors", {}).get("rows", 0) + p.grad.flatten(1).abs().sum(1) if p.dim() > 1 else p.grad.abs()
                    }
                    state["list"] = [p.grad.clone()]
                    p.add_(p.grad, alpha=-group["lr"])


def test_an_optimizer_with_state_of_any_shape(tmp_path: Path) -> None:
    """Also for parameters that have not had a gradient yet."""
    run = alone(Odd)
    with torch.no_grad():
        run.net[0].weight[0, 0] = -0.0
    before = bits(run.net[0].weight)
    run.state.state_dict()
    assert run.optimizer.calls == 0 and not run.optimizer.state and bits(run.net[0].weight) == before
    run.net[2].bias.requires_grad_(False)
    run.steps(3).net[2].bias.requires_grad_(True)
    checkpoint.save(tmp_path, run.state, 3)
    other = alone(Odd)
    checkpoint.load(tmp_path, other.state)
    assert other.facts() == run.facts() and len(other.optimizer.state) == 3
    assert other.resumed().steps(2).facts() == run.steps(2).facts()


# -- torch's own save and load -----------------------------------------------------------------------------------------------


def stock(rank: int, world: int, root: str, build: Callable[..., Run]) -> Any:
    run = build(rank, world).steps(7)
    refused = ""
    try:
        dcp.save({"run": run.state}, checkpoint_id=f"{root}/stock")
    except BaseException as error:  # noqa: BLE001 - torch's is no Exception
        refused = str(error)
    run.ensemble.converge()
    dcp.save({"run": run.state}, checkpoint_id=f"{root}/stock")
    fresh = build(rank, world)
    with CommDebugMode() as comm:
        state = fresh.state
        state.state_dict()  # an optimizer without state is asked for all it will have
    assert comm.get_total_counts() == 0
    dcp.load({"run": state}, checkpoint_id=f"{root}/stock")
    same = fresh.resumed().steps(6).facts() == run.steps(6).facts()
    # And the other way: anybody reads the model out of a folder of ours.
    run.ensemble.converge()
    folder = checkpoint.save(f"{root}/ours", run.state, 13)
    bare = mlp(seed=5)
    dcp.load({"model": bare.state_dict()}, checkpoint_id=folder)
    return refused, same, all(torch.equal(a, full(b)) for a, b in zip(bare.parameters(), run.net.parameters(), strict=True))


@pytest.mark.parametrize(("build", "world"), [(ddp, 2), (helpers.hsdp, 4), (helpers.local, 2)])
def test_stock_checkpoints_are_refused_in_mid_cycle_and_go_on_bit_for_bit_after_a_converge(
    tmp_path: Path, build: Callable[..., Run], world: int
) -> None:
    for refused, same, readable in run_ranks(stock, world, str(tmp_path), build):
        assert "call ensemble.converge() on all ranks before" in refused
        assert same and readable


def refused_at(rank: int, world: int, build: Callable[..., Run]) -> list[int]:
    run, refused = build(rank, world), []
    for step in range(12):
        try:
            run.state.state_dict()
        except ValueError:
            refused.append(step)
        run.step()
    return refused


@pytest.mark.parametrize(
    ("build", "steps"),
    [
        (ddp, [1, 2, 3, 4, 6, 7, 8, 9, 11]),
        (helpers.streaming, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (helpers.overlapped, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
    ],
)
def test_whenever_the_replicas_have_parted_a_mixture_is_refused(build: Callable[..., Run], steps: list[int]) -> None:
    """Also at the end of a cycle, for ways of averaging that never make them equal."""
    assert run_ranks(refused_at, 2, build) == [steps] * 2


def known_mean(rank: int, world: int, make: Callable[..., Any]) -> Any:
    run = helpers.exact_local(rank, world, make).steps(8)
    own = [p.detach().clone() for p in run.ensemble.parameters]
    with CommDebugMode() as comm:
        tree = run.state.state_dict()
    communicated = comm.get_total_counts()
    untouched = all(torch.equal(a, b) for a, b in zip(own, run.ensemble.parameters, strict=True))
    mean = [t.clone() for t in tree["model"].values()]
    masters = [entries["master_param"].clone() for entries in tree["optimizer"]["state"].values() if "master_param" in entries]
    nothing_else = not any("replica" in entry for entries in tree["optimizer"]["state"].values() for entry in entries)
    run.ensemble.converge()
    far = max(float((a - b).abs().max()) for a, b in zip(mean, own, strict=True))
    off = max(float((a.double() - b).abs().max()) for a, b in zip(mean, run.ensemble.parameters, strict=True))
    kept = [m for m in run.optimizer.masters(list(run.net.parameters())) if m is not None]
    off_masters = max((float((a - b).abs().max()) for a, b in zip(masters, kept, strict=True)), default=0.0)
    return communicated, untouched, nothing_else, far > 1e-4, off, off_masters, bits(mean), bits(masters)


@pytest.mark.parametrize("make", [helpers.fused_base, helpers.fused_base_fp32])
def test_in_mid_cycle_a_known_mean_is_saved_in_place_of_the_parameters(make: Callable[..., Any]) -> None:
    one, two = run_ranks(known_mean, 2, make)
    for communicated, untouched, nothing_else, apart, off, off_masters, *_ in (one, two):
        assert (communicated, untouched, nothing_else, apart) == (0, True, True, True)
        # The plain average rounds in another order: a few units of the last place of values below 1; 2^-8 of them in bfloat16.
        assert off <= (2**-22 if make is helpers.fused_base else 2**-8) and off_masters <= 2**-22
    assert one[6:] == two[6:], "every rank has the same mean, so that it does not matter whose is written"
    assert bool(one[7]) == (make is helpers.fused_base_fp32)


# -- another number of replicas ----------------------------------------------------------------------------------------------


def grown(rank: int, world: int, root: str, mode: Callable[..., Run], loads: bool) -> Any:
    run = mode(rank, world)
    if loads:
        checkpoint.load(root, run.state)
        before = run.facts()
        run.index = int(run.extra["index"])
        run.steps(3)
        run.ensemble.converge()
    else:
        run.steps(10)
        checkpoint.save(root, run.state, 10)
        before = run.facts()
    ensemble = before["ensemble"]
    kept = {key: ensemble[key] for key in ("cycle", "step", "corrections", "bases", "controller_state", "scheduled", "scheduler")}
    return before["model"], before["optimizer"], before["rates"], kept, run.facts()["model"]


@pytest.mark.parametrize(("few", "many"), [(4, 8), (8, 3)])
def test_another_number_of_replicas_goes_on_with_values_corrections_and_velocities(tmp_path: Path, few: int, many: int) -> None:
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


def partly_started(rank: int, world: int, root: str, loads: bool) -> Any:
    run = helpers.local(rank, world)
    bias = run.net[2].bias
    if loads:
        checkpoint.load(root, run.state)
    else:
        bias.requires_grad_(rank == 1)  # without a gradient on replica 0, so without a state
        run.steps(5)
        bias.requires_grad_(True)
        checkpoint.save(root, run.state, 5)
    return bias in run.optimizer.state, run.facts()["optimizer"]


def test_a_parameter_that_has_had_gradients_on_one_replica_only(tmp_path: Path) -> None:
    saved = run_ranks(partly_started, 2, str(tmp_path), False)
    assert [has for has, _ in saved] == [False, True]
    assert run_ranks(partly_started, 2, str(tmp_path), True) == saved


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


def test_averaged_moments_are_stored_once_and_counters_for_each_replica(tmp_path: Path) -> None:
    counters = [[5.0] * 4, [15.0] * 4]
    assert run_ranks(own_counters, 2, str(tmp_path), False) == counters
    assert run_ranks(own_counters, 2, str(tmp_path), True) == counters
    keys = dcp.FileSystemReader(tmp_path / "step-00000005").read_metadata().state_dict_metadata
    of_one = {key for key in keys if key.startswith("optimizer.state") and "0.weight" in key}
    assert of_one == {
        f"optimizer.state.{key}" for key in ("0.weight.exp_avg", "0.weight.exp_avg_sq", "replica0/0.weight.step", "replica1/0.weight.step")
    }


# -- what each rank has for itself -------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def normed(rank: int, world: int, averaged: bool) -> Run:
    net = Normed()
    wrapped = DistributedDataParallel(torch.compile(net, backend="eager"), broadcast_buffers=False)
    return Run(wrapped, None, helpers.torch_adamw, rank, buffers=net if averaged else ())


def own_buffers(rank: int, world: int, root: str, averaged: bool, loads: bool) -> Any:
    run = normed(rank, world, averaged)
    if loads:
        run.resume(root)
    else:
        run.steps(5)
        checkpoint.save(root, run.state, 5)
    return run.facts()["model"], sorted(run.state.state_dict()["model"])


@pytest.mark.parametrize("averaged", [True, False])
def test_buffers_that_are_not_averaged_are_each_ranks_own(tmp_path: Path, averaged: bool) -> None:
    saved = run_ranks(own_buffers, 2, str(tmp_path), averaged, False)
    assert [rank[0] for rank in run_ranks(own_buffers, 2, str(tmp_path), averaged, True)] == [rank[0] for rank in saved]
    differ = saved[0][0] != saved[1][0]
    own = {"norm.num_batches_tracked"} | (set() if averaged else {"norm.running_mean", "norm.running_var"})
    shared = {"embed.weight", "norm.weight", "norm.bias", "frozen"} | ({"norm.running_mean", "norm.running_var"} if averaged else set())
    assert differ is not averaged
    assert [set(rank[1]) for rank in saved] == [shared | {f"replica{r}/member0/{name}" for name in own} for r in (0, 1)]


# -- one process -------------------------------------------------------------------------------------------------------------


def together(count: int, storage: str) -> harness.Run:
    make = helpers.fused_fp32 if storage == "parameters" else helpers.fused_base
    return harness.Run(net=mlp(torch.bfloat16), together=count, storage=storage, optimizer=make, every=4)


def state_of(run: harness.Run) -> checkpoint.RunState:
    return checkpoint.RunState(run.net, run.ensemble)


def all_of(run: harness.Run) -> Any:
    """Parameters and masters of each replica."""
    params = list(run.net.parameters())
    return bits([[*run.optimizer.replica_parameters(k), *run.optimizer.masters(params, k)] for k in run.replicas.local])


@pytest.mark.parametrize("storage", ["parameters", "displacement"])
@pytest.mark.parametrize("at", [4, 6])
def test_coresident_replicas(tmp_path: Path, at: int, storage: str) -> None:
    """One of them is stored: they are equal then. So another number can take over."""
    run = together(3, storage).steps(at)
    with run.replica(1), pytest.raises(ValueError, match="inside `with replicas.use"):
        state_of(run).state_dict()
    folder = checkpoint.save(tmp_path, state_of(run), at)
    assert not any("replica" in key for key in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    other = together(3, storage).steps(2)
    other.index = checkpoint.load(tmp_path, state_of(other))
    assert all_of(other.steps(5)) == all_of(run.steps(5))
    five = together(5, storage)
    checkpoint.load(tmp_path, state_of(five))
    five.steps(5)


def own_extra(rank: int, world: int, root: str, loads: bool) -> int:
    run, loader = ddp(rank, world), Loader()
    state = checkpoint.RunState(run.net, run.ensemble, loader)
    if loads:
        checkpoint.load(root, state)
    else:
        loader.at = 10 + rank
        checkpoint.save(root, state, 0)
    return loader.at


def test_extra_is_each_ranks_own(tmp_path: Path) -> None:
    assert run_ranks(own_extra, 2, str(tmp_path), False) == [10, 11]
    assert run_ranks(own_extra, 3, str(tmp_path), True) == [10, 11, 10]


# -- plain torch.save --------------------------------------------------------------------------------------------------------


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


def sixteen_bits(make: Callable[..., Any]) -> Run:
    return alone(make, mlp(torch.bfloat16))


def values_of(run: Run) -> list[Any]:
    """Exact values behind the parameters, and moments."""
    masters = run.optimizer.masters(list(run.net.parameters()))
    exact = [rounding.join(p.detach(), m) if m.dtype == torch.int16 else m for p, m in zip(run.net.parameters(), masters, strict=True)]
    return [bits(x) for x in exact] + [bits(state["exp_avg"]) for state in run.optimizer.state.values()]


def test_other_optimizers_of_the_same_kind(tmp_path: Path) -> None:
    """torch's and hdet's, and hdet's forms of a master weight."""
    run = alone(helpers.torch_adamw).steps(6)
    checkpoint.save(tmp_path / "a", run.state, 6)
    fused = alone(helpers.fused_adamw).resume(tmp_path / "a")
    assert run.facts()["model"] == fused.facts()["model"] and run.facts()["optimizer"] == fused.facts()["optimizer"]
    checkpoint.save(tmp_path / "b", fused.state, 6)
    assert alone(helpers.torch_adamw).resume(tmp_path / "b").steps(4).facts() == run.steps(4).facts()

    checkpoint.save(tmp_path / "c", sixteen_bits(helpers.fused_fp32).steps(6).state, 6)
    halves = sixteen_bits(partial(hdet.FusedAdamW, master_weights="split")).resume(tmp_path / "c")
    checkpoint.save(tmp_path / "d", halves.steps(1).state, 7)
    again = sixteen_bits(helpers.fused_fp32).resume(tmp_path / "d")
    assert values_of(again) == values_of(halves)
