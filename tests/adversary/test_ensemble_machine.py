"""An Ensemble in one process under whatever order of calls, errors and foreign writes, beside a
twin in plain torch.

The twin has one model and one optimizer a replica, a scheduler of its own that nobody corrects, and
three counters. After each rule it says what must be: the base value at rest (schedule times
correction), the rate that the inner ``step`` has seen (times the replica's multiplier), counts, and
every parameter, bit for bit.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn
from torch.optim import lr_scheduler as torchs

import hdet
from tests.harness import Scripted

from .common import Boom, bits, quiet, trial

RATE, TOTAL = 0.0625, 400
OPTIMIZERS: dict[str, type] = {
    "SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW,
    "FusedSGD": hdet.FusedSGD, "FusedAdamW": hdet.FusedAdamW,
}  # fmt: skip
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: torchs.StepLR(optimizer, 7, 0.5),
    "cosine": lambda optimizer: torchs.CosineAnnealingLR(optimizer, 60),
    "lambda": lambda optimizer: torchs.LambdaLR(optimizer, lambda t: 8 / (8 + t)),
    "onecycle": lambda optimizer: torchs.OneCycleLR(optimizer, RATE, TOTAL, cycle_momentum=False),
}
OWN = ["step", "cosine", "lambda"]
"""those that a user steps without the Ensemble"""


class Decides(Scripted):
    """Decides what the test has written down for a cycle."""

    def __init__(self, script: list[float], multipliers: list[float] | None) -> None:
        super().__init__(multipliers=multipliers)
        self.script, self.asked, self.bomb = script, 0, False

    def decision(self, cycle: int, correction: float) -> float:
        """The factor that is written for the cycle, as long as training bears it."""
        factor = self.script[cycle % len(self.script)] if self.script else 1.0
        return factor if 0.25 <= correction * factor <= 4 else 1.0

    def learn(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        if self.bomb:
            raise Boom("controller")
        assert all(loss is None or math.isfinite(loss) for loss in evidence.losses)
        self.asked += 1
        factor = self.decision(evidence.cycle, evidence.corrections[0])
        return [hdet.Decision(factor=factor)] * len(evidence.knobs)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: Any) -> None:
        self.asked = int(state["asked"])


def watched(kind: type) -> type:
    """Notes the rates at which it is stepped, and can be told to raise."""

    class Watched(kind):
        bomb, seen = False, ()

        def step(self, closure: Any = None) -> Any:
            self.seen = [float(group["lr"]) for group in self.param_groups]
            if self.bomb:
                raise Boom("optimizer")
            return super().step(closure)

    return Watched


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))


def loss_of(net: nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
    return 1e-3 * (net(x) - x.sum(1, keepdim=True)).square().mean()  # small: rates become high


def optimizer_of(
    net: nn.Module, setup: dict[str, Any], cls: Callable[[type], type] = lambda kind: kind
) -> Any:
    settings = {"momentum": 0.9} if setup["optimizer"].endswith("SGD") else {"weight_decay": 0.01}
    body, head = list(net[0].parameters()), list(net[2].parameters())
    if setup["frozen"]:
        for p in head:
            p.requires_grad_(False)
    groups = [{"params": body}, {"params": head, "lr": RATE / 2}]
    return cls(OPTIMIZERS[setup["optimizer"]])(groups, lr=RATE, **settings)


class Shadow:
    """Counters, the schedule that nobody corrects, and the correction."""

    def __init__(self, setup: dict[str, Any], script: list[float]) -> None:
        self.setup, self.script = setup, script
        groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": RATE / 2}]
        self.optimizer = torch.optim.SGD(groups, lr=RATE)
        self.scheduler = SCHEDULERS[setup["scheduler"]](self.optimizer)
        self.own = SCHEDULERS[setup["own"]](self.optimizer)
        self.step = self.position = self.cycle = 0
        self.correction, self.temperature = 1.0, 2.0
        self.corrected = [0, 1] if setup["knob"] == "all" else [0]

    def write(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def advance(self, scheduler: Any) -> None:
        with quiet():  # this optimizer never steps
            scheduler.step()

    def base(self) -> list[float]:
        factors = [self.correction if g in self.corrected else 1.0 for g in (0, 1)]
        pairs = zip(self.optimizer.param_groups, factors, strict=True)
        return [group["lr"] * factor for group, factor in pairs]

    def ends(self) -> bool:
        return self.position >= self.setup["interval"]

    def decide(self, factor: float) -> None:
        if self.step - self.setup["interval"] >= self.setup["warmup"]:
            self.correction *= factor
        self.cycle, self.position = self.cycle + 1, 0


SETUPS: dict[str, list[Any]] = {
    "replicas": [1, 1, 2, 3],
    "optimizer": list(OPTIMIZERS),
    "schedulers": [*((name, "none") for name in SCHEDULERS), *(("none", own) for own in OWN)],
    "knob": ["all", "first"],
    "spread": [0.0, 0.25, 0.25],
    "interval": [1, 2, 3],
    "warmup": [0, 3],
    "frozen": [False, True],
    "rho": [1.0, 1.25],
    "temperature": [False, True],
}
SETUP = st.fixed_dictionaries({key: st.sampled_from(of) for key, of in SETUPS.items()})
SCRIPT = st.lists(st.sampled_from([2.0, 0.5, 4.0, 0.25, 1.0]), max_size=4)


class EnsembleMachine(RuleBasedStateMachine):
    # -- the beginning -----------------------------------------------------------------------------

    @initialize(setup=SETUP, script=SCRIPT)
    def begin(self, setup: dict[str, Any], script: list[float]) -> None:
        if setup["replicas"] > 1 and not setup["optimizer"].startswith("Fused"):
            setup = {**setup, "optimizer": f"Fused{setup['optimizer']}"}
        setup = dict(zip(("scheduler", "own"), setup["schedulers"], strict=True)) | setup
        self.setup, self.script, self.count = setup, script, setup["replicas"]
        self.number, self.gradient, self.saved = 0, False, None
        self.shadow = Shadow(setup, script)
        self.stepped = self.log_bomb = False
        self.broken_losses: set[int] = set()
        self.notes: list[tuple[dict[str, Any], int]] = []
        self.random = torch.get_rng_state()
        self.temperature = 2.0
        self.build()
        self.twins = [network() for _ in range(self.count)]
        self.steppers = [optimizer_of(net, setup) for net in self.twins]

    def build(self) -> None:
        """Model, optimizer and all that drives it, as a script makes them."""
        self.net = network()
        self.optimizer = optimizer_of(self.net, self.setup, watched)
        self.scheduler = SCHEDULERS[self.setup["scheduler"]](self.optimizer)
        self.own = SCHEDULERS[self.setup["own"]](self.optimizer)
        self.replicas = hdet.CoresidentReplicas(self.net, self.count) if self.count > 1 else None
        self.drive()

    def drive(self) -> None:
        groups, spread = None if self.setup["knob"] == "all" else [0], self.setup["spread"]
        knobs: list[Any] = [hdet.LearningRate(spread, groups=groups)]
        if self.setup["temperature"]:
            access = lambda: self.temperature, lambda x: setattr(self, "temperature", x)
            flags = {"valid_on_train_loss": True, "affects_eval_loss": True}
            knobs.append(hdet.Scalar("temperature", *access, spread=0.5 * spread, **flags))
        # One replica plays another one's part, with this multiplier; no others are needed to see
        # where it acts.
        alone = [self.setup["rho"]] * len(knobs) if self.replicas is None else None
        self.controller = Decides(self.script, alone)
        with quiet():
            self.ensemble = hdet.Ensemble(
                self.optimizer, self.scheduler, knobs=knobs, replicas=self.replicas,
                sync=hdet.Sync(self.setup["interval"]), warmup_steps=self.setup["warmup"],
                controller=self.controller, divergence=hdet.Divergence(peer_bound=None),
                log=self.log,
            )  # fmt: skip
        self.knob = self.ensemble.knobs[0].name

    def log(self, record: dict[str, Any], step: int) -> None:
        self.notes.append((record, step))
        if self.log_bomb:
            raise Boom("log")

    # -- what is looked at -------------------------------------------------------------------------

    @contextmanager
    def replica(self, k: int) -> Iterator[None]:
        if self.replicas is None:
            yield
        else:
            with self.replicas.use(k):
                yield

    def weights(self, k: int) -> list[torch.Tensor]:
        with self.replica(k):
            return [p.detach().clone() for p in self.net.parameters()]

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def facts(self) -> Any:
        """All that a refused call must leave as it was."""
        own = self.own.state_dict() if self.own else {}
        weights = [self.weights(k) for k in range(self.count)]
        return bits(
            [weights, self.optimizer.state_dict(), {**own, "lr_lambdas": None}, self.state(),
             self.ensemble.multipliers, self.temperature, self.ensemble.cycle,
             torch.get_rng_state()]
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        with quiet():
            return self.ensemble.state_dict()

    def multipliers(self, knob: int = 0) -> list[float]:
        found, name = [], self.ensemble.knobs[knob].name
        for k in range(self.count):
            with self.replica(k):
                found.append(self.ensemble.multipliers[name])
        return found if self.replicas else [self.setup["rho"]]

    @invariant()
    def all_is_well(self) -> None:
        self.base_values_at_rest()
        state, shadow = self.state(), self.shadow
        counted = state["step"], state["position"], self.ensemble.cycle
        assert counted == (shadow.step, shadow.position, shadow.cycle)
        assert self.ensemble.corrections[self.knob] == pytest.approx(shadow.correction, rel=1e-12)
        weights = [bits(self.weights(k)) for k in range(self.count)]
        assert weights == [bits(list(twin.parameters())) for twin in self.twins]
        assert not self.ensemble.in_sync or all(row == weights[0] for row in weights)
        assert json.loads(json.dumps(state, allow_nan=False)) == state, "plain"
        assert torch.equal(torch.get_rng_state(), self.random)

    def base_values_at_rest(self) -> None:
        base, shadow = self.shadow.base(), self.shadow
        assert self.rates() == pytest.approx(base, rel=1e-12, abs=0)
        if shadow.correction == 1:  # torch's own values, to the bit
            assert self.rates() == base
        assert self.ensemble.values()[self.knob] == self.rates()[0]
        correction = shadow.correction if self.setup["temperature"] else 1.0
        assert self.temperature == pytest.approx(shadow.temperature * correction, rel=1e-12)

    # -- the loop ----------------------------------------------------------------------------------

    @rule()
    def backward(self) -> None:
        """Forward and backward of all replicas, and the losses that they see."""
        for k in range(self.count):
            with self.replica(k):
                loss = loss_of(self.net, 10 * self.number + k)
                self.ensemble.observe(loss)
            (loss / self.count).backward()
        shared = [None if p.grad is None else p.grad.clone() for p in self.twins[0].parameters()]
        for k, twin in enumerate(self.twins):  # one after the other into one gradient
            for p in twin.parameters():
                p.grad = None
            (loss_of(twin, 10 * self.number + k) / self.count).backward()
            shared = [
                p.grad if total is None or p.grad is None else total + p.grad
                for total, p in zip(shared, twin.parameters(), strict=True)
            ]
        for twin in self.twins:
            for p, total in zip(twin.parameters(), shared, strict=True):
                p.grad = None if total is None else total.clone()
        self.number += 1
        self.gradient = True

    @precondition(lambda self: self.gradient)
    @rule(closure=st.booleans())
    def optimizer_step(self, closure: bool) -> None:
        multipliers = self.multipliers()
        given = [lambda: torch.tensor(1.0)] if closure and self.count == 1 else []
        self.optimizer.step(*given)
        seen, stock = list(self.optimizer.seen), not self.setup["optimizer"].startswith("Fused")
        rho = multipliers[0] if stock else 1.0  # fused: multipliers are beside it
        base, corrected = self.shadow.base(), self.shadow.corrected
        expected = [rate * (rho if g in corrected else 1.0) for g, rate in enumerate(base)]
        assert seen == pytest.approx(expected, rel=1e-12, abs=0)
        self.base_values_at_rest()  # the multiplier is not there any more
        self.twin_step(seen, [1.0] if stock else multipliers)
        self.stepped = any(seen)

    def twin_step(self, rates: list[float], multipliers: list[float]) -> None:
        for rho, stepper in zip(multipliers, self.steppers, strict=True):
            for g, group in enumerate(stepper.param_groups):
                group["lr"] = rates[g] * rho if g in self.shadow.corrected else rates[g]
            stepper.step()
            stepper.zero_grad()
        self.optimizer.zero_grad()
        self.gradient = False

    # Hypothesis leaves some rules out of each example: several of training, so that runs get
    # somewhere.

    @precondition(lambda self: not self.gradient)
    @rule(count=st.integers(1, 7))
    def train(self, count: int) -> None:
        """The usual order."""
        for _ in range(count):
            self.backward()
            self.optimizer_step(False)
            self.ensemble_step(None)
            self.all_is_well()

    @precondition(lambda self: not self.gradient)
    @rule(cycles=st.integers(1, 4))
    def train_to_the_end_of_a_cycle(self, cycles: int) -> None:
        self.train(cycles * self.setup["interval"] - self.shadow.position % self.setup["interval"])

    @precondition(lambda self: not self.gradient)
    @rule(k=st.integers(0, 2))
    def train_with_a_loss_that_is_not_finite(self, k: int) -> None:
        """Its replica is left out of the cycle's average and of the evidence."""
        self.ensemble.observe(float("nan"), replica=k % self.count)
        self.broken_losses.add(k % self.count)
        self.train_to_the_end_of_a_cycle(1)

    @rule(bomb=st.sampled_from([None, None, None, "log", "controller", "scheduler"]))
    def ensemble_step(self, bomb: str | None) -> None:
        """Without an optimizer step, or several for one; with an error in the user's own code."""
        self.log_bomb, self.controller.bomb = bomb == "log", bomb == "controller"
        shadow, stepped, told = self.shadow, self.stepped, len(self.notes)
        self.stepped = False
        multipliers = self.multipliers()
        try:
            with quiet(), broken(self.scheduler if bomb == "scheduler" else None):
                self.ensemble.step()
            failed = None
        except Boom as error:
            failed = str(error)
        finally:
            self.log_bomb = self.controller.bomb = False
        if bomb == "scheduler" and self.scheduler is not None:
            assert failed == "scheduler"
            return
        if shadow.scheduler is not None:
            shadow.advance(shadow.scheduler)
        if stepped:
            shadow.step, shadow.position = shadow.step + 1, shadow.position + 1
        if not stepped or not shadow.ends():
            assert failed is None and len(self.notes) == told
            return
        everyone = set(range(self.count))
        self.average(everyone - self.broken_losses or everyone)
        acts = shadow.step - self.setup["interval"] >= self.setup["warmup"]
        if bomb == "controller" and acts:
            assert failed == "controller"
            return
        shadow.decide(self.controller.decision(shadow.cycle, shadow.correction))
        self.broken_losses = set()
        assert failed == ("log" if bomb == "log" else None)
        record, step = self.notes[-1]
        assert len(self.notes) == told + 1
        assert (step, record["cycle"]) == (shadow.step, shadow.cycle - 1)
        assert self.replicas is None or record["multipliers"][self.knob] == multipliers
        assert record["values"][self.knob] == pytest.approx(shadow.base()[0], rel=1e-12)

    def average(self, healthy: set[int]) -> None:
        """Replicas are equal now; where they were equal already they have not moved."""
        ours = [self.weights(k) for k in range(self.count)]
        assert all(bits(row) == bits(ours[0]) for row in ours)
        params = [list(twin.parameters()) for twin in self.twins]
        if all(bits(row) == bits(params[0]) for row in params):
            return  # compared by the invariant
        for i, mean in enumerate(ours[0]):
            expected = torch.stack([params[k][i].detach() for k in sorted(healthy)]).mean(0)
            torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-8)
        with torch.no_grad():
            for row in params:
                for p, mean in zip(row, ours[0], strict=True):
                    p.copy_(mean)

    @rule()
    def converge(self) -> None:
        with quiet():
            self.ensemble.converge()
        self.average(set(range(self.count)))
        assert self.ensemble.in_sync
        self.broken_losses = set()

    @rule(what=st.integers(0, 13))
    def nothing_happens(self, what: int) -> None:
        """A look, an error of the user's own, or a call that is refused: nothing has changed."""
        if what == 0:
            self.look()
        elif what < 4:
            self.error_of_the_users(["optimizer", "closure", "explore"][what - 1])
        else:
            self.refused(what - 4)

    def look(self) -> None:
        """Evaluation, `explore`, values: nothing moves."""
        before, rest = self.facts(), self.temperature
        self.net.eval()
        with torch.no_grad(), self.replica(self.count - 1), self.ensemble.explore():
            loss_of(self.net, 1)
            if self.setup["temperature"]:
                expected = rest * self.multipliers(1)[self.count - 1]
                assert self.temperature == expected == self.ensemble.value("temperature")
            assert self.ensemble.value(self.knob) == self.rates()[0]
            assert self.ensemble.multipliers[self.knob] == self.multipliers()[self.count - 1]
        self.net.train()
        assert self.facts() == before and self.temperature == rest

    # -- errors ------------------------------------------------------------------------------------

    def error_of_the_users(self, where: str) -> None:
        """Raised inside a step or an `explore`: values are back, and nothing has been counted."""

        def explode() -> torch.Tensor:
            raise Boom("closure")

        before = self.facts()
        with pytest.raises(Boom):
            if where == "explore":
                with self.replica(0), self.ensemble.explore():  # a forward pass out of memory
                    raise Boom("explore")
            elif where == "optimizer" or self.count > 1:
                self.optimizer.bomb = True
                self.optimizer.step()
            else:
                self.optimizer.step(explode)
        self.optimizer.bomb = False
        assert self.facts() == before

    def exploring(self, call: Callable[[], Any]) -> None:
        with self.replica(0), self.ensemble.explore():
            call()

    def refused(self, what: int) -> None:
        """What cannot be is refused, and nothing has changed."""
        before, state = self.facts(), self.state()
        lacking = {key: value for key, value in state.items() if key != "cycle"}
        calls: list[Callable[[], Any]] = [
            lambda: self.ensemble.observe(torch.zeros(3), replica=0),
            lambda: self.ensemble.observe(1.0, weight=-1.0, replica=0),
            lambda: self.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
            lambda: hdet.Ensemble(self.optimizer, replicas=self.replicas),
            lambda: self.ensemble.load_state_dict(lacking),
            lambda: self.ensemble.load_state_dict({**state, "corrections": [float("nan")]}),
            lambda: self.ensemble.load_state_dict({**state, "controller": "another"}),
            lambda: self.exploring(self.ensemble.step),
            lambda: self.exploring(self.ensemble.converge),
            lambda: self.ensemble.value("no such knob"),
        ]
        with pytest.raises((ValueError, TypeError)), quiet():
            calls[what]()
        assert self.facts() == before

    @precondition(lambda self: self.count > 1)
    @rule(k=st.integers(0, 2))
    def a_replica_is_lost(self, k: int) -> None:
        """Its weights are not finite: it is left out of the average and takes it."""
        with torch.no_grad(), self.replica(k % self.count):
            next(self.net.parameters())[0].fill_(math.inf)
            next(self.twins[k % self.count].parameters())[0].fill_(math.inf)
        with pytest.warns(UserWarning, match=f"replica {k % self.count} left out of the average"):
            self.ensemble.converge()
        assert all(weight.isfinite().all() for weight in self.weights(k % self.count))
        self.average(set(range(self.count)) - {k % self.count})
        self.broken_losses = set()

    @precondition(lambda self: not self.gradient)
    @rule()
    def a_gradient_is_not_finite(self) -> None:
        """Shared, so all replicas are lost, which is said at the end of the cycle, at base values;
        a checkpoint from before goes on."""
        self.converge()
        self.keep()
        self.gradient = False
        for p in self.net.parameters():
            p.grad = torch.full_like(p, math.nan) if p.requires_grad else None
        with pytest.raises(hdet.ReplicasDiverged), quiet():
            for _ in range(self.setup["interval"] + 1):
                self.optimizer.step()
                self.ensemble.step()
        assert all(math.isfinite(rate) for rate in self.rates()) and math.isfinite(self.temperature)
        self.resume("anew", False)

    @precondition(lambda self: self.setup["scheduler"] == "none" and not self.gradient)
    @rule()
    def a_step_at_rate_zero(self) -> None:
        """As checkpoint libraries make them: nobody's step."""
        rates, weights = self.rates(), [bits(self.weights(k)) for k in range(self.count)]
        for net in (self.net, *self.twins):
            for p in net.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        assert weights == [bits(self.weights(k)) for k in range(self.count)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.twin_step([0.0, 0.0], [1.0] * self.count)
        self.ensemble_step(None)

    # -- foreign writes ----------------------------------------------------------------------------

    @rule(group=st.integers(0, 1))
    def written_by_hand(self, group: int) -> None:
        """Of a value that a knob moves it is refused; nobody minds the others."""
        rate = self.rates()[group]
        self.optimizer.param_groups[group]["lr"] = 0.5 * rate + 0.001
        if group not in self.shadow.corrected:
            self.shadow.optimizer.param_groups[group]["lr"] = 0.5 * rate + 0.001
            return
        for call in (self.ensemble.step, self.ensemble.values, self.ensemble.state_dict):
            with pytest.raises(ValueError, match="somebody else has written it"):
                call()
        self.optimizer.param_groups[group]["lr"] = rate

    @precondition(lambda self: not self.setup["temperature"] and self.shadow.base()[0] > 0)
    @rule(factor=st.sampled_from([0.5, 0.75, 2.0]))
    def a_value_is_set(self, factor: float) -> None:
        """It is the base value, and the schedule goes on from there."""
        value = self.shadow.optimizer.param_groups[0]["lr"] * factor
        self.ensemble.set_value(self.knob, value)
        self.shadow.correction = factor

    @rule(group=st.integers(0, 1), value=st.sampled_from([0.03125, 0.25]))
    def schedule_written_by_hand(self, group: int, value: float) -> None:
        """It is the schedule's, and corrected."""
        with self.ensemble.rescheduling():
            self.optimizer.param_groups[group]["lr"] = value
            if self.setup["temperature"]:
                self.temperature = 32 * value
        self.shadow.optimizer.param_groups[group]["lr"] = value
        if self.setup["temperature"]:
            self.shadow.temperature = 32 * value

    @precondition(lambda self: self.own is not None)
    @rule()
    def epoch(self) -> None:
        """The user steps a scheduler of theirs: what it writes is the schedule's, and corrected."""
        with quiet(), self.ensemble.rescheduling():
            self.own.step()
        self.shadow.advance(self.shadow.own)

    # -- states ------------------------------------------------------------------------------------

    def keep(self) -> None:
        self.saved = copy.deepcopy(
            {
                "ensemble": json.loads(json.dumps(self.state())),
                "optimizer": self.optimizer.state_dict(), "model": self.net.state_dict(),
                "own": self.own and self.own.state_dict(), "number": self.number,
                "twins": (self.shadow, self.twins, self.steppers),
            }
        )  # fmt: skip

    @precondition(lambda self: not self.gradient and not self.stepped)
    @rule()
    def save(self) -> None:
        self.converge()
        self.keep()

    @precondition(lambda self: self.saved is not None)
    @rule(where=st.sampled_from(["here", "anew"]), ensemble_first=st.booleans())
    def resume(self, where: str, ensemble_first: bool) -> None:
        """Into this Ensemble, or into another one of another model and optimizer; in any order."""
        saved = copy.deepcopy(self.saved)
        assert saved is not None
        if where == "anew":
            self.build()
        loads = [
            lambda: self.net.load_state_dict(saved["model"]),
            lambda: self.optimizer.load_state_dict(saved["optimizer"]),
            lambda: self.own and self.own.load_state_dict(saved["own"]),
        ]
        ensemble = lambda: self.ensemble.load_state_dict(saved["ensemble"])
        with quiet():
            for load in [ensemble, *loads] if ensemble_first else [*loads, ensemble]:
                load()
        self.optimizer.zero_grad()
        self.shadow, self.twins, self.steppers = saved["twins"]
        for stepper in self.steppers:
            stepper.zero_grad()
        self.number, self.broken_losses = saved["number"], set()
        self.gradient = self.stepped = False

    @precondition(lambda self: not self.gradient)
    @rule(go_on=st.booleans())
    def another_ensemble(self, go_on: bool) -> None:
        """close() and a new one over the same optimizer: with the state it goes on, without it
        begins at the values it finds."""
        self.converge()
        base, state = self.rates(), self.state()
        self.ensemble.close()
        assert self.rates() == base
        self.drive()
        if go_on:
            with quiet():
                self.ensemble.load_state_dict(state)
        else:
            shadow = self.shadow
            shadow.step = getattr(self.scheduler, "last_epoch", 0)
            shadow.position = shadow.cycle = 0
            shadow.correction, shadow.temperature = 1.0, self.temperature
            shadow.write(base)
        self.stepped, self.broken_losses, self.saved = False, set(), self.saved if go_on else None


@contextmanager
def broken(scheduler: Any) -> Iterator[None]:
    """Its step raises."""
    boom = mock.patch.object(type(scheduler), "step", side_effect=Boom("scheduler"), create=True)
    with nullcontext() if scheduler is None else boom:
        yield


TestEnsembleMachine = EnsembleMachine.TestCase
TestEnsembleMachine.settings = trial(examples=30, steps=15)
