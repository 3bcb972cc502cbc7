"""The same training by hand, in one process, in float64: what every layout is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import hdet
from tests import harness
from tests.harness import policies
from tests.reference import method

RATE, DECAY, SPREAD, INTERVAL = 0.02, 0.1, 0.3, 3
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
"""Of two orders of float64 operations: hundreds of roundings, magnified by Adam."""


def model() -> nn.Sequential:
    return harness.model().double()


def batch(step: int, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = harness.batch(100 * step + shard)
    return x.double(), y.double()


def loss_of(net: Callable[[torch.Tensor], torch.Tensor], data: harness.Batch) -> torch.Tensor:
    return nn.functional.mse_loss(net(data[0]), data[1])


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)


def ensemble_of(optimizer: torch.optim.Optimizer, **settings: Any) -> hdet.Ensemble:
    settings = {"knobs": [hdet.LearningRate(SPREAD)], "every": INTERVAL} | settings
    return hdet.Ensemble(optimizer, **policies(**settings))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor; of a DTensor by a collective inside the replica."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([full(t).flatten() for t in tensors])


class ByHand:
    """N replicas in one process: AdamW at rho times the rate, the mean gradient (or each its own),
    the mean every T steps.

    ``multipliers``: [cycle][replica], as the run recorded them. Replica r has the mini-batches
    r * shards .. (r + 1) * shards - 1 of a step.
    """

    def __init__(
        self, multipliers: Sequence[Sequence[float]], *, make: Callable[[], nn.Module] = model,
        shards: int = 1, local: bool = False, policy: str = "keep",
    ) -> None:  # fmt: skip
        self.multipliers, self.shards, self.local, self.policy = multipliers, shards, local, policy
        self.count = len(multipliers[0])
        self.nets = [make() for _ in range(self.count)]
        self.optimizers = [adamw(net.parameters()) for net in self.nets]
        self.losses = [[0.0] * self.count for _ in multipliers]
        self.weights: list[list[torch.Tensor]] = []  # [step][replica], before an average
        self.means: list[torch.Tensor] = []  # [cycle]
        self.done = 0

    def run(self, steps: int) -> ByHand:
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> None:
        cycle = self.done // INTERVAL
        for r, net in enumerate(self.nets):
            numbers = range(r * self.shards, (r + 1) * self.shards)
            losses = [loss_of(net, batch(self.done, number)) for number in numbers]
            torch.stack(losses).mean().backward()
            self.losses[cycle][r] += sum(loss.item() for loss in losses) / self.shards / INTERVAL
        if not self.local:
            for copies in zip(*(net.parameters() for net in self.nets), strict=True):
                shared = torch.stack([p.grad for p in copies]).mean(0)
                for p in copies:
                    p.grad = shared.clone()
        for optimizer, rho in zip(self.optimizers, self.multipliers[cycle], strict=True):
            optimizer.param_groups[0]["lr"] = RATE * rho
            optimizer.step()
            optimizer.zero_grad()
        self.weights.append([flat(net.parameters()) for net in self.nets])
        self.done += 1
        if self.done % INTERVAL == 0:
            self.converge()

    @torch.no_grad()
    def converge(self) -> None:
        for copies in zip(*(net.parameters() for net in self.nets), strict=True):
            values = [p.flatten().tolist() for p in copies]
            mean = method.converge(values, method.uniform_weights(self.count))
            for p in copies:
                p.copy_(torch.tensor(mean, dtype=p.dtype).view_as(p))
            states = [o.state[p] for o, p in zip(self.optimizers, copies, strict=True)]
            for key in ("exp_avg", "exp_avg_sq") if self.policy == "average" else ():
                average = torch.stack([state[key] for state in states]).mean(0)
                for state in states:
                    state[key].copy_(average)
            for state in states if self.policy == "reset" else ():
                for value in state.values():
                    value.zero_()
        self.means.append(flat(self.nets[0].parameters()))


@dataclass
class Layout:
    """A training on this rank.

    Attributes:
        backward: ``backward(step, observe)`` leaves gradients, and observes losses.
        settings: of the Ensemble.
        between: what is done after the optimizer's step.
        whole: a replica's tensors, from this rank's.
    """

    parameters: Sequence[Any]
    backward: Callable[[int, Any], None]
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    between: Callable[[int], object] = lambda step: None
    whole: Callable[[Any], torch.Tensor] = flat

    def train(self, steps: int) -> Trace:
        records: list[Any] = []
        trace = Trace([], records, [getattr(p, "to_local", p.detach)() for p in self.parameters])
        optimizer = self.optimizer or adamw(self.parameters)
        log = lambda record, step: records.append(record)
        ensemble = ensemble_of(optimizer, log=log, **self.settings)
        for i in range(steps):
            optimizer.zero_grad()
            self.backward(i, ensemble.observe)
            gradient = self.whole([p.grad for p in self.parameters])
            optimizer.step()
            before = self.whole(self.parameters)
            self.between(i)
            ensemble.step()
            trace.steps.append((gradient, before, self.whole(self.parameters)))
        kept = [state["z"].to_local() for state in optimizer.state.values() if "z" in state]
        return trace._replace(kept=kept)


class Trace(NamedTuple):
    """What one rank has seen."""

    steps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """(gradient, parameters before and after `Ensemble.step`)"""
    records: list[dict[str, Any]]
    parts: list[torch.Tensor]
    """This rank's parameters or shards."""
    kept: Sequence[torch.Tensor] = ()
    """What a schedule-free optimizer keeps of them."""

    def weights(self, i: int) -> torch.Tensor:
        return self.steps[i][2]


