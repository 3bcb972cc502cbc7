"""Defects 1 to 8 of the published code: spread without effect, no averages without the controller, a wrong gamma, a constructor
that communicates.
"""

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec
from tests.defects.common import Watch, drop_in, optimizer_step, parameter, train
from tests.distributed import run_ranks
from tests.reference import method
from tests.reference.schedule import one_cycle

GRID = method.multipliers(4, 0.3)


# -- 1: the spread scaled a list that nobody read ----------------------------------------------------------------------


def _rates_inside_and_at_rest(rank, world, groups):
    scheduler = drop_in([{"params": [parameter()]} for _ in range(groups)], ensemble_lr_spread_ratio=0.3)
    optimizer, inside, rest = scheduler.optimizer, [], []
    optimizer.register_step_pre_hook(lambda opt, *_: inside.append([group["lr"] for group in opt.param_groups]))
    for step in range(12):
        rest.append([group["lr"] for group in optimizer.param_groups])
        optimizer_step(optimizer, step)
        scheduler.step()
    return inside, rest


@pytest.mark.parametrize("groups", [1, 2])
def test_01_spread_takes_effect(groups):
    """The rate that the optimizer sees is base * rho; at rest every rank holds OneCycleLR's own value."""
    ranks = run_ranks(_rates_inside_and_at_rest, 4, groups)
    for step in range(12):
        base = one_cycle(step, 40, 0.05)
        for group in range(groups):
            assert [rest[step][group] for _, rest in ranks] == pytest.approx([base] * 4, rel=1e-12)
            assert sorted(inside[step][group] for inside, _ in ranks) == pytest.approx([base * rho for rho in GRID], rel=1e-12)


# -- 2: the spread came from the constructor's world size, or not at all -----------------------------------------------


def _multipliers(rank, world, arguments):
    scheduler = drop_in([parameter()], ensemble_lr_spread_ratio=0.3, **{k: v if v != "own" else rank for k, v in arguments.items()})
    return scheduler.ensemble.multipliers["lr"]


def _contradiction(rank, world, arguments):
    try:
        drop_in([parameter()], ensemble_lr_spread_ratio=0.3, **arguments)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_02_spread_depends_on_the_group_alone():
    spreads = [
        run_ranks(_multipliers, 4, arguments) for arguments in ({}, {"world_size": 4}, {"rank": "own"}, {"rank": "own", "world_size": 4})
    ]
    assert sorted(spreads[0]) == pytest.approx(GRID)
    assert spreads[1:] == [spreads[0]] * 3
    for size in (1, 8):
        assert all("world_size" in message and str(size) in message for message in run_ranks(_contradiction, 4, {"world_size": size}))
    wrong_rank = run_ranks(_contradiction, 2, {"rank": 1})
    assert "rank" in wrong_rank[0]
    assert wrong_rank[1] == "accepted"


# -- 3: without the controller neither spread nor average --------------------------------------------------------------


def _weights_by_step(rank, world, enable):
    weights = parameter()
    scheduler = drop_in([weights], ensemble_lr_spread_ratio=0.3, enable_auto_lr=enable, auto_lr_warmup_steps=20)
    history, multipliers = [], []
    for step in range(10):
        multipliers.append(scheduler.ensemble.multipliers["lr"])
        optimizer_step(scheduler.optimizer, step)
        history.append(weights.detach().clone())
        assert not scheduler.in_sync
        scheduler.step()
        assert scheduler.in_sync == (step % 5 == 4)
        history.append(weights.detach().clone())
    return torch.stack(history), multipliers


@pytest.mark.parametrize("enable", [False, True], ids=["controller off", "controller on"])
def test_03_spread_and_average_do_not_need_the_controller(enable):
    ranks = run_ranks(_weights_by_step, 4, enable)
    histories = torch.stack([history for history, _ in ranks])  # (replica, 2 * step + after scheduler.step, element)
    for step in range(10):
        before, after = histories[:, 2 * step], histories[:, 2 * step + 1]
        rho = torch.tensor([multipliers[step] for _, multipliers in ranks], dtype=torch.float64)
        away = before - before.mean(0)
        moved = away / (1 - rho)[:, None]  # theta_r = mean + (1 - rho_r) s: the same s for every replica
        assert moved.abs().max() > 1e-4
        assert torch.allclose(moved, moved[0].expand(4, -1), rtol=1e-9, atol=0)
        if step % 5 == 4:
            assert all(torch.equal(after[r], after[0]) for r in range(4))
            assert torch.allclose(after[0], before.mean(0), rtol=1e-14, atol=0)
        else:
            assert torch.equal(after, before)


# -- 4: get_last_lr() did not exist with default arguments -------------------------------------------------------------


