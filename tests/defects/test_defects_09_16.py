"""Defects 9 to 16 of the published code: random numbers, permutations that disagree, resume, missing losses, types, warnings,
layouts, collectives.
"""

import copy
import math
import random
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist

import hdet
from tests.defects.common import Watch, drop_in, optimizer_step, parameter, train
from tests.distributed import run_ranks
from tests.reference import method

GRID = method.multipliers(4, 0.3)


# -- 9: the constructor seeded torch's generators ----------------------------------------------------------------------


def _random_states(rank, world):
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)
    seeds = []
    for name in ("manual_seed", "seed"):
        setattr(torch.cuda, name, lambda *_: seeds.append("cuda"))  # there may be no GPU here: the call itself would be the defect
    states = [(torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist())]
    weights = parameter(50)
    hdet.warm_noise_([weights], seed=3)
    scheduler = drop_in([weights], ensemble_lr_spread_ratio=0.3, enable_auto_lr=True, auto_lr_warmup_steps=0)
    train(scheduler, 12, lambda step: 1.0 + rank)
    scheduler.load_state_dict(_quiet_state(scheduler))
    scheduler.converge()
    states.append((torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()))
    same = torch.equal(states[0][0], states[1][0])
    return same, states[0][1:] == states[1][1:], seeds


def _quiet_state(scheduler):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mid-cycle: it says so
        return scheduler.state_dict()


def test_09_random_states_are_never_touched():
    assert run_ranks(_random_states, 2) == [(True, True, [])] * 2


# -- 10: permutations from the global generator, which ranks can advance differently -----------------------------------


def _multipliers_with_skewed_generators(rank, world):
    random.seed(rank)
    torch.manual_seed(100 + rank)
    scheduler = drop_in([{"params": [parameter()]}, {"params": [parameter()]}], 60, ensemble_lr_spread_ratio=0.3)
    seen = []
    for cycle in range(12):
        seen.append(dict(scheduler.ensemble.multipliers))
        for step in range(5):
            if rank == 1:
                torch.rand(3)
                random.random()
            train(scheduler, 1, start=5 * cycle + step)
    return seen


def test_10_multipliers_are_a_permutation_whatever_the_generators_do():
    ranks = run_ranks(_multipliers_with_skewed_generators, 4)
    orders = set()
    for cycle in range(12):
        for knob in ("lr/0", "lr/1"):
            drawn = [seen[cycle][knob] for seen in ranks]
            assert sorted(drawn) == pytest.approx(GRID, rel=1e-15)
            orders.add(tuple(drawn))
    assert len(orders) > 6  # fresh ones, not one fixed order


def _disagree(rank, world, key, values):
    scheduler = drop_in([parameter(values[rank] if key == "size" else 6)], **({} if key == "size" else {key: values[rank]}))
    optimizer_step(scheduler.optimizer, 0)
    with pytest.raises(hdet.ReplicaDisagreement) as caught:
        scheduler.step()
    return str(caught.value)


@pytest.mark.parametrize(
    "key, values, named",
    [
        ("seed", [0, 1], "seed"),
        ("interval", [5, 6], "sync_interval"),
        ("size", [6, 7], "shapes"),
        ("ensemble_lr_spread_ratio", [0.1, 0.2], "knobs"),
    ],
)
def test_10_ranks_with_other_settings_are_found_out(key, values, named):
    messages = run_ranks(_disagree, 2, key, values)
    assert messages[0] == messages[1]
    assert named in messages[0]


# -- 11: the state held one rank's multiplier; loading it everywhere collapsed the spread ------------------------------


def _losses(scheduler):
    """Higher rates look better: the controller has something to do."""
    return 3.0 - scheduler.ensemble.multipliers["lr"]


def _run_and_save(rank, world):
    weights = parameter()
    scheduler = drop_in([weights], ensemble_lr_spread_ratio=0.3, enable_auto_lr=True, auto_lr_warmup_steps=0)
    train(scheduler, 15, lambda step: _losses(scheduler))
    saved = copy.deepcopy({"scheduler": scheduler.state_dict(), "optimizer": scheduler.optimizer.state_dict(), "weights": weights.detach()})
    return saved, *_go_on(scheduler, weights)


def _go_on(scheduler, weights):
    bases, multipliers = [scheduler.get_last_lr()[0]], [scheduler.ensemble.multipliers["lr"]]
    for step in range(15, 30):
        train(scheduler, 1, lambda _: _losses(scheduler), start=step)
        bases.append(scheduler.get_last_lr()[0])
        multipliers.append(scheduler.ensemble.multipliers["lr"])
    return bases, multipliers, weights.detach().clone()


