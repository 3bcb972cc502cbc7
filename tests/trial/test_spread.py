"""Each replica trains arms of its own where nothing communicates with the others, which is found
out."""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.trial.communication import Communication
from hdet.trial.rule import SCORES, STEPS
from tests.distributed import run_ranks
from tests.harness import losses_of, taught

from .common import ALL, noisy, training

Losses = torch.Tensor
Change = Callable[[Losses], Losses]


def all_reduced(losses: Losses) -> Losses:
    total = losses.detach().mean()
    dist.all_reduce(total)
    return losses + 0.01 * total


def functionally_reduced(losses: Losses) -> Losses:
    return losses + 0.01 * functional.all_reduce(losses.detach().mean(), "sum", dist.group.WORLD)


class Backward(torch.autograd.Function):
    """Only its backward pass communicates."""

    @staticmethod
    def forward(ctx: Any, losses: Losses) -> Losses:
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Losses) -> Losses:
        [mean] = [gradient.clone() for gradient in gradients]
        dist.all_reduce(mean)
        return mean / dist.get_world_size()


def sent(losses: Losses) -> Losses:
    other, own = 1 - dist.get_rank(), losses.detach().mean()
    got = torch.zeros_like(own)
    moves = [dist.P2POp(dist.isend, own, other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    return losses + 0.01 * got


def reduced_norm() -> None:
    dist.all_reduce(torch.ones(1))


class Agreeing(torch.optim.AdamW):
    """Its ranks share their work."""

    def step(self, closure: Any = None) -> Any:
        dist.all_reduce(torch.ones(1))
        return super().step(closure)


COMMUNICATING: dict[str, dict[str, Any]] = {
    "all_reduce": {"change": all_reduced},
    "functional collective": {"change": functionally_reduced},
    "backward": {"change": Backward.apply},
    "point to point": {"change": sent},
    "before_step": {"of": {"before_step": reduced_norm}},
    "the optimizer's step": {"optimizer": Agreeing},
}
SILENT: dict[str, dict[str, Any]] = {
    "DDP's gradients and buffers": {},
    "DDP's gradients": {"ddp": {"broadcast_buffers": False}},
    "a run of which a trial costs 3 %": {"total": 6533},
    "a longer one, asked for": {"total": 6534, "of": {"spread_arms": True}},
}
BESIDE: dict[str, dict[str, Any]] = {**COMMUNICATING, "a longer one": {"total": 6534}}


def search(
    rank: int,
    *,
    change: Change = lambda losses: losses,
    when: Container[int] = range(ALL),
    until: int = ALL,
    optimizer: Any = torch.optim.AdamW,
    ddp: dict[str, Any] | None = None,
    of: dict[str, Any] | None = None,
    total: int = 1500,
) -> Any:
    """(what was found, its cost, the report), or how often losses were computed in each step.

    ``change``: what the loop does with its losses, in the steps ``when``. ``of``: settings of the
    `AutoLR`."""
    net = noisy()
    wrapped, calls = DistributedDataParallel(net, **(ddp or {})), [0] * ALL
    auto = hdet.AutoLR(wrapped, **(of or {}))

    def losses_at(step: int) -> Losses:
        calls[step] += 1
        losses = losses_of(wrapped, taught(100 * step + rank))
        return change(losses) if step in when else losses

    made = optimizer(net.parameters(), lr=1e-3)
    settings = {"optimizer": made, "search": auto, "total_steps": total}
    *_, ensemble = training(net, losses_at, until, **settings)
    if until < ALL:
        return calls[:until]
    return auto.interval and auto.interval.to_dict(), auto.cost, ensemble.report()


def searches(rank: int, world: int, *cases: dict[str, Any]) -> list[Any]:
    return [search(rank, **case) for case in cases]


def test_replicas_train_arms_of_their_own_by_default_where_nothing_communicates() -> None:
    """As if it was asked for, at less cost; all ranks decide alike."""
    (one, asked), (other, _) = run_ranks(searches, 2, {}, {"of": {"spread_arms": True}})
    assert one[:2] == asked[:2] == other[:2]
    assert one[1] <= 5 + 3 * (STEPS - 1) + 2 * SCORES


@pytest.mark.slow
def test_arms_stay_beside_each_other_where_a_closure_communicates() -> None:
    """With the same result as if that was asked for."""
    case = {"change": all_reduced}
    for default, asked in run_ranks(searches, 2, case, {**case, "of": {"spread_arms": False}}):
        assert default[:2] == asked[:2] and default[0]["trial"]["smaller_batch"] == 1.0


@pytest.mark.slow
def test_whatever_communicates_is_noticed_in_the_first_step() -> None:
    """Then a step computes the loop's losses and those of five arms, else of three; both ranks
    compute them as often."""
    kinds = {**BESIDE, **SILENT}
    cases = [{**case, "until": 2} for case in kinds.values()]
    for found in run_ranks(searches, 2, *cases):
        expected = {name: [6, 6 if name in BESIDE else 4] for name in kinds}
        assert dict(zip(kinds, found, strict=True)) == expected


def test_a_closure_that_communicates_later_ends_the_trial_on_all_ranks() -> None:
    """And none waits for another, which trains fewer arms."""
    [[one], [other]] = run_ranks(searches, 2, {"change": all_reduced, "when": {10}})
    assert one[:2] == other[:2] and one[0]["suggestion"] == one[0]["rate"]
    assert "communicates in some steps only" in one[2] and "spread_arms=False" in one[2]


def what_is_seen(rank: int, world: int) -> list[bool]:
    """Of messages of other replicas, of this one's, and of what no backend counts."""
    alone = [dist.new_group([each]) for each in range(world)][rank]
    replicas = hdet.Replicas.from_group()
    seen = []

    def see(act: Callable[[], object], counts: bool = True) -> None:
        communication = Communication(replicas)
        if not counts:
            communication._counts = dict  # type: ignore[method-assign, assignment]
        with communication.watch(), suppress(AttributeError, TypeError, RuntimeError):
            act()
        seen.append(communication.was_seen())

    see(lambda: torch.ones(3).sum())
    see(lambda: dist.all_reduce(torch.ones(1), group=alone))
    see(dist.barrier)
    see(lambda: sent(torch.ones(1)), counts=False)
    see(lambda: torch.cuda.CUDAGraph.replay(None), counts=False)  # type: ignore[arg-type]
    see(lambda: dist.all_reduce(torch.ones(1), group=alone), counts=False)
    return seen


def test_what_passes_for_communication() -> None:
    for seen in run_ranks(what_is_seen, 2):
        assert seen == [False, False, True, True, True, False]
