"""FusedScheduleFreeAdamW in a run: z is averaged, put back and saved with the parameters, and the
numbers of its groups are alike on all replicas."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet import checkpoint, converge
from hdet.kernels import numbers
from hdet.trial.rule import STEPS
from tests.distributed import run_ranks
from tests.harness import Run, batch, loss_of, losses_of, model, taught
from tests.trial.common import ALL, auto_run

from .helpers import same, told

Free = hdet.FusedScheduleFreeAdamW
NUMBERS = ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode")
BETA = 0.8
"""beta1, far from 1, so that y and x differ"""


def free(parameters: Any, **settings: Any) -> Free:
    return Free(parameters, **{"betas": (BETA, 0.999), **settings})


LOCAL = {"gradients": "local", "moments": "keep", "ddp": False}
MASTERS = functools.partial(free, master_weights="split")


def run_of(rank: int = 0, **settings: Any) -> Run:
    usual = {"optimizer": free, "scheduler": None, "lr": 0.05, "every": 4, "spread": 0.6}
    return Run(rank, **{**usual, **settings})


def x_and_z(run: Run) -> tuple[Tensor, Tensor]:
    """In float64, of what the optimizer has."""
    params, optimizer = list(run.net.parameters()), run.optimizer
    masters = optimizer.masters(params)
    pairs = zip(params, masters, strict=True)
    exact = [numbers.value_of(p.detach(), m) for p, m in pairs]
    made = [optimizer.state[p].get("z", y) for p, y in zip(params, exact, strict=True)]
    y, z = (torch.cat([t.double().flatten() for t in of]) for of in (exact, made))
    return (y - (1 - BETA) * z) / BETA, z


def numbers_of(run: Run) -> list[Any]:
    return [run.optimizer.param_groups[0][key] for key in NUMBERS]


def everything(run: Run) -> Any:
    return [run.weights(), run.optimizer.state_dict(), run.net.state_dict()]


def one_step(run: Run, lost: int | None = None) -> tuple[Any, Any]:
    """(x, z) before and after what `Ensemble.step` does."""
    loss = run.backward()
    run.optimizer.step()
    if lost == run.rank:
        for p in run.net.parameters():
            p.data.fill_(math.nan)
    before = x_and_z(run)
    run.ensemble.step(loss)
    run.index += 1
    return before, x_and_z(run)


# -- averages --------------------------------------------------------------------------------------

WAYS: dict[str, Any] = {
    "plain": converge.Plain(),
    "compressed": converge.Compressed("bf16"),
}


def averaged(rank: int, world: int, way: str, settings: dict[str, Any]) -> Any:
    """Each step's x and z before and after, then `converge` in the middle of a cycle, in both
    modes."""
    run = run_of(rank, converge=WAYS[way], **settings)
    seen = [one_step(run) for _ in range(11)]
    counted = numbers_of(run)
    before = x_and_z(run)
    run.ensemble.converge()
    seen.append((before, x_and_z(run)))
    run.optimizer.eval()
    evaluated = run.weights().double()
    run.ensemble.converge()  # finds nothing to average, and stays in eval mode
    assert run.ensemble.in_sync and not run.optimizer.param_groups[0]["train_mode"]
    torch.testing.assert_close(run.weights().double(), evaluated, rtol=1e-6, atol=1e-6)
    return seen, evaluated, counted


@pytest.mark.parametrize("way", WAYS)
def test_replicas_average_x_and_z(way: str) -> None:
    """Against the mean in float64. A way of averaging that works on z later than on y, or not at
    all, would change the mean of x, or leave replicas apart."""
    (one, end, counted), (two, other_end, others) = run_ranks(averaged, 2, way, {})
    assert counted == others and torch.equal(end, other_end)
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=2e-6)
    for step, (ours, theirs) in enumerate(zip(one, two, strict=True), 1):
        for place in (0, 1):  # x, z
            a, b = ours[0][place], theirs[0][place]
            after, after_there = ours[1][place], theirs[1][place]
            assert not torch.allclose(a, b, atol=1e-4), "replicas differ"
            is_coarse = way == "compressed" and step == 8
            torch.testing.assert_close(
                (after + after_there) / 2, (a + b) / 2, rtol=0, atol=2e-3 if is_coarse else 2e-6
            )
            if step % 4 == 0:
                assert torch.equal(after, after_there)
    x, x_there = (seen[-1][0][0] for seen in (one, two))
    close(end, (x + x_there) / 2)


@pytest.mark.parametrize("moments", ["keep", "average", "reset"])
def test_moments_do_not_include_z(moments: str) -> None:
    """Nor the numbers of the average, which a reset would begin again."""
    settings = {**LOCAL, "moments": moments}
    (one, end, counted), (two, other_end, others) = run_ranks(averaged, 2, "plain", settings)
    assert counted == others and counted[0] == 11 and torch.equal(end, other_end)
    for (before, after), (before_there, after_there) in zip(one[3::4], two[3::4], strict=True):
        for place in (0, 1):
            mean = (before[place] + before_there[place]) / 2
            torch.testing.assert_close(after[place], mean, rtol=0, atol=2e-6)
            assert torch.equal(after[place], after_there[place])


def parted(rank: int, world: int) -> Any:
    """bfloat16 with masters. Replica 1 skips its first step, as a scaler may, has no gradients of
    the first layer, and breaks at last."""
    net = model()
    run = run_of(rank, net=net, optimizer=MASTERS, dtype=torch.bfloat16, **LOCAL)
    if rank:
        for p in list(net.parameters())[:2]:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    loss = run.backward()
    if not rank:
        run.optimizer.step()
    run.ensemble.step(loss)
    run.steps(2)
    before, after = one_step(run)
    run.steps(3)
    broken = one_step(run, lost=1)
    return before, after, broken


@pytest.mark.filterwarnings("ignore")
def test_a_parameter_without_a_gradient_and_a_replica_that_breaks() -> None:
    (before, after, broken), (before_there, after_there, healed) = run_ranks(parted, 2)
    for place in (0, 1):
        assert torch.equal(after[place], after_there[place])
        mean = (before[place] + before_there[place]) / 2
        torch.testing.assert_close(after[place], mean, rtol=0, atol=2e-6)
        assert torch.equal(healed[1][place], broken[0][place])


# -- a rate that moves -----------------------------------------------------------------------------


def test_steps_after_a_lower_rate_count_as_much_as_those_before() -> None:
    """The largest rate until now weighs: x follows a lowered rate as 1 / t, and does not stand
    still where its own square would be a hundredth."""
    run = run_of(spread=0.0).steps(5)
    sum_of = lambda: run.optimizer.param_groups[0]["weight_sum"]
    shares = []
    for rate in (0.05, 0.005, 0.005, 0.5):
        run.ensemble.set_value("lr", rate)
        before = sum_of()
        run.step()
        shares.append((sum_of() - before) / sum_of())
    assert shares[:3] == pytest.approx([1 / 6, 1 / 7, 1 / 8])
    assert shares[3] == pytest.approx(0.25 / (8 * 0.0025 + 0.25))
    assert run.optimizer.param_groups[0]["lr_max"] == 0.5


def searching(lr: float, **settings: Any) -> Run:
    return auto_run(lr, optimizer=Free, scheduler=None, **settings)


def test_a_trial_that_changes_nothing_leaves_no_trace() -> None:
    make = functools.partial(Free, master_weights="split", warmup_steps=9)
    settings = {"optimizer": make, "scheduler": None, "dtype": torch.bfloat16}
    other, run = auto_run(0.05, controlled=False, **settings), auto_run(0.05, **settings)
    for steps in (1, 10, ALL):
        assert same(everything(run.steps(steps)), everything(other.steps(steps)))
    assert run.search.interval.suggestion == 0.05 and run.search.cost > 100


def test_a_lowered_run_begins_again() -> None:
    """At a rate that breaks, as a new run at the rate that was found."""
    run = searching(30.0)
    while not run.search.done:
        run.step()
    assert run.rate < 1 and numbers_of(run)[:3] == [0, 0.0, -1.0]
    assert torch.equal(run.weights(), searching(1.0).weights())
    new = searching(run.rate, controlled=False)
    new.index = run.index
    assert same(everything(run.steps(5)), everything(new.steps(5)))


def test_an_arm_has_no_warm_up_of_the_optimizers_own() -> None:
    """Else a trial would measure the beginning of the warm-up. What the free reading takes for the
    rate is the one that was used."""
    found = []
    for warmup in (0, 100_000):
        make = functools.partial(Free, warmup_steps=warmup)
        found.append(auto_run(optimizer=make, scheduler=None).steps(ALL).search.interval)
    assert found[0] == found[1]
    moved = []
    for warmup in (0, 20 * STEPS):
        make = functools.partial(Free, warmup_steps=warmup)
        run = auto_run(optimizer=make, scheduler=None, of={"budget": 0.0}).steps(STEPS)
        moved.append(run.search.interval.trial.arms[0].displacement)
        assert run.optimizer.param_groups[0]["warmup_steps"] == warmup
    assert 1 / 3 < moved[1] / moved[0] < 3


def trained(lr: float, **settings: Any) -> float:
    """The held-out loss of x."""
    run = searching(lr, total=1000, **settings).steps()
    run.optimizer.eval()
    return run.validation()


def test_a_rate_30_times_too_low_ends_near_the_best_one() -> None:
    """Which is 0.03, and ends at 0.0107, where the noise alone is 0.01."""
    assert trained(1e-3, controlled=False) > 0.04
    assert trained(1e-3) < 0.0125


@pytest.mark.parametrize("optimizer", [free, MASTERS])
@pytest.mark.parametrize("together", [1, 2, 3])
def test_a_first_cycle_that_is_taken_back_is_a_new_run(together: int, optimizer: Any) -> None:
    dtype = torch.float32 if optimizer is free else torch.bfloat16
    settings = {"together": together, "optimizer": optimizer, "dtype": dtype, "spread": 0.0}
    run = run_of(divergence=hdet.Divergence(rollback="device"), **settings)
    for _ in range(4):
        run.step(report=math.nan if together == 1 else dict.fromkeys(range(together), math.nan))
    new = run_of(**{**settings, "lr": run.rate})
    new.index = run.index
    assert run.history["rolled_back"]
    assert same(run.steps(3).all_weights(), new.steps(3).all_weights())
    assert same([*x_and_z(run)], [*x_and_z(new)])


# -- checkpoints and modes -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_checkpoint_of_co_resident_replicas_is_that_of_any_number(
    mode: str, count: int, tmp_path: Path
) -> None:
    run = run_of(together=2).steps(6)
    run.ensemble.converge()
    getattr(run.optimizer, mode)()
    checkpoint.save(tmp_path / "run", checkpoint.RunState(run.net, run.ensemble))
    other = run_of(together=count).steps(2)
    checkpoint.load(tmp_path / "run", checkpoint.RunState(other.net, other.ensemble))
    assert same(other.all_weights(), [run.weights()] * count)
    assert same([*x_and_z(other)], [*x_and_z(run)])
    other.optimizer.train()
    assert same(other.all_weights(), other.all_weights()[:1] * count)
    other.steps(2)


def test_eval_between_steps() -> None:
    run = run_of(spread=0.0).steps(2)
    run.backward()
    run.optimizer.step()
    run.optimizer.eval()
    before = run.weights(), run.ensemble.steps_done
    with pytest.raises(RuntimeError, match=r"in eval mode: call its eval\(\) after"):
        run.ensemble.step(1.0)
    assert torch.equal(run.weights(), before[0]) and run.ensemble.steps_done == before[1]
    run.optimizer.train()
    run.ensemble.step(1.0)
    run.steps(3)


# -- what is refused -------------------------------------------------------------------------------


def ensemble(**settings: Any) -> Any:
    return run_of(replicas=hdet.Replicas(0, 2, None), **settings)


def find_rate_in_eval_mode() -> None:
    net = model()
    optimizer = Free(net.parameters(), lr=1e-3)
    optimizer.eval()
    hdet.find_rate(net, optimizer, losses_of, [taught(0)] * ALL, total_steps=1000)


OUTER = {**LOCAL, "converge": converge.Outer()}


@pytest.mark.parametrize(
    ("said", "act"),
    [
        ("Outer would move the average", lambda: ensemble(**OUTER)),
        ("would need a z of its own", lambda: ensemble(converge=converge.ExactLocal())),
        ("'beta1' says how", lambda: ensemble(knobs=[hdet.Betas(which=[0])], moments="average")),
        ("'weight_lr_power' says", lambda: ensemble(knobs=[hdet.GroupValue("weight_lr_power")])),
        ("takes no schedule", lambda: hdet.OneCycleAutoLR(free([nn.Parameter(torch.ones(2))]), 1)),
        ("in eval mode: call its train()", find_rate_in_eval_mode),
        ("val_batches keeps", lambda: searching(0.1, of={"val_batches": (loss_of, [batch(0)])})),
    ],
)
def test_refusals(said: str, act: Any) -> None:
    assert said in told(act)
