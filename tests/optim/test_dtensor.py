"""Parameters that are laid over a device mesh (FSDP2, HSDP, tensor parallelism): a step works on
the shards of this rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import Parameter
from torch.optim import AdamW

from hdet.optim import FusedAdamW, FusedMuon, FusedSGD, matrices, newton_schulz
from hdet.rules import RULES as ALL_RULES
from hdet.testing.rules import BF16, STORED, copies
from tests.distributed import run_ranks

from .common import BY_NAME, FREE, MUON, RULES, Rule, plans_made
from .sharded import (
    Block,
    Twins,
    assert_all_equal,
    close,
    distributed,
    full,
    load,
    mesh_of,
    model_of,
    save,
    train,
    weights,
)

ADAMW, SGD = BY_NAME["adamw"], BY_NAME["sgd"]
WITHOUT_SUMS = [rule for rule in RULES if not ALL_RULES[rule.fused.rule].trace.sums]
SHAPES = [(7, 5), (5, 7), (1, 4), (3, 6, 2), (9, 8), (3,), (8, 3), (7, 5)]
"""some leave ranks without an element"""
MATRICES = [0, 1, 2, 3, 4, 7]
OF_MUON: list[tuple[list[int], dict[str, Any]]] = [
    (MATRICES[:3], {"use_muon": True, "higher_dims": "stack"}),
    (MATRICES[3:], {"use_muon": True, "higher_dims": "stack", "adjust_lr_fn": "match_rms_adamw"}),
    ([5, 6], {"use_muon": False}),
]
ROWS, HSDP = [[Shard(0)]] * 8, [[Replicate(), Shard(0)]] * 8
MIXED = [Shard(1), Shard(0), Shard(0), Shard(1), Replicate(), Shard(0), Replicate(), Shard(-1)]
GRID = [[Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(0), Shard(0)], [Shard(0), Shard(2)]]
MESHES: dict[str, Any] = {
    "fsdp": ((2,), ROWS),
    "mixed": ((2,), [[placement] for placement in MIXED]),
    "hsdp": ((2, 2), HSDP),
    "grid": ((2, 2), [*GRID, [Replicate(), Replicate()], *HSDP[:3]]),
    "owners": ((2,), [*ROWS[:3], [Replicate()], [Shard(1)], *ROWS[:3]]),
}


def twins_of(mesh: str, rule: Rule = ADAMW, **options: Any) -> Twins:
    """`Twins.check` needs a tolerance for Muon alone, whose sums are in another order."""

    def make(params: list[Parameter]) -> Any:
        cuts = [(range(i, 8, 3), settings) for i, settings in enumerate(rule.groups)]
        parts: Any = OF_MUON if rule is MUON else cuts
        groups = [{"params": [params[i] for i in part], **settings} for part, settings in parts]
        return rule.fused(groups, **{"lr": 1e-2, **options})

    dtype = options.pop("dtype", torch.float32)
    return Twins(make, *MESHES[mesh], SHAPES, dtype, 1e-5 if rule is MUON else 0.0)


def same_bits_as_plain(rank: int, world_size: int, mesh: str) -> None:
    for rule in [*WITHOUT_SUMS, MUON] if mesh == "fsdp" else [ADAMW, SGD, MUON]:
        twins = twins_of(mesh, rule)
        twins.go(range(3))
        with plans_made() as made:
            twins.go(range(3, 5))
        assert not made.called, "no new plan where nothing has changed"
        twins.check()
    for options in (
        STORED["float32 masters"],
        STORED["split masters"],
        {"dtype": torch.float16, "master_weights": "fp32", "zero_gradients": True},
        {"backend": "torch"},
        STORED["split, averages"],
    ):
        twins = twins_of(mesh, **options)
        twins.go(range(4))
        twins.check()


@pytest.mark.parametrize("mesh", ["fsdp", "mixed", "hsdp", "grid"])
def test_shards_step_as_the_full_tensors_would(mesh: str) -> None:
    """Bitwise, but for Muon."""
    run_ranks(same_bits_as_plain, math.prod(MESHES[mesh][0]), mesh)


BLOCKS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((7, 5), {"splits": (4, 2, 1)}),
    ((5, 6), {"splits": (2, 4)}),
    ((4, 6, 2), {"higher_dims": "stack", "splits": (3, 3)}),
    ((5, 3, 2, 2), {"higher_dims": "flatten"}),
]


def blocks_step_as_the_full_ones(rank: int, world_size: int, *placements: Any) -> None:
    def make(params: list[Parameter]) -> FusedMuon:
        groups = [
            {"params": [param], "use_muon": True, **said}
            for param, (_, said) in zip(params, BLOCKS, strict=True)
        ]
        return FusedMuon(groups, lr=1e-2, ns_dtype=torch.float32)

    shapes = [shape for shape, _ in BLOCKS]
    twins = Twins(make, (2,) * len(placements), [placements] * len(BLOCKS), shapes, tolerance=1e-5)
    twins.go(range(3))
    twins.check()


@pytest.mark.parametrize("cut", [(Shard(0),), (Shard(1),), (Shard(0), Shard(1))], ids=str)
def test_blocks_do_not_depend_on_how_a_matrix_is_cut(cut: tuple[Any, ...]) -> None:
    run_ranks(blocks_step_as_the_full_ones, 2 ** len(cut), *cut)


def as_the_plain_model(rank: int, world_size: int, kind: str) -> None:
    muon = lambda params: FusedMuon(params, lr=2e-2, adamw_lr=1e-2, ns_dtype=torch.float32)
    adamw = lambda params: AdamW(params, lr=1e-2)
    for make, peer, clip, tolerance in [
        (lambda params: FusedAdamW(params, lr=1e-2), adamw, 0.0, 1e-5),
        (lambda params: FusedAdamW(params, lr=1e-2, max_grad_norm=0.5), adamw, 0.5, 1e-5),
        (muon, muon, 0.0, 1e-4),
    ]:
        ours, theirs = model_of(kind), model_of("plain")
        train(ours, make(ours.named_parameters()), kind, range(4))
        train(theirs, peer(theirs.named_parameters()), "plain", range(4), clip)
        for one, two in zip(weights(ours), weights(theirs), strict=True):
            close(one, two, tolerance)


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 2), ("tp", 2), ("hsdp", 4), ("fsdp x tp", 4)])
def test_models_train_as_the_plain_one(kind: str, ranks: int) -> None:
    """With sequence parallelism the gradients of norms arrive as Partial sums. torch's own run
    on such a model is off in torch 2.11, so its AdamW trains the plain one. The bound is torch's
    own for the pair, see common.py, times the ten that clipping and another order of the sums
    cost."""
    run_ranks(as_the_plain_model, ranks, kind)


def each_matrix_is_solved_once(rank: int, world_size: int) -> list[tuple[int, ...]]:
    twins = twins_of("owners", MUON)
    twins.gradients(0)
    solved: list[tuple[int, ...]] = []

    def watched(given: list[Tensor], *rest: Any) -> list[Tensor]:
        solved.extend(tuple(tensor.shape) for tensor in given)
        return newton_schulz.orthogonalise(given, *rest)

    with mock.patch.object(matrices, "orthogonalise", watched):
        twins.a.step()
    return solved


def test_each_matrix_has_one_owner_and_owners_equal_work() -> None:
    first, second = run_ranks(each_matrix_is_solved_once, 2)
    assert sorted(first + second) == sorted(SHAPES[i] for i in MATRICES if i != 3)
    alone = first if (9, 8) in first else second
    assert len(alone) == 1, "it is more work than the others together"
    assert matrices.shares([8, 1, 7, 6, 2], 2) == [[0, 4, 1], [2, 3]]


# -- the state -------------------------------------------------------------------------------------

WIDE = 66
"""so that layers have codes of 8 bits: on two ranks 35 rows each, whose blocks begin elsewhere"""
MAKERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda model, **options: FusedAdamW(
        model.parameters(), lr=1e-2, max_grad_norm=1.0, **options
    ),
    "muon": lambda model, **options: FusedMuon(
        model.named_parameters(),
        lr=1e-2,
        use_muon=lambda name, p: p.ndim == 2,
        splits={"up.weight": (40, 30)},
        ns_dtype=torch.float32,
        **options,
    ),
}
SAVED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "split": (BF16, {"master_weights": "split"}),
    "24 bits": (BF16, {"master_weights": "split24"}),
    "8 bits": (torch.float32, {"moment_dtype": "8bit"}),
}


def saved_by(rank: int, world_size: int, folder: str, make: str, stored: str) -> Any:
    """Weights and moments when it is saved, and some steps later."""
    dtype, options = SAVED[stored]
    model = model_of("fsdp", dtype, WIDE)
    optimizer = MAKERS[make](model, **options)
    train(model, optimizer, "fsdp", range(3))
    kept = [tensor.dtype for state in optimizer.state.values() for tensor in state.values()]
    assert (torch.uint8 in kept) == (stored == "8 bits")
    save(folder, model, optimizer)
    now = weights(model, optimizer)
    train(model, optimizer, "fsdp", range(3, 5))
    return now, weights(model, optimizer)


def loaded_by(rank: int, world_size: int, folder: str, make: str, kind: str, stored: Any) -> Any:
    dtype, options = stored
    model = model_of(kind, dtype, WIDE)
    optimizer = MAKERS[make](model, **options)
    load(folder, model, optimizer)
    now = weights(model, optimizer)
    train(model, optimizer, kind, range(3, 5))
    return now, weights(model, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("stored", SAVED)
def test_a_distributed_checkpoint_is_resharded(make: str, stored: str, tmp_path: Path) -> None:
    """Saved by two ranks. By two, and by four in two replicas: the same run, bitwise where no
    matrix is cut otherwise. By one: the same values; 8 bits, in other blocks, are off by what 8
    bits are off."""
    here = str(tmp_path)
    (saved, went_on), *_ = run_ranks(saved_by, 2, here, make, stored)
    cuts = [(2, "fsdp")] if stored == "8 bits" else [(4, "hsdp")]
    for ranks, kind in cuts:
        for now, later in run_ranks(loaded_by, ranks, here, make, kind, SAVED[stored]):
            assert_all_equal(saved, now)
            for one, other in zip(went_on, later, strict=True):
                close(one, other, 0.0 if kind == "fsdp" or make == "adamw" else 1e-2)
    dtype, options = SAVED[stored]
    exact = {**options, "moment_dtype": None}
    wide, _ = loaded_by(0, 1, here, make, "plain", (dtype, exact))
    assert_all_equal(saved, wide)
    if stored == "8 bits":
        small, after = loaded_by(0, 1, here, make, "plain", SAVED[stored])
        count = len(list(model_of("plain").parameters()))
        for one, other in zip(saved[count:], small[count:], strict=True):
            assert (one - other).norm() <= 0.02 * one.norm()
        for one, other, start in zip(went_on[:count], after, saved, strict=False):
            # Muon lifts small singular values, and the rounding in them
            assert (one - other).norm() <= {"adamw": 0.1, "muon": 0.5}[make] * (one - start).norm()


def replicas_through_dcp(rank: int, world_size: int, folder: str) -> None:
    found = []
    for resumed in (False, True):
        model = model_of("fsdp", BF16)
        optimizer = MAKERS["adamw"](model, master_weights="split")
        optimizer.set_replicas(2, copies(2))
        optimizer.multipliers = [[0.5], [1.5]]
        if resumed:
            load(folder, model, optimizer)
        else:
            train(model, optimizer, "fsdp", range(2))
            save(folder, model, optimizer)
        train(model, optimizer, "fsdp", range(2, 4))
        found.append([full(param) for k in range(2) for param in optimizer.replica_parameters(k)])
    assert_all_equal(*found)


def test_replicas_pass_through_a_distributed_checkpoint(tmp_path: Path) -> None:
    run_ranks(replicas_through_dcp, 2, str(tmp_path))


FULL = StateDictOptions(full_state_dict=True)


def states_pass_through_torchs_state_dict_functions(rank: int, world_size: int) -> None:
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for form, kind, dtype, options in [
        (StateDictOptions(), "fsdp", torch.float32, {}),
        (StateDictOptions(), "fsdp", BF16, {"master_weights": "fp32"}),
        (flat, "fsdp", BF16, {"master_weights": "split"}),
        (FULL, "fsdp", BF16, {"master_weights": "split", "moment_dtype": BF16}),
        (FULL, "fsdp", torch.float32, {"moment_dtype": "8bit"}),
        (flat, "fsdp", BF16, {"master_weights": "split24", "moment_dtype": "8bit"}),
        (FULL, "fsdp", BF16, {"master_weights": "split24"}),
        (FULL, "fsdp", BF16, {"master_weights": "split", "ema": (0.5, 0.9)}),
        (flat, "fsdp", torch.float32, {"ema": 0.5}),
        *((form, "plain", BF16, {"master_weights": of}) for form in (StateDictOptions(), FULL)
            for of in (None, "fp32", "split", "split24")),
    ]:  # fmt: skip
        (model, optimizer), (other, resumed) = (
            (model, FusedAdamW(model.parameters(), lr=1e-2, **options))
            for model in (model_of(kind, dtype, WIDE) for _ in range(2))
        )
        for one in (optimizer, resumed) if kind == "plain" else ():
            one.set_replicas(2, copies(2))
            one.multipliers = [[1.0], [2.0]]
        train(model, optimizer, kind, range(2))
        # loading takes large tensors as they are
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=form))
        if form is FULL:  # on rank 0 alone: everyone needs it to load
            box = [saved]
            dist.broadcast_object_list(box, src=0)
            saved = box[0]
        other.load_state_dict(model.state_dict())
        set_optimizer_state_dict(other, resumed, saved, options=form)
        for one, two in ((model, optimizer), (other, resumed)):
            train(one, two, kind, range(2, 4))
        for k in range(optimizer.num_replicas):
            assert_all_equal(optimizer.replica_parameters(k), resumed.replica_parameters(k))
        if optimizer.ema:
            with optimizer.averaged(), resumed.averaged():
                assert_all_equal(weights(model), weights(other))


@pytest.mark.parametrize(
    "make",
    [
        FusedAdamW,
        FREE.fused,
        partial(FusedSGD, momentum=0.9, dampening=0.5),
        partial(FusedAdamW, ema=0.5),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_new_optimizer_says_what_a_checkpoint_has_to_fill(make: Any, count: int) -> None:
    """A distributed checkpoint loads what the present state has room for, and no more."""

    def entries(steps: int) -> dict[str, Any]:
        model = Block().bfloat16()
        optimizer = make(model.parameters(), lr=1e-2, master_weights="split")
        optimizer.set_replicas(count, copies(count))
        train(model, optimizer, "plain", range(steps))
        found = get_optimizer_state_dict(model, optimizer)["state"]
        return {name: sorted(state) for name, state in found.items()}

    assert entries(0) == entries(2)
    assert "remainder" in entries(0)["up.weight"]


def phantom_steps_change_no_value(rank: int, world_size: int) -> None:
    for options in (
        {},
        {"master_weights": "fp32"},
        {"master_weights": "split"},
        {"max_grad_norm": 1.0, "stochastic_rounding": True},
    ):
        for make in (FusedAdamW, partial(FusedSGD, momentum=0.9)):
            model = model_of("fsdp", BF16)
            optimizer = make(model.parameters(), lr=1e-2, **options)  # type: ignore[operator]
            before = weights(model)
            get_optimizer_state_dict(model, optimizer)  # steps with rate 0 to have a state
            assert optimizer.state and optimizer.param_groups[0]["lr"] == 1e-2
            assert_all_equal(before, weights(model))


# -- what else a step does -------------------------------------------------------------------------


def the_norm_is_that_of_the_full_gradient(rank: int, world_size: int) -> None:
    for rule, scale in [(ADAMW, None), (ADAMW, 8.0), (MUON, None)]:
        twins = twins_of("grid", rule, max_grad_norm=0.75, zero_gradients=True)
        for step in range(3):
            twins.gradients(step)
            for one in (twins.a, twins.b):
                one.grad_scale = scale and torch.tensor(scale)
            twins.both(lambda one: one.step())
            found = [(one.grad_norm, one.gradient_norms()) for one in (twins.a, twins.b)]
            torch.testing.assert_close(*found, rtol=1e-6, atol=0)
            assert not any(param.grad.to_local().any() for param in twins.laid)
        for one, other in zip(twins.laid, twins.plain, strict=True):
            close(full(one), other.detach(), max(1e-6, twins.tolerance))
        # Measured and not clipped: as a step without a norm.
        twins = twins_of("grid", rule)
        twins.a.max_grad_norm = math.inf
        twins.go(range(2))
        twins.check()
        # One element of one rank is not finite: everyone skips, and counts nothing.
        twins.gradients(3)
        if rank == 3:
            twins.laid[3].grad.to_local()[0] = math.nan  # type: ignore[union-attr, attr-defined]
        twins.a.step()
        assert twins.a.step_skipped.item() == 1
        twins.check()


def replicas_and_masters_of_shards(rank: int, world_size: int) -> None:
    for rule, stored in [
        *((rule, "split masters") for rule in (ADAMW, FREE)),
        *((ADAMW, stored) for stored in ("float32", "float32 masters", "split, averages")),
        (MUON, "float32 masters"),
    ]:
        twins = twins_of("mixed", rule, **STORED[stored])
        twins.go(range(2))
        twins.both(lambda one: one.set_replicas(2, copies(2)))
        twins.both(lambda one: setattr(one, "multipliers", [[0.5] * 3, [1.5] * 3]))
        twins.go(range(2, 4))
        if rule is MUON:  # parameters of 16 bits round their masters, which are near
            twins.check_masters(2)
            continue
        twins.check()
        saved = [copy.deepcopy(one.state_dict()) for one in (twins.a, twins.b)]
        twins.go(range(4, 6))
        twins.both(lambda one: one.average_replicas([0.5, 0.5]))
        twins.check()
        twins.check_masters(2)
        twins.a.load_state_dict(saved[0])
        twins.b.load_state_dict(saved[1])
        twins.go(range(6, 7))
        twins.check()
        # The replicas are equal after an average: a state of two is one of three, and the
        # comparison is of all shards.
        for optimizer in (twins.a, twins.b):
            optimizer.average_replicas([0.5, 0.5])
            equal = copy.deepcopy(optimizer.state_dict())
            optimizer.set_replicas(3, copies(3))
            optimizer.load_state_dict(equal)
        twins.go(range(7, 8))
        twins.check()


def doubled(param: Any, how: str) -> None:
    if how == "through the DTensor":
        param.mul_(2)
    elif how == "through the shard":
        param.to_local().mul_(2)
    else:
        param._local_tensor = param._local_tensor * 2


def what_is_written_to_a_parameter_or_moved_is_taken_over(rank: int, world_size: int) -> None:
    """Masters follow, and so do steps."""
    for how in ("through the DTensor", "through the shard", "into new memory"):
        for asked in (False, True):
            twins = twins_of("fsdp", **STORED["float32 masters"])
            twins.go(range(2))
            with torch.no_grad():
                for param, other in zip(twins.laid, twins.plain, strict=True):
                    doubled(param, how)
                    other.mul_(2)
            if asked:
                twins.check_masters(1)
            twins.go(range(2, 3))
            twins.check()
    twins.both(lambda one: one.refresh_masters())
    twins.check()


def a_step_between_forward_and_backward_is_noticed(rank: int, world_size: int) -> None:
    param = Parameter(distributed(torch.ones(4, 3), mesh_of(2), Shard(0)))
    optimizer = FusedAdamW([param])
    param.grad = torch.zeros_like(param)
    optimizer.step()
    for source in (lambda: param, param.to_local):
        loss = source().square().sum()
        param.grad = torch.zeros_like(param)
        optimizer.step()
        message = "modified by an inplace operation|has been modified inplace"
        with pytest.raises(RuntimeError, match=message):
            (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()


def gradients_that_are_sums_still_to_be_taken_are_reduced(rank: int, world_size: int) -> None:
    """Beside one that is absent."""
    for mesh, rule in [("fsdp", ADAMW), ("mixed", ADAMW), ("fsdp", MUON)]:
        twins = twins_of(mesh, rule, zero_gradients=True)
        twins.go(range(1))
        twins.gradients(1)
        for i in (0, 4):
            whole = full(twins.laid[i].grad)
            twins.laid[i].grad = DTensor.from_local(whole / 2, twins.mesh, [Partial()])
        twins.laid[1].grad = twins.plain[1].grad = None
        twins.both(lambda one: one.step())
        twins.check()
        assert not any(twins.laid[i].grad.to_local().any() for i in (0, 4))


def what_does_not_fit_is_refused_by_name(rank: int, world_size: int) -> None:
    mesh = mesh_of(2)
    lying = lambda *placements: distributed(torch.ones(4, 2), mesh, *placements)
    param, plain = Parameter(lying(Shard(0))), Parameter(torch.ones(4, 2))
    optimizer, other = FusedAdamW([param]), FusedAdamW([plain])

    def refused(message: str, call: Callable[[], Any], kind: Any = ValueError) -> None:
        before = full(param).clone()
        with pytest.raises(kind, match=message):
            call()
        assert torch.equal(full(param), before)

    def loaded(into: Any, moment: Tensor) -> Callable[[], None]:
        saved = copy.deepcopy(into.state_dict())
        saved["state"][0]["exp_avg"] = moment
        return lambda: into.load_state_dict(saved)

    is_dtensor = r"is a DTensor with \[Replicate\(\)\].*the parameter a DTensor with \[Shard"
    for gradient, message in [
        (lying(Replicate()), f"gradient of parameter 0 {is_dtensor}"),
        (lying(Shard(1)), "must be laid out as its parameter"),
    ]:
        param.grad = gradient
        refused(message, optimizer.step)
    assert not optimizer.state
    param.grad, plain.grad = torch.zeros_like(param), torch.zeros(4, 2)
    optimizer.step()
    other.step()
    message = "exp_avg of parameter 0 is a plain tensor.*set_optimizer_state_dict"
    refused(message, loaded(optimizer, torch.ones(4, 2)))
    refused("is a DTensor.*the parameter a plain tensor", loaded(other, lying(Shard(0))))
    optimizer.state[param]["exp_avg"] = lying(Replicate())
    refused(rf"exp_avg of a parameter of shape \(4, 2\) {is_dtensor}", optimizer.step)
    copies = lambda p: [p, lying(Replicate())]
    refused("copy 1 of a parameter is a DTensor", lambda: optimizer.set_replicas(2, copies))
    unsummed = Parameter(DTensor.from_local(torch.ones(4, 2), mesh, [Partial()]))
    unsummed.grad = torch.zeros_like(unsummed)
    refused("a sum that has not been taken", FusedAdamW([unsummed]).step)
    for rule in RULES:
        if rule not in WITHOUT_SUMS:
            message = f"{rule.fused.__name__} needs sums over whole parameters, .* DTensor with"
            refused(message, rule.fused([param]).step)
    clipped = FusedAdamW([param], max_grad_norm=1.0)
    clipped.step()
    refused("clip_grad_norm_", clipped.write_hyperparameters, RuntimeError)


@pytest.mark.parametrize(
    ("on_a_rank", "ranks"),
    [
        (states_pass_through_torchs_state_dict_functions, 2),
        (phantom_steps_change_no_value, 2),
        (the_norm_is_that_of_the_full_gradient, 4),
        (replicas_and_masters_of_shards, 2),
        (what_is_written_to_a_parameter_or_moved_is_taken_over, 2),
        (a_step_between_forward_and_backward_is_noticed, 2),
        (gradients_that_are_sums_still_to_be_taken_are_reduced, 2),
        (what_does_not_fit_is_refused_by_name, 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_on_ranks(on_a_rank: Callable[[int, int], None], ranks: int) -> None:
    run_ranks(on_a_rank, ranks)
