"""What a way of averaging promises."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..converge.base import Averaging
from ..converge.sync import Sync
from ..optim import FusedAdamW
from .runs import Loop, run_on_ranks

__all__ = ["AveragingContract"]

EVERY = 3


class AveragingContract:
    """The promises of a `hdet.converge.Averaging`, in runs of two replicas.

    Attributes:
        way: its settings, which must pickle.
        gradients: of the `hdet.Sync`: "shared" or "local".
        error: how far the average that ends a cycle is from the mean, as a part of the largest
            weight; None: it is no mean. What `Ensemble.converge` gives is always exact.
        optimizer: makes one of parameters.
        ranks: ``ranks(function, world, *args)`` starts processes; results by rank.

    Example::

        import hdet.testing

        class TestPlain(hdet.testing.AveragingContract):
            way = hdet.converge.Plain()
    """

    way: Averaging
    gradients = "shared"
    error: float | None = 1e-6
    optimizer: Callable[..., Any] = functools.partial(FusedAdamW, lr=0.02, decay_at="base")
    ranks: Callable[..., list[Any]] = staticmethod(run_on_ranks)

    def test_settings_are_a_value(self) -> None:
        for other in (copy.deepcopy(self.way), pickle.loads(pickle.dumps(self.way))):
            assert (other, hash(other), repr(other)) == (self.way, hash(self.way), repr(self.way))

    def test_one_replica_is_left_alone_unless_the_way_moves_equal_ones(self) -> None:
        plain = Loop(type(self).optimizer, Sync(EVERY))
        run = Loop(type(self).optimizer, self._sync())
        is_moved = not torch.equal(run.step(2 * EVERY), plain.step(2 * EVERY))
        assert is_moved == self.way.moves_equal and run.ensemble.in_sync

    def test_replicas_part_within_a_cycle_and_are_equal_bitwise_at_its_end(self) -> None:
        one, two = self._reports()["steps"]
        for step, ((a, _), (b, _)) in enumerate(zip(one, two, strict=True), 1):
            assert torch.equal(a, b) == (step % EVERY == 0), step

    def test_the_average_at_a_cycles_end_is_the_mean_up_to_the_error_that_is_said(self) -> None:
        if self.error is not None:
            one, two = self._reports()["steps"]
            for end in range(EVERY - 1, len(one), EVERY):
                _check_mean((one[end], two[end]), self.error)

    def test_converge_gives_the_mean_now_and_nothing_is_kept_back(self) -> None:
        _check_mean(self._reports()["converged"], 1e-6)
        assert self._reports()["in sync"] == [True, True]

    def test_a_replica_that_is_lost_adds_nothing_and_takes_the_average(self) -> None:
        one, two = self._reports()["lost"]
        assert torch.equal(one, two) and one.isfinite().all()

    def test_a_converged_run_goes_on_bitwise_also_where_another_state_was_in_place(self) -> None:
        for fresh, live in self._reports()["loaded"]:
            assert torch.equal(fresh, live)

    @classmethod
    def _sync(cls) -> Sync:
        moments = None if cls.gradients == "shared" else "keep"
        return Sync(EVERY, converge=cls.way, gradients=cls.gradients, moments=moments)

    @classmethod
    @functools.cache
    def _reports(cls) -> dict[str, list[Any]]:
        """By name, a report of each rank."""
        found = cls.ranks(_report, 2, cls.optimizer, cls._sync())
        return {name: [report[name] for report in found] for name in found[0]}


def _check_mean(replicas: Sequence[Any], error: float) -> None:
    """[replica]: (weights after an average, before it)."""
    mean = torch.stack([before.double() for _, before in replicas]).mean(0)
    assert float((replicas[0][0] - mean).abs().max()) <= error * float(mean.abs().max())


def _report(optimizer: Callable[..., Any], sync: Sync) -> dict[str, Any]:
    run = Loop(optimizer, sync)
    steps = [(after, run.before) for after in (run.step() for _ in range(4 * EVERY))]
    before = run.step(EVERY - 1)
    run.ensemble.converge()
    converged, in_sync, state = (run.weights(), before), run.ensemble.in_sync, run.saved()
    run.step(EVERY + 2)
    live = run.load(state).step(2 * EVERY)
    run.ensemble.close()
    fresh = Loop(optimizer, sync).load(state)
    loaded = fresh.step(2 * EVERY), live  # ends one step before a cycle does
    lost = fresh.step(is_lost=dist.get_rank() == 1)
    return {"steps": steps, "converged": converged, "in sync": in_sync, "loaded": loaded,
            "lost": lost}  # fmt: skip
