"""What a way of averaging promises."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..converge.base import Averaging
from ..converge.sync import Sync
from ..ensemble import Ensemble
from ..knobs import LearningRate
from ..optim import FusedAdamW
from .ranks import run_on_ranks

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

        class TestPartWay(hdet.testing.AveragingContract):
            way, error = PartWay(0.5), None
    """

    way: Averaging
    gradients = "shared"
    error: float | None = 1e-6
    optimizer: Callable[..., Any] = functools.partial(FusedAdamW, lr=0.02, decay_at="base")
    ranks: Callable[..., list[Any]] = staticmethod(run_on_ranks)

    def test_settings_are_a_value(self) -> None:
        for other in (copy.deepcopy(self.way), pickle.loads(pickle.dumps(self.way))):
            assert other == self.way and hash(other) == hash(self.way)
            assert repr(other) == repr(self.way)

    def test_one_replica_is_left_alone(self) -> None:
        run, plain = (self._run(way) for way in (self.way, None))
        assert torch.equal(run.step(2 * EVERY), plain.step(2 * EVERY)) and run.ensemble.in_sync

    def test_replicas_part_within_a_cycle_and_are_equal_bitwise_at_its_end(self) -> None:
        one, two = self._reports()["cycles"]
        for step, (a, b) in enumerate(zip(one, two, strict=True), 1):
            assert torch.equal(a, b) == (step % EVERY == 0), step

    def test_the_average_at_a_cycles_end_is_the_mean_up_to_the_error_that_is_said(self) -> None:
        if self.error is not None:
            for before, after in zip(*self._pairs("ends"), strict=True):
                self._check_mean(before, after, self.error)

    def test_converge_gives_the_mean_now_and_nothing_is_kept_back(self) -> None:
        for before, after in zip(*self._pairs("converged"), strict=True):
            self._check_mean(before, after, 1e-6)
        assert self._reports()["in sync"] == [True, True]

    def test_a_replica_that_is_lost_adds_nothing_and_takes_the_average(self) -> None:
        one, two = self._reports()["lost"]
        assert torch.equal(one, two) and one.isfinite().all()

    def test_a_converged_run_goes_on_bitwise_also_where_another_state_was_in_place(self) -> None:
        for fresh, live in self._reports()["loaded"]:
            assert torch.equal(fresh, live)

    # -- runs --------------------------------------------------------------------------------------

    def _run(self, way: Averaging | None, rank: int = 0) -> _Run:
        return _Run(rank, way, self.gradients, type(self).optimizer)

    @classmethod
    @functools.cache
    def _reports(cls) -> dict[str, list[Any]]:
        """By name, a report of each rank."""
        found = cls.ranks(_report, 2, cls.way, cls.gradients, cls.optimizer)
        return {name: [report[name] for report in found] for name in found[0]}

    def _pairs(self, name: str) -> tuple[list[Any], list[Any]]:
        """([average][replica] before it, [average] after it)"""
        one, two = self._reports()[name]
        before = [[a, b] for (a, _), (b, _) in zip(one, two, strict=True)]
        return before, [after for _, after in one]

    def _check_mean(self, before: list[torch.Tensor], after: torch.Tensor, error: float) -> None:
        mean = torch.stack(before).double().mean(0)
        assert float((after - mean).abs().max()) <= error * float(mean.abs().max())


class _Run:
    """A training loop of one replica, with shared gradients under DistributedDataParallel."""

    def __init__(
        self, rank: int, way: Averaging | None, gradients: str, optimizer: Callable[..., Any]
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        is_shared = dist.is_initialized() and gradients == "shared"
        self.model = nn.parallel.DistributedDataParallel(self.net) if is_shared else self.net
        self.optimizer, self.rank, self.index = optimizer(self.net.parameters()), rank, 0
        settings: dict[str, Any] = {} if way is None else {"converge": way}
        if gradients == "local":
            settings |= {"gradients": gradients, "moments": "keep"}
        self.ensemble = Ensemble(
            self.optimizer, knobs=[LearningRate(0.3)], sync=Sync(EVERY, **settings), total_steps=90
        )
        self.before = self.weights()
        """Before the last ``ensemble.step``."""

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()]).clone()

    def step(self, count: int = 1, is_lost: bool = False) -> torch.Tensor:
        for _ in range(count):
            key = torch.Generator().manual_seed(100 * self.index + self.rank)
            x = torch.randn(8, 6, generator=key)
            self.optimizer.zero_grad()
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            self.optimizer.step()
            if is_lost:
                next(self.net.parameters()).data.fill_(torch.nan)
            self.before = self.weights()
            self.ensemble.step(loss)
            self.index += 1
        return self.weights()

    def converge(self) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.weights()
        self.ensemble.converge()
        return before, self.weights()

    def saved(self) -> dict[str, Any]:
        parts = {"net": self.net, "optimizer": self.optimizer, "ensemble": self.ensemble}
        states = {name: part.state_dict() for name, part in parts.items()}
        return copy.deepcopy({**states, "index": self.index})

    def load(self, state: dict[str, Any]) -> _Run:
        state = copy.deepcopy(state)
        for name in ("net", "optimizer", "ensemble"):
            getattr(self, name).load_state_dict(state[name])
        self.index = state["index"]
        return self


def _report(rank: int, world: int, *settings: Any) -> dict[str, Any]:
    run = _Run(rank, *settings)
    cycles, ends = [], []
    for step in range(1, 4 * EVERY + 1):
        cycles.append(run.step())
        if step % EVERY == 0:
            ends.append((run.before, cycles[-1]))
    run.step(EVERY - 1)
    converged = [run.converge()]
    in_sync, state = run.ensemble.in_sync, run.saved()
    run.step(EVERY + 2)
    live = run.load(state).step(2 * EVERY)
    run.ensemble.close()
    fresh = _Run(rank, *settings).load(state)
    loaded = fresh.step(2 * EVERY), live
    fresh.step(EVERY - 1 - fresh.index % EVERY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a replica is left out
        lost = fresh.step(is_lost=rank == 1)
    return {"cycles": cycles, "ends": ends, "converged": converged, "in sync": in_sync,
            "loaded": loaded, "lost": lost}  # fmt: skip
