"""One toy problem and one training loop, which all rooms' tests share.

`Run` is a script's loop: DDP where there is a process group, co-resident replicas where they are
asked for, an optimizer, a schedule and an `hdet.Ensemble` on a small regression. A test passes what
is particular to it. Replica k trains on batch ``100 * step + k``.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet

Batch = tuple[torch.Tensor, torch.Tensor]
SYNC = [field.name for field in dataclasses.fields(hdet.Sync)]
VALIDATION = 77_777_777
"""the number of a batch that nobody trains on"""


def policies(**settings: Any) -> dict[str, Any]:
    """Settings of an `hdet.Ensemble` written side by side; those of its average are put into one
    `hdet.Sync`."""
    sync = {name: settings.pop(name) for name in SYNC if name in settings}
    return {**settings, "sync": hdet.Sync(**sync)} if sync else settings


# -- the problem -----------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(key: int, examples: int = 8) -> Batch:
    """The sum of six numbers."""
    x = torch.randn(examples, 6, generator=torch.Generator().manual_seed(key))
    return x, x.sum(1, keepdim=True)


@functools.cache
def teacher() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).requires_grad_(False)


def taught(key: int, examples: int = 32) -> Batch:
    """A target that the model can reach, and noise: over 400 steps of `OneCycleLR` the best peaks
    for AdamW are 0.01 to 0.1."""
    generator = torch.Generator().manual_seed(key)
    x = torch.randn(examples, 6, generator=generator)
    return x, 3 * teacher()(x) + 0.1 * torch.randn(examples, 1, generator=generator)


def losses_of(net: nn.Module, data: Batch) -> torch.Tensor:
    """(examples,), float32"""
    dtype = next(net.parameters()).dtype
    return ((net(data[0].to(dtype)) - data[1].to(dtype)).float() ** 2).mean(1)


def loss_of(net: nn.Module, data: Batch) -> torch.Tensor:
    return losses_of(net, data).mean()


def probe(net: nn.Module, first: int = 10_000, **settings: Any) -> hdet.ProbeController:
    """On batches from number ``first`` on."""
    return hdet.ProbeController(
        loss_of,
        lambda cycle: [batch(first + 8 * cycle + i) for i in range(8)],
        model=net,
        **settings,
    )


# -- the loop --------------------------------------------------------------------------------------


def one_cycle(lr: float, total: int) -> Callable[[torch.optim.Optimizer], Any]:
    return functools.partial(
        torch.optim.lr_scheduler.OneCycleLR, max_lr=lr, total_steps=total, cycle_momentum=False
    )


class Run:
    """A training loop; ``together``: of so many co-resident replicas.

    ``ddp``: does DDP average gradients, where there is a process group?

    ``scheduler`` may be a function of the optimizer, ``search`` and ``controller`` of the model;
    "probe" is `probe`. ``data``: a batch of its number. ``closure``: the losses of a step's batches
    are given to `Ensemble.step` too. Further settings are the Ensemble's, those of its `Sync` side
    by side with the others. ``records``: what it has logged.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        net: nn.Module | None = None,
        together: int = 1,
        optimizer: Any = None,
        scheduler: Any = ("one cycle"),
        lr: float = 3e-3,
        total: int = 40,
        every: int = 5,
        spread: float = 0.3,
        weight_decay: float = 0.0,
        dtype: torch.dtype | None = None,
        search: Any = None,
        controller: Any = None,
        ddp: bool = True,
        data: Callable[[int], Batch] = batch,
        closure: bool = False,
        **settings: Any,
    ) -> None:
        self.rank, self.total, self.index, self.data = rank, total, 0, data
        self.net = (model() if net is None else net).to(dtype=dtype)
        self.wrapped = (
            DistributedDataParallel(self.net) if ddp and dist.is_initialized() else self.net
        )
        self.replicas = hdet.CoresidentReplicas(self.net, together) if together > 1 else None
        make = optimizer or (torch.optim.AdamW if self.replicas is None else hdet.FusedAdamW)
        self.optimizer = make(self.net.parameters(), lr=lr, weight_decay=weight_decay)
        self.scheduler = (
            one_cycle(lr, total)(self.optimizer)
            if scheduler == "one cycle"
            else scheduler and scheduler(self.optimizer)
        )
        if controller == "probe":
            controller = probe(self.wrapped)
        elif not isinstance(controller, hdet.Controller) and controller is not None:
            controller = controller(self.net)
        if search is not None and not isinstance(search, hdet.AutoLR):
            search = search(self.net)
        self.search, self.controller = search, controller
        self.records: list[dict[str, Any]] = []
        self.losses: Callable[[Batch], torch.Tensor] = lambda data: losses_of(self.wrapped, data)
        self.closure: Callable[[Batch], Any] | None = (
            (lambda data: self.losses(data)) if closure else None
        )
        settings = {
            "knobs": [hdet.LearningRate(spread)],
            "total_steps": total,
            "every": every,
            "replicas": self.replicas,
            **settings,
        }
        self.ensemble = hdet.Ensemble(
            self.optimizer,
            self.scheduler,
            search=search,
            controller=controller,
            **policies(**{"log": self._log, **settings}),
        )

    def _log(self, record: dict[str, Any], step: int) -> None:
        self.records.append(record)

    def batches(self) -> list[Batch]:
        """Of this step, one for each replica in this process."""
        first = 100 * self.index + self.rank
        return [
            self.data(first + k) for k in range(1 if self.replicas is None else self.replicas.count)
        ]

    def backward(self, report: dict[int, float] | None = None) -> torch.Tensor:
        """Forward and backward passes of one step; the mean loss.

        Co-resident replicas' losses are observed, or what is to be reported instead.
        """
        self.optimizer.zero_grad()
        if self.replicas is None:
            loss = self.losses(self.batches()[0]).mean()
            loss.backward()
            return loss.detach()
        found = []
        for k, data in enumerate(self.batches()):
            with self.replicas.use(k):
                loss = self.losses(data).mean()
                self.ensemble.observe((report or {}).get(k, loss.detach()))
                (loss / self.replicas.count).backward()
            found.append(loss.detach())
        return torch.stack(found).mean()

    def step(self, report: float | dict[int, float] | None = None) -> torch.Tensor:
        """``report``: in place of the loss; by replica where they are co-resident."""
        loss = self.backward(report if isinstance(report, dict) else None)
        self.optimizer.step()
        told = () if self.replicas is not None else (loss if report is None else report,)
        batches = self.batches() if self.closure else []
        closure = {"closure": lambda: self._closed(batches)} if self.closure else {}
        self.ensemble.step(*told, **closure)
        self.index += 1
        return loss

    def _closed(self, batches: list[Batch]) -> Any:
        assert self.closure is not None
        return (
            self.closure(batches[0])
            if len(batches) == 1
            else torch.cat([self.closure(data) for data in batches])
        )

    def steps(self, count: int | None = None) -> Run:
        """To the end of the run, if no number is given."""
        for _ in range(self.total - self.index if count is None else count):
            self.step()
        return self

    # -- what there is to see ----------------------------------------------------------------------

    def weights(self) -> torch.Tensor:
        """All of the model's, flat."""
        return torch.cat([p.detach().flatten() for p in self.net.parameters()]).clone()

    def all_weights(self) -> list[torch.Tensor]:
        """Of each replica in this process."""
        found = []
        for k in range(1 if self.replicas is None else self.replicas.count):
            with self.replica(k):
                found.append(self.weights())
        return found

    def equal(self) -> bool:
        first, *others = self.all_weights()
        return all(torch.equal(first, other) for other in others)

    @contextmanager
    def replica(self, k: int) -> Iterator[None]:
        if self.replicas is None:
            yield
        else:
            with self.replicas.use(k):
                yield

    @property
    def history(self) -> dict[str, Any]:
        """The last cycle's record."""
        return self.ensemble.history[-1]

    @property
    def rate(self) -> float:
        """At rest, of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def notes(self) -> list[str]:
        return [note for record in self.records for note in record["notes"]]

    def validation(self) -> float:
        """The loss on data of its own."""
        with torch.no_grad():
            return float(loss_of(self.net, taught(VALIDATION, 512)))

    # -- states ------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """What a script saves, through `torch.save`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # in the middle of a cycle it says so
            state = {
                "net": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "ensemble": self.ensemble.state_dict(),
            }
        file = io.BytesIO()
        torch.save({**state, "index": self.index}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def loaded(
        self, state: dict[str, Any], order: tuple[str, ...] = ("net", "optimizer", "ensemble")
    ) -> Run:
        for name in order:
            getattr(self, name).load_state_dict(state[name])
        self.index = state["index"]
        return self


# -- stand-ins -------------------------------------------------------------------------------------


class TwoReplicas(hdet.Replicas):
    """Replica ``index`` of 2, without a process group: enough to see multipliers.

    The other agrees to everything and has the same numbers.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__(index, 2, None)

    def sum_rows(self, *rows: torch.Tensor, purpose: str = "") -> torch.Tensor:
        [row] = rows
        return torch.stack([row, row])


class Elsewhere(torch.Tensor):
    """Takes itself for one on a device, which a read would wait for."""

    is_cpu = False


def sgd(lr: Any = 0.1, **settings: Any) -> torch.optim.SGD:
    """Of one parameter, which has a gradient."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return torch.optim.SGD([parameter], lr=lr, **settings)


def force(run: hdet.Ensemble, *corrections: float) -> None:
    """As if a cycle had ended with these corrections, by knob."""
    for knob, correction in zip(run._schedule.knobs, corrections, strict=True):
        knob.correction = correction
    run._schedule.write()


class Scripted(hdet.Controller):
    """Decides what is written down: factors, cycle by cycle, by knob or for all.

    ``multipliers``: [knob], which all replicas have in the place of those that are drawn."""

    name = "scripted"
    needs_replicas = False

    def __init__(self, factors: Any = (), multipliers: Any = None) -> None:
        super().__init__()
        self.factors, self.given = factors, multipliers
        self.rows: Any = None

    def start(self, run: Any) -> None:
        super().start(run)
        if self.given is not None:
            self.rows = [[rho] * run.replicas for rho in self.given[: len(run.knobs)]]

    def plan(self) -> hdet.Plan:
        return hdet.Plan(multipliers=self.rows)

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        cycle = evidence.cycle
        factors = self.factors[cycle] if cycle < len(self.factors) else 1.0
        rows = [factors] * len(evidence.knobs) if isinstance(factors, float) else factors
        return [hdet.Decision(factor=factor) for factor in rows]