def _load_and_go_on(rank, world, saved):
    weights = parameter(fill=0.0)
    scheduler = drop_in([weights], ensemble_lr_spread_ratio=0.3, enable_auto_lr=True, auto_lr_warmup_steps=0)
    weights.data.copy_(saved["weights"])
    scheduler.optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    return _go_on(scheduler, weights)


def test_11_one_state_resumes_every_rank_and_any_number_of_them():
    whole = run_ranks(_run_and_save, 4)
    saved = whole[0][0]
    assert all(other["scheduler"] == saved["scheduler"] for other, *_ in whole)  # nothing of a rank in it
    resumed = run_ranks(_load_and_go_on, 4, saved)
    for (_, bases, multipliers, weights), (bases_after, multipliers_after, weights_after) in zip(whole, resumed, strict=True):
        assert bases_after == bases
        assert multipliers_after == multipliers
        assert torch.equal(weights, weights_after)
    for count in (2, 3):
        other = run_ranks(_load_and_go_on, count, saved)
        assert [bases[0] for bases, *_ in other] == [whole[0][1][0]] * count
        assert sorted(multipliers[0] for _, multipliers, _ in other) == pytest.approx(method.multipliers(count, 0.3), rel=1e-15)
        assert len({tuple(bases) for bases, *_ in other}) == 1
    assert whole[0][1][0] > drop_in_rate(15)  # the controller had moved: there was something to lose


def drop_in_rate(step):
    scheduler = drop_in([parameter()])
    train(scheduler, step)
    return scheduler.get_last_lr()[0]


# -- 12: a step without a loss, a warm-up of 0, a loss that is a number ------------------------------------------------


def _without_losses(rank, world, loss):
    scheduler = drop_in([parameter()], ensemble_lr_spread_ratio=0.3, enable_auto_lr=True, auto_lr_warmup_steps=0)
    train(scheduler, 11, lambda step: loss)
    return scheduler.ensemble.cycle, scheduler.ensemble.corrections["lr"], scheduler.ensemble.history["losses"]


@pytest.mark.parametrize("loss, recorded", [(None, None), (3, 3.0), (3.0, 3.0)])
def test_12_the_loss_is_optional_and_may_be_a_number(loss, recorded):
    assert run_ranks(_without_losses, 2, loss) == [(2, 1.0, [recorded] * 2)] * 2


def _one_rank_without(rank, world, missing):
    scheduler = drop_in([parameter()], ensemble_lr_spread_ratio=0.3, enable_auto_lr=True, auto_lr_warmup_steps=0)
    train(scheduler, 10, lambda step: missing if rank == 1 else torch.tensor(_losses(scheduler)))
    return scheduler.ensemble.corrections["lr"], scheduler.ensemble.history


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf")])
def test_12_a_rank_without_a_usable_loss_is_left_out(missing):
    """The other three still decide; what they decide is finite and the same everywhere."""
    ranks = run_ranks(_one_rank_without, 4, missing)
    assert len({correction for correction, _ in ranks}) == 1
    assert 1.0 < ranks[0][0] < 1.2
    record = ranks[0][1]
    assert record["left_out"] == [1]
    assert record["losses"][1] is None
    assert None not in record["losses"][:1] + record["losses"][2:]


# -- 13: the first average turned the group's rate into a tensor -------------------------------------------------------


def _rate_types(rank, world, tensor):
    groups = [{"params": [parameter()], "lr": torch.tensor(0.1) if tensor else 0.1} for _ in range(2)]
    scheduler = drop_in(groups, ensemble_lr_spread_ratio=0.3, enable_auto_lr=True, auto_lr_warmup_steps=0)
    rates = [group["lr"] for group in groups] if tensor else None
    types, same = set(), True
    for step in range(12):
        train(scheduler, 1, lambda _: 3.0 - scheduler.ensemble.multipliers["lr/0"], start=step)
        types |= {type(group["lr"]).__name__ for group in scheduler.optimizer.param_groups}
        same = same and (rates is None or all(a is g["lr"] for a, g in zip(rates, scheduler.optimizer.param_groups, strict=True)))
    return types, same, scheduler.ensemble.corrections["lr/0"] != 1.0


@pytest.mark.parametrize("tensor", [False, True])
def test_13_a_rate_keeps_its_type(tensor):
    assert run_ranks(_rate_types, 2, tensor) == [({"Tensor" if tensor else "float"}, True, True)] * 2


# -- 14: a warning every step ------------------------------------------------------------------------------------------


def _warnings(rank, world):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler = drop_in([parameter()], ensemble_lr_spread_ratio=0.3, enable_auto_lr=True, auto_lr_warmup_steps=5)
        train(scheduler, 15, lambda step: torch.tensor(1.0, requires_grad=True) * 2)
        scheduler.load_state_dict(scheduler.state_dict())
        scheduler.get_last_lr()
    return [str(warning.message) for warning in caught]


