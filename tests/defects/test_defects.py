"""The 24 defects of the published code that are behaviour: each fails a test, here or beside what
it is about.

- 1, 3: the spread scaled a list that nobody read; without the controller neither spread nor
  average; reference/test_runs.py::test_a_run_is_what_the_equations_make_of_its_losses,
  layouts/test_by_hand.py
- 4, 7: get_last_lr did not exist with default arguments; a length by epochs;
  schedulers/test_same_as_torch.py::test_bitwise_the_same_run
- 5: gamma was negative; reference/test_core.py::test_gammas,
  reference/test_runs.py::test_a_run_is_what_the_equations_make_of_its_losses
- 6: runs shorter than the default warm-up;
  schedulers/test_published_loop.py::test_missing_total_is_refused_only_when_a_controller_acts
- 10: ranks that disagree, and draw as their generators do;
  reference/test_core.py::test_assignments_are_fresh_permutations,
  ensemble/test_agreement.py::test_what_differs_is_named_before_anything_is_averaged
- 11: the state held one rank's multiplier;
  checkpoint/test_run_state.py::test_another_number_of_replicas_goes_on_with_values_...
- 12: a step without a loss, a loss that is a number;
  faults/test_survived.py::test_one_replica_under_ddp,
  schedulers/test_published_loop.py::test_loss_may_be_a_number_a_tensor_or_absent
- 13: a rate that was a tensor became a float;
  schedulers/test_any_scheduler.py::test_base_values_are_the_schedulers_own_times_the_correction
- 14: warnings; schedulers/test_same_as_torch.py, schedulers/test_published_loop.py
- 15: averages over the whole world, whatever the layout;
  replicas/test_groups.py::test_from_layout_and_from_megatron,
  replicas/test_refusals.py::test_one_dimensional_fsdp_is_one_replica
- 16: a collective for each tensor; here,
  converge/test_buckets.py::test_collectives_and_extra_memory_are_bounded
- 20: losses of former cycles counted; ensemble/test_single.py::test_losses_are_averaged_...
- 21: neutral losses moved the rate;
  schedulers/test_any_scheduler.py::test_base_values_are_the_schedulers_own_times_the_correction,
  reference/test_runs.py
- 22: which norm the noise has, and which ranks have the same;
  test_noise_layouts.py::test_plain_tensors_get_the_noise_they_always_got
- 23: skipped steps counted; layouts/test_left_out.py::test_a_step_that_the_scaler_skips_counts_none
- others: here, by their numbers
"""

import inspect
import math
import random
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist

import hdet
from hdet.core.clock import Clock
from hdet.core.engine import Engine
from hdet.core.value import Value
from tests.core.controller_runs import close, value_of
from tests.defects.common import ACTS, SPREAD, Watch, drop_in, optimizer_step, parameter, train
from tests.distributed import run_ranks
from tests.harness import Elsewhere
from tests.reference import method

GRID = method.multipliers(4, 0.3)


def _multipliers(rank, world):
    calls = ({}, {"world_size": 4}, {"rank": rank}, {"rank": rank, "world_size": 4})
    return [drop_in([parameter()], **SPREAD, **call).ensemble.multipliers["lr"] for call in calls]