def check(
    traces: Sequence[Trace], *, shards: int = 1, close: dict[str, float] = CLOSE,
    loss: float = 1e-10, **settings: Any,
) -> ByHand:  # fmt: skip
    """The cycles that are done equal the training by hand, whose ``settings`` these are; ranks of a
    replica follow one another.

    ``close``: tolerance of parameters; ``loss``: of the cycles' losses, relative. All ranks are
    equal after an average, to the bit.
    """
    records = traces[0].records
    steps = len(records) * INTERVAL
    assert len(traces[0].steps) // INTERVAL == len(records) > 0
    multipliers = [record["multipliers"]["lr"] for record in records]
    hand = ByHand(multipliers, shards=shards, **settings).run(steps)
    for rank, trace in enumerate(traces):
        for ours, first, losses in zip(trace.records, records, hand.losses, strict=True):
            assert ours["losses"] == first["losses"] == pytest.approx(losses, rel=loss)
        replica = rank * hand.count // len(traces)
        for i, (_, before, after) in enumerate(trace.steps[:steps]):
            torch.testing.assert_close(before.double(), hand.weights[i][replica], **close)
            if i % INTERVAL == INTERVAL - 1:
                torch.testing.assert_close(after.double(), hand.means[i // INTERVAL], **close)
                assert torch.equal(after, traces[0].weights(i))
    return hand


def parts_and_meets(traces: Sequence[Trace], inside: int = 1, local: bool = False) -> None:
    """Gradients are shared, unless they are ``local``, and parameters equal only inside of a
    replica's ranks and after an average, to the bit."""
    for i, steps in enumerate(zip(*(trace.steps for trace in traces), strict=True)):
        gradients, before, after = zip(*steps, strict=True)
        for rank, gradient in enumerate(gradients):
            assert torch.equal(gradient, gradients[0]) == (not local or rank < inside)
        for weights, meet in ((before, False), (after, i % INTERVAL == INTERVAL - 1)):
            for rank, own in enumerate(weights):
                assert torch.equal(own, weights[0]) == (meet or rank < inside)
                assert torch.equal(own, weights[rank // inside * inside])