def test_14_no_warnings():
    assert run_ranks(_warnings, 2) == [[], []]


# -- 15: averages over the whole world, whatever the layout ------------------------------------------------------------


def _tensor_parallel(rank, world):
    """2 x 2: ranks (0, 1) are the shards of replica 0, ranks (2, 3) those of replica 1. Peers hold the same shard: (0, 2) and (1, 3)."""
    peers = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    shard = parameter(fill=10.0 * (rank % 2 + 1))
    scheduler = drop_in(
        [shard], ensemble_lr_spread_ratio=0.3, enable_auto_lr=True, auto_lr_warmup_steps=0, replicas=hdet.Replicas.from_group(peers)
    )
    multiplier = scheduler.ensemble.multipliers["lr"]
    train(scheduler, 5, lambda step: 2.0 - scheduler.ensemble.multipliers["lr"])
    return shard.detach().clone(), multiplier, scheduler.ensemble.corrections["lr"]


def test_15_only_peers_are_averaged():
    shards, multipliers, corrections = zip(*run_ranks(_tensor_parallel, 4), strict=True)
    assert torch.equal(shards[0], shards[2])
    assert torch.equal(shards[1], shards[3])
    assert (shards[1] - shards[0]).min() > 9  # shards of one replica stay what they are
    assert multipliers[0] == multipliers[1] != multipliers[2] == multipliers[3]
    assert len(set(corrections)) == 1
    assert corrections[0] != 1.0


def _dtensor(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    weights = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    with pytest.raises(ValueError, match="DTensor"):
        hdet.Ensemble(optimizer)
    with pytest.raises(ValueError, match="sharded"):
        hdet.OneCycleAutoLR(optimizer, 0.1, 20, cycle_momentum=False)
    return optimizer.param_groups[0]["lr"]


def test_15_sharded_parameters_are_refused_by_name():
    assert run_ranks(_dtensor, 2) == [0.1, 0.1]


def _outsider(rank, world):
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="not a member"):
            hdet.Replicas.from_group(group)
    return hdet.Replicas.from_group(group).count if rank == 0 else None


def test_15_a_rank_outside_the_group_is_told():
    assert run_ranks(_outsider, 2) == [1, None]


# -- 16: a blocking collective per parameter, and host synchronisation -------------------------------------------------


def _traffic(rank, world, tensor):
    weights = [parameter(50, dtype=torch.float32) for _ in range(300)]
    groups = [{"params": weights[i::2], "lr": torch.tensor(0.1) if tensor else 0.1} for i in range(2)]
    scheduler = drop_in(groups, ensemble_lr_spread_ratio=0.3, enable_auto_lr=True, auto_lr_warmup_steps=0)
    collectives, host_reads = [], []
    for step in range(15):
        optimizer_step(scheduler.optimizer, step)
        loss = torch.tensor(1.0 + rank)
        with Watch() as watch:
            scheduler.observe(loss, weight=2.0)
            scheduler.step(loss)
        collectives.append(len(watch.collectives))
        host_reads.append(watch.host_reads)
    return collectives, host_reads


@pytest.mark.parametrize("tensor", [False, True], ids=["float rates", "tensor rates"])
def test_16_collectives_and_host_reads(tensor):
    """Inside a cycle none of either; at its end one collective for the slots and one for each half of the bucket, for 300 tensors."""
    for collectives, host_reads in run_ranks(_traffic, 2, tensor):
        assert collectives[0] <= 2  # the ranks' settings and their gradients are compared once
        inside = [step for step in range(1, 15) if step % 5 != 4]
        assert [collectives[step] for step in inside] == [0] * len(inside)
        assert [host_reads[step] for step in inside] == [0] * len(inside)
        assert max(collectives[step] for step in (4, 9, 14)) <= 3


def _buckets(rank, world, bucket_bytes):
    weights = [parameter(1000, dtype=torch.float32) for _ in range(10)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    ensemble = hdet.Ensemble(optimizer, sync=hdet.Sync(2, bucket_bytes=bucket_bytes))
    with Watch() as watch:
        for step in range(2):
            optimizer_step(optimizer, step)
            ensemble.step()
    return len(watch.collectives), torch.stack([w.detach() for w in weights])


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 20_000, 8_000, 2_000])
def test_16_collectives_grow_with_the_bytes_not_with_the_tensors(bucket_bytes):
    """40 000 bytes in buckets of two halves each; two more collectives compare the settings and gather the slots."""
    (count, first), (_, second) = run_ranks(_buckets, 2, bucket_bytes)
    buckets = math.ceil(40_000 / bucket_bytes)
    assert buckets <= count - 2 <= 2 * buckets + 1
    assert torch.equal(first, second)