def _contradictions(rank, world):
    for wrong in ({"world_size": 1}, {"world_size": 8}, {"rank": (rank + 1) % world}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            drop_in([parameter()], **SPREAD, **wrong)


def test_02_spread_depends_on_the_group_alone():
    ranks = run_ranks(_multipliers, 4)
    assert sorted(own[0] for own in ranks) == pytest.approx(GRID)
    assert all(len(set(own)) == 1 for own in ranks)
    run_ranks(_contradictions, 4)


def _noise_then_constructor(rank, world):
    weights = parameter(1000, dtype=torch.float32)
    hdet.warm_noise_([weights], nu=0.01, seed=5)
    noisy = weights.detach().clone()
    with Watch() as watch:
        scheduler = drop_in([weights], **ACTS)
    assert torch.equal(weights, noisy)
    train(scheduler, 5, lambda step: 1.0)
    return noisy, watch.collectives, weights.detach().clone()


def test_08_constructor_neither_communicates_nor_averages():
    ranks = run_ranks(_noise_then_constructor, 4)
    assert [collectives for _, collectives, _ in ranks] == [[]] * 4
    for r in range(1, 4):
        assert not torch.equal(ranks[r][0], ranks[0][0])
        assert torch.equal(ranks[r][2], ranks[0][2])  # the end of the first cycle does average


def _random_states(rank, world):
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)
    seeds = []
    for name in ("manual_seed", "seed"):
        # there may be no GPU here: the call itself would be the defect
        setattr(torch.cuda, name, lambda *_: seeds.append("cuda"))
    states = [(torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist())]
    weights = parameter(50)
    hdet.warm_noise_([weights], seed=3)
    scheduler = drop_in([weights], **ACTS)
    train(scheduler, 12, lambda step: 1.0 + rank)
    scheduler.load_state_dict(_quiet_state(scheduler))
    scheduler.ensemble.converge()
    states.append((torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()))
    same = torch.equal(states[0][0], states[1][0])
    return same, states[0][1:] == states[1][1:], seeds


def _quiet_state(scheduler):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mid-cycle: it says so
        return scheduler.state_dict()


def test_09_random_states_are_never_touched():
    assert run_ranks(_random_states, 2) == [(True, True, [])] * 2


def _outsider(rank, world):
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="not a member"):
            hdet.Replicas.from_group(group)
    return hdet.Replicas.from_group(group).count if rank == 0 else None


def test_15_a_rank_outside_the_group_is_told():
    assert run_ranks(_outsider, 2) == [1, None]


def _traffic(rank, world, tensor):
    weights = [parameter(50, dtype=torch.float32) for _ in range(300)]
    rate = lambda: torch.tensor(0.1) if tensor else 0.1
    scheduler = drop_in([{"params": weights[i::2], "lr": rate()} for i in range(2)], **ACTS)
    collectives, host_reads = [], []
    for step in range(15):
        optimizer_step(scheduler.optimizer, step)
        loss = torch.tensor(1.0 + rank).as_subclass(Elsewhere)
        with Watch() as watch:
            scheduler.ensemble.observe(loss, weight=torch.tensor(2.0))
            scheduler.step(loss)
        collectives.append(len(watch.collectives))
        host_reads.append(watch.host_reads)
    return collectives, host_reads


@pytest.mark.parametrize("tensor", [False, True], ids=["float rates", "tensor rates"])
def test_16_collectives_and_host_reads(tensor):
    """Inside a cycle none of either; at its end one collective for the slots and one for each half
    of the bucket, for 300 tensors."""
    for collectives, host_reads in run_ranks(_traffic, 2, tensor):
        # the ranks' settings and their gradients are compared once, each after a call's name is
        assert collectives[0] <= 4
        inside = [step for step in range(1, 15) if step % 5 != 4]
        assert [collectives[step] for step in inside] == [0] * len(inside)
        assert [host_reads[step] for step in inside] == [0] * len(inside)
        assert max(collectives[step] for step in (4, 9, 14)) <= 3