def test_04_last_lr_exists_from_the_start_and_after_every_step():
    scheduler = hdet.OneCycleAutoLR(torch.optim.SGD([parameter()], lr=0.1, momentum=0.9), 0.05, 20)
    for step in range(20):
        assert scheduler.get_last_lr() == [scheduler.optimizer.param_groups[0]["lr"]] == pytest.approx([one_cycle(step, 20, 0.05)])
        optimizer_step(scheduler.optimizer, step)
        scheduler.step()


# -- 5: gamma was negative: the rate grew 400-fold ---------------------------------------------------------------------


def _flat_run(rank, world, decay):
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    schedule = OneCycleLR(optimizer, 9e-4, 200, cycle_momentum=False)
    controller = hdet.SoftmaxController(decay=decay)
    ensemble = hdet.Ensemble(
        optimizer, schedule, knobs=[hdet.LearningRate(0.3)], sync=hdet.Sync(10), warmup_steps=100, controller=controller
    )
    rates = []
    for step in range(200):
        optimizer_step(optimizer, step)
        ensemble.step(2.5)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("decay", ["floor", None])
def test_05_flat_losses_end_at_the_schedules_floor(decay):
    rates = run_ranks(_flat_run, 2, decay)[0]
    if decay == "floor":
        assert rates[-1] == pytest.approx(9e-4 / (25 * 1e4), rel=1e-9)
        assert rates[108:] == sorted(rates[108:], reverse=True)
    else:
        assert rates[198] == pytest.approx(9e-4 / (25 * 1e4), rel=1e-9)


@pytest.mark.parametrize("decay, end", [("floor", 9e-4 / 250_000), ("printed", 9e-4 * 400)])
def test_05_decay_over_the_papers_run(decay, end):
    """S = 200 000, S_warm = 100 000, T = 1000: the corrected gamma ends at the floor; the printed one, asked for by name, grows 400 times."""
    engine = Engine([KnobSpec("lr", 1 / 9)], 8, Clock(1000, 100_000, 200_000), hdet.SoftmaxController(decay=decay))
    for _ in range(200):
        engine.step += 999
        engine.position = 999
        assert engine.tick()
        engine.close([1.0] * 8, scheduled=[9e-4], peak=[9e-4], floor=[9e-4 / 250_000])
    assert engine.value(0, 9e-4) == pytest.approx(end, rel=1e-9)


# -- 6: total_steps below the default warm-up of 100 000 ---------------------------------------------------------------


@pytest.mark.parametrize("total", [50_000, 100_000])
def test_06_short_runs(total):
    """Without a controller there is nothing wrong with them; with one they are refused before the optimizer is touched."""
    scheduler = drop_in([parameter()], total)
    train(scheduler, 3)
    assert scheduler.get_last_lr()[0] > 0
    optimizer = torch.optim.AdamW([parameter()], lr=0.1)
    groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=f"{total}.*100000"):
        hdet.OneCycleAutoLR(optimizer, 0.05, total, enable_auto_lr=True)
    assert [dict(group) for group in optimizer.param_groups] == groups
    drop_in([parameter()], 100_001, enable_auto_lr=True, replicas=hdet.Replicas(0, 2, None))


# -- 7: epochs and steps_per_epoch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("enable", [False, True])
def test_07_length_by_epochs(enable):
    optimizer = torch.optim.AdamW([parameter()], lr=0.1)
    pair = hdet.Replicas(0, 2, None)  # two replicas as far as arithmetic goes; nothing communicates in this test
    scheduler = hdet.OneCycleAutoLR(
        optimizer, 0.05, epochs=4, steps_per_epoch=5, enable_auto_lr=enable, auto_lr_warmup_steps=3, replicas=pair
    )
    assert scheduler.total_steps == 20
    train(scheduler, 19)
    assert scheduler.get_last_lr()[0] == pytest.approx(0.05 / 250_000)


# -- 8: the constructor averaged the parameters ------------------------------------------------------------------------


def _noise_then_constructor(rank, world):
    weights = parameter(1000, dtype=torch.float32)
    hdet.warm_noise_([weights], nu=0.01, seed=5)
    noisy = weights.detach().clone()
    with Watch() as watch:
        scheduler = drop_in([weights], ensemble_lr_spread_ratio=0.3, enable_auto_lr=True, auto_lr_warmup_steps=0)
    assert torch.equal(weights, noisy)
    train(scheduler, 5, lambda step: 1.0)
    return noisy, watch.collectives, weights.detach().clone()


def test_08_constructor_neither_communicates_nor_averages():
    ranks = run_ranks(_noise_then_constructor, 4)
    assert [collectives for _, collectives, _ in ranks] == [[]] * 4
    for r in range(1, 4):
        assert not torch.equal(ranks[r][0], ranks[0][0])
        assert torch.equal(ranks[r][2], ranks[0][2])  # the end of the first cycle does average


def test_08_constructor_without_a_process_group():
    train(drop_in([parameter()], interval=2, ensemble_lr_spread_ratio=0.3), 4, lambda step: 1.0)