def _half_values(rank):
    """Values in [1, 2) whose sum over four ranks needs more bits than the 16-bit type has."""
    return 1 + torch.rand(1000, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _average_half(rank, world, dtype):
    weights = _half_values(rank).to(dtype).requires_grad_()
    buffer = torch.full((3,), float(rank), dtype=torch.float32)
    optimizer, sync = torch.optim.SGD([weights], lr=0.1), hdet.Sync(1, buffers=[buffer])
    ensemble = hdet.Ensemble(optimizer, knobs=[hdet.LearningRate(0.3)], sync=sync)
    own = weights.detach().clone()
    weights.grad = torch.zeros_like(weights)
    ensemble.optimizer.step()
    ensemble.step()
    return own, weights.detach().clone(), buffer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_17_half_precision_is_averaged_in_fp32_and_rounded_once(dtype):
    """Four 16-bit values in [1, 2) add exactly in fp32, so the mean must be the correctly rounded
    one, bit for bit."""
    ranks = run_ranks(_average_half, 4, dtype)
    exact = torch.stack([own.double() for own, *_ in ranks]).mean(0)
    wrong = sum((own for own, *_ in ranks), torch.zeros(1000, dtype=dtype)) / 4
    assert not torch.equal(wrong, exact.to(dtype))  # a sum in 16 bits would be told apart
    for _, averaged, buffer in ranks:
        assert torch.equal(averaged, exact.to(dtype))
        assert buffer.tolist() == [1.5] * 3


@pytest.mark.parametrize("sign", [1, -1], ids=["lower is better", "higher is better"])
@pytest.mark.parametrize("decay", [None, "floor"])
def test_18_constant_signal_never_breaks_the_base_value(decay, sign):
    """The published rule reaches a base value below zero at decision 42 (spread 1/9) or 8 (spread
    1) under a constant "lower"."""
    controller = hdet.SoftmaxController(0.1, 0.5, 0.9, decay)
    engine = Engine([Value("lr", 0.99)], 8, Clock(1, 0, 400), controller)
    floor, peak = 4e-9, 9e-4
    for _ in range(400):
        losses = [100 * sign * rho for rho in engine.multipliers()[0]]
        engine.tick()
        close(engine, losses, scheduled=[peak], floor=[floor])
        value = value_of(engine, peak)
        assert math.isfinite(value) and value > 0 and (decay is None or value >= floor)
    if decay is None:
        assert (value < peak) == (sign == 1)


DEFAULTS = {
    hdet.OneCycleAutoLR: {
        "loss_scale": 0.1, "lr_of_lr": 0.5, "momentum_of_lr": 0.9, "enable_auto_lr": False,
        "auto_lr_warmup_steps": 100_000, "model_sync_interval": 1000,
        "ensemble_lr_spread_ratio": 0.0,
    },
    hdet.SoftmaxController:
        {"temperature": 0.1, "step_size": 0.5, "momentum": 0.9, "decay": "floor"},
    hdet.LearningRate: {"spread": 1 / 9},
}  # fmt: skip


def test_19_defaults_are_the_papers():
    for made, published in DEFAULTS.items():
        defaults = inspect.signature(made).parameters
        assert {name: defaults[name].default for name in published} == published
    own = {"replicas": hdet.Replicas(0, 2, None), "loss_scale": 0.2, "lr_of_lr": 0.4}
    scheduler = drop_in([parameter()], **ACTS, **own, momentum_of_lr=0.8)
    made = scheduler.ensemble.controller
    assert (made.temperature, made.step_size, made.momentum) == (0.2, 0.4, 0.8)
    assert made.decay is None


def _tables(replicas, knobs, cycles):
    engine = Engine([Value(f"lr/{name}", 0.3) for name in knobs], replicas, Clock(1))
    tables = []
    for _ in range(cycles):
        tables.append(engine.multipliers())
        engine.tick()
        engine.close([1.0] * replicas)
    return torch.tensor(tables, dtype=torch.float64) - 1  # (cycle, knob, replica)


@pytest.mark.parametrize("replicas", [2, 8])
def test_24_knobs_are_uncorrelated_and_every_replica_visits_every_multiplier(replicas):
    """Over cycles, within 4.5 standard deviations of independent permutations. No rank keeps a
    favourable place (its data, its clock)."""
    cycles, knobs = 2000, ["embedding", "no_decay", "transformer"]
    tables = _tables(replicas, knobs, cycles)
    assert tables.sum(2).abs().max() < 1e-12  # every cycle, every knob: the mean multiplier is 1
    bound = 4.5 / math.sqrt(cycles * (replicas - 1))
    columns = tables.transpose(0, 1).reshape(len(knobs), -1)
    shifted = tables.roll(1, 0).transpose(0, 1).reshape(len(knobs), -1)
    correlations = torch.corrcoef(torch.cat([columns, shifted]))
    assert (correlations - torch.eye(2 * len(knobs))).abs().max() < bound
    places = ((tables[:, 0] / 0.3 + 1) / 2 * (replicas - 1)).round().long()
    bound = 4.5 * math.sqrt((1 - 1 / replicas) / replicas / cycles)
    for replica in range(replicas):
        share = torch.bincount(places[:, replica], minlength=replicas) / cycles
        assert (share - 1 / replicas).abs().max() < bound
        assert len(set(places[: 12 * replicas, replica].tolist())) == replicas
