"""While arms are trained in its place nobody sees, and nothing changes, the run; whatever surrounds
it."""

from __future__ import annotations

import copy
import functools
import random
import re
import signal
import threading
import time
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.trial.in_place import InPlace
from hdet.trial.rule import STEPS
from tests.distributed import run_ranks
from tests.ensemble.helpers import same
from tests.harness import Run, losses_of, model, taught

from .common import ALL, auto_run, noisy, searched, sgd, training


class Made(torch.optim.Optimizer):
    """Of others, in whose state the moments are."""

    def __init__(self, parameters: Any, lr: float, attribute: str) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {"lr": lr})
        shares = [parameters[:2], parameters[2:]] if attribute == "parts" else [parameters]
        made = [torch.optim.AdamW(share, lr=lr) for share in shares]
        setattr(self, attribute, made if attribute == "parts" else made[0])
        self.inner = lambda: made

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for inner in self.inner():
            inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            inner.step()


class Wrapped(torch.Tensor):
    """A tensor subclass in the style of torchao's: another tensor holds its values, and there are
    few operations: none to copy it."""

    KEPT = ("add_", "mul_")

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> Any:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(held: Any, *_: Any) -> Any:
        return Wrapped(held["held"])

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (name := function.overloadpacket.__name__) not in cls.KEPT:
            raise NotImplementedError(f"Wrapped has no {name}")
        function(*map(plain, args), **(kwargs or {}))
        return args[0]


def plain(value: Any) -> Any:
    return value.held if isinstance(value, Wrapped) else value


class WrappedMoments(torch.optim.Optimizer):
    """SGD with momentum."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault(
                "momentum", Wrapped(torch.zeros(parameter.shape))
            )
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.add_(momentum.held, alpha=-self.param_groups[0]["lr"])


Pair = namedtuple("Pair", "tensor number")


class Slots:
    __slots__ = ("count",)


class Collecting(torch.optim.SGD):
    """Its steps depend on what it keeps in objects of all kinds: in states, a group, attributes."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.count, self.counts, self.drawn = 0, Slots(), torch.Generator().manual_seed(0)
        self.counts.count, self.norm = 0, nn.BatchNorm1d(1)
        self.param_groups[0] |= {"list": [0.0], "array": numpy.zeros(1)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        self.count += 1
        self.counts.count += 1
        group["list"][0] += 1
        group["array"] += 1
        self.norm(torch.rand(4, 1, generator=self.drawn))
        self.late = getattr(self, "late", 0) + 1
        for p in group["params"]:
            kept = self.state[p].setdefault("kept", SimpleNamespace(none=None, counts=self.counts))
            if not hasattr(kept, "queue"):
                kept.own, kept.queue, kept.seen = kept, deque([0], 3), set()
                kept.by_key, kept.pair = defaultdict(int), Pair(torch.zeros(1), numpy.int64(0))
                kept.numpy, kept.random = numpy.random.default_rng(0), random.Random(0)
            kept.queue.append(kept.queue[-1] + kept.numpy.random() + kept.random.random())
            kept.seen.add(self.count)
            kept.by_key["steps"] += 1
            kept.pair = Pair(kept.pair.tensor.add_(1), kept.pair.number + 1)
            counted = [self.count, self.late, kept.counts.count, kept.queue[0], len(kept.seen),
                       kept.by_key["steps"], *kept.pair, *group["list"], *group["array"],
                       *self.norm.running_mean]  # fmt: skip
            p.sub_(p.grad, alpha=group["lr"] * (1 + 0.01 * sum(map(float, counted))))


def copy_of(value: Any) -> Any:
    is_number = isinstance(value, (int, float))
    return plain(value).detach().clone() if isinstance(value, torch.Tensor) else is_number and value


def state(run: Run) -> Any:
    """All of it, to the bit."""
    own = [*run.net.parameters(), *run.net.buffers(), *(p.grad for p in run.net.parameters())]
    optimizers = (run.optimizer, *getattr(run.optimizer, "inner", list)())
    held = [value for one in optimizers for of in one.state.values() for value in of.values()]
    numbers = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    return (
        [*map(copy_of, own), *map(copy_of, held)],
        [m.training for m in run.net.modules()],
        numbers,
    )


def made(attribute: str) -> Any:
    return functools.partial(Made, attribute=attribute)


def master(kind: str) -> Any:
    return functools.partial(hdet.FusedAdamW, master_weights=kind)


KINDS: dict[str, Any] = {
    # states of zeros, of other numbers, of vectors, and with more counters
    **{name: getattr(torch.optim, name) for name in ("AdamW", "Adagrad", "Adafactor", "ASGD")},
    "FusedAdamW": hdet.FusedAdamW,
    **{kind: master(kind) for kind in ("fp32", "split")},
    **{attribute: made(attribute) for attribute in ("parts", "base_optimizer")},
    "moments of a tensor subclass": WrappedMoments,
    "objects of all kinds": Collecting,
    "a closure that calls backward": torch.optim.AdamW,
}


def backward_inside(losses: Any, data: Any) -> torch.Tensor:
    loss = losses(data).mean()
    if torch.is_grad_enabled():
        loss.backward()
    return loss


@pytest.mark.parametrize(
    ("name", "shadow"),
    [
        *((name, True) for name in KINDS),
        ("AdamW", False),
        ("FusedAdamW", False),
        ("split", False),
        ("objects of all kinds", False),
    ],
)
def test_the_run_is_the_one_without_a_trial_to_the_bit(name: str, shadow: bool) -> None:
    """To the end of a trial, if what is found is not done; else to its last step but one."""
    is_narrow = name in ("fp32", "split")
    settings: dict[str, Any] = {
        "optimizer": lambda parameters, lr, weight_decay: KINDS[name](parameters, lr=lr),
        "dtype": torch.bfloat16 if is_narrow else None,
        "every": 20,
        # as an optimizer that rounds stochastically does
        "of": {"before_step": lambda: torch.rand(3)},
    }
    found = []
    for controlled in (True, False):
        net = model() if is_narrow else noisy()
        run = auto_run(1e-3, net=net, controlled=controlled, shadow=shadow, **settings)
        if name == "a closure that calls backward":
            run.closure = functools.partial(backward_inside, run.losses)
        random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
        found.append(state(run.steps(ALL + 4 if shadow else ALL - 1)))
        assert not (controlled and shadow) or run.search.interval.trial.first_losses
    assert same(*found) and found[0][0]


def test_weights_that_autocast_has_cast_before_are_not_those_of_an_arm() -> None:
    run, data = auto_run(1e-3, optimizer=sgd), taught(0)

    def under(data: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ((run.net(data[0]).float() - data[1]) ** 2).mean(1)

    run.losses = under
    for _ in range(ALL):
        with torch.autocast("cpu", torch.bfloat16):
            inside = under(data if run.steps(1) else None)
        assert torch.equal(inside, under(data))
    losses = [arm.losses for arm in run.search.interval.trial.arms]
    assert len(set(losses)) == len(losses)


def with_closure(act: Callable[[Run], object], at: int = 3, call: int = 4, **settings: Any) -> Run:
    """``act`` is called by the closure, before losses are computed: in step ``at``, for arm number
    ``call``."""
    run, calls = auto_run(**settings), []
    losses = run.losses

    def closed(data: Any) -> torch.Tensor:
        calls.append(run.index)
        if run.index == at and calls.count(at) == call + 1:
            act(run)
        return losses(data)

    run.closure = closed
    return run


def is_of_the_run(weights: Any, steps: int, lr: float = 0.03) -> bool:
    return same(weights, auto_run(lr, controlled=False).steps(steps).weights())


def test_no_arm_comes_while_another_thread_saves_a_checkpoint() -> None:
    in_place, has_begun, order = InPlace(), threading.Event(), list[str]()

    def save() -> None:
        with in_place.held_off("checkpoint.save"):
            has_begun.set()
            time.sleep(0.1)
            in_place.check("model.state_dict()")  # its own does not wait
            order.append("saved")

    thread = threading.Thread(target=save)
    thread.start()
    has_begun.wait()
    with in_place.hold(), pytest.raises(RuntimeError, match="a trial's copy is in the place"):
        order.append("arm")
        in_place.held_off("checkpoint.save").__enter__()
    thread.join()
    assert order == ["saved", "arm"]


def test_a_handler_that_saves_gets_the_runs_weights() -> None:
    saved: list[Any] = []
    handler = lambda *_: saved.append(run.net.state_dict() and run.weights())
    before = signal.signal(signal.SIGUSR1, handler)
    run = with_closure(lambda run: signal.raise_signal(signal.SIGUSR1))
    try:
        run.steps(4)
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(saved) == 1 and is_of_the_run(saved[0], 4)


def test_another_thread_that_saves_waits_for_the_run() -> None:
    saved: list[Any] = []
    thread = threading.Thread(target=lambda: saved.append(run.net.state_dict() and run.weights()))
    act = lambda run: [thread.start(), thread.join(0.1), saved.append(thread.is_alive())]
    run = with_closure(act)
    run.steps(4)
    thread.join()
    assert saved[0] is True and is_of_the_run(saved[1], 4)


@pytest.mark.parametrize(
    "both", [(signal.SIGINT, signal.SIGUSR1), (signal.SIGUSR1, signal.SIGINT)], ids=str
)
def test_ctrl_c_leaves_the_run_and_no_other_signal_is_lost(
    request: pytest.FixtureRequest, both: tuple[signal.Signals, signal.Signals]
) -> None:
    # a shell's background jobs ignore it
    seen: list[int] = []
    for number, handler in ((signal.SIGINT, signal.default_int_handler),
                            (signal.SIGUSR1, lambda *_: seen.append(run.index))):  # fmt: skip
        before = signal.signal(number, handler)
        request.addfinalizer(functools.partial(signal.signal, number, before))
    run = with_closure(lambda run: [signal.raise_signal(number) for number in both]).steps(3)
    with pytest.raises(KeyboardInterrupt):
        run.step()
    assert is_of_the_run(run.weights(), 4) and seen == [3]


REFUSED: dict[str, Callable[[Run], object]] = {
    # of it, or of a part
    "model.state_dict()": lambda run: (run.net if run.index > 3 else run.net[0]).state_dict(),
    "optimizer.state_dict()": lambda run: run.optimizer.state_dict(),
    "ensemble.state_dict()": lambda run: run.ensemble.state_dict(),
    "ensemble.step()": lambda run: run.ensemble.step(1.0),
    "ensemble.converge()": lambda run: run.ensemble.converge(),
    "ensemble.close()": lambda run: run.ensemble.close(),
    "ensemble.load_state_dict()": lambda run: run.ensemble.load_state_dict({}),
}


@pytest.mark.parametrize(
    ("name", "at"), [*((name, 3) for name in REFUSED), ("model.state_dict()", STEPS + 1)]
)
def test_what_may_only_be_done_to_the_run_is_refused_by_name(name: str, at: int) -> None:
    run = with_closure(REFUSED[name], at=at, call=0).steps(at)
    message = re.escape(name) + " was called while a trial's copy is in the place of the run"
    with pytest.raises(RuntimeError, match=message):
        run.step()
    assert is_of_the_run(run.weights(), at + 1)
    assert run.net.state_dict() and run.ensemble.close() is None


def test_a_copy_of_the_model_may_be_saved_by_the_closure() -> None:
    run = with_closure(lambda run: copy.deepcopy(run.net).state_dict())
    assert is_of_the_run(run.steps(4).weights(), 4)


@pytest.mark.parametrize("at", [3, STEPS + 1])
def test_modes_that_the_closure_sets_are_taken_back(at: int) -> None:
    run = with_closure(lambda run: run.net.eval(), at=at, call=0, net=noisy()).steps(at + 1)
    assert all(module.training for module in run.net.modules())


@pytest.mark.parametrize(
    ("at", "call", "stops"), [(3, 4, True), (3, 2, True), (3, 1, False), (0, 4, False)]
)
def test_an_error_at_a_high_rate_is_an_arm_that_breaks_and_any_other_is_the_loops(
    at: int, call: int, stops: bool
) -> None:
    run = with_closure(lambda run: 1 / 0, at=at, call=call, lr=1e-4).steps(at)
    if stops:
        arms = run.steps(ALL - at).search.interval.trial.arms
        assert [not arm.losses for arm in arms] == [number == call for number in range(5)]
        broken = "times the rate counts as broken: the closure raised ZeroDivisionError: div"
        assert run.ensemble.report().count(broken) == 1
    else:
        with pytest.raises(ZeroDivisionError):
            run.step()
        assert is_of_the_run(run.weights(), at + 1, 1e-4)


def test_a_closure_that_cannot_be_scored_gives_the_trial_up() -> None:
    """As detection models do, which return no losses in eval mode."""
    run = with_closure(lambda run: 1 / 0, at=STEPS, call=0, lr=1e-4).steps(ALL)
    given_up = "the trial was given up: in eval mode the closure raised ZeroDivisionError"
    assert f"stays ({given_up}" in run.ensemble.report() and is_of_the_run(run.weights(), ALL, 1e-4)


@pytest.mark.parametrize("lr", [0.03, 3.0])
def test_a_module_that_the_loop_adds_in_the_middle_stays(lr: float) -> None:
    """Also where the run goes back to its first weights."""
    run, added = auto_run(lr).steps(10), nn.BatchNorm1d(1)
    run.net.add_module("extra", added)
    assert (searched(run).ensemble.corrections["lr"] < 1) == (lr == 3.0)
    assert added.state_dict().keys() == nn.BatchNorm1d(1).state_dict().keys()


class Rounding:
    """A communication hook that rounds, and keeps what is left for the next step."""

    def __init__(self) -> None:
        self.calls, self.error = 0, torch.zeros(4096)

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
        self.calls += 1
        whole = bucket.buffer() + self.error[: bucket.buffer().numel()]
        rounded = (whole * 64).round() / 64
        self.error[: whole.numel()] = whole - rounded
        summed = torch.distributed.all_reduce(rounded, async_op=True).get_future()
        return summed.then(lambda done: done.value()[0] / 2)


class Either(nn.Module):
    """Steps use one of two branches in turn: DDP has to be told, and remembers it from step to
    step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches, self.branch = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)]), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[self.branch](x)


def under_ddp(rank: int, world: int, view: bool, branches: bool) -> Any:
    """What is equal with a trial and without; how often the communication hook was called."""
    found, settings = [], {"gradient_as_bucket_view": view, "find_unused_parameters": branches}
    for controlled in (True, False):
        net, rounding = Either() if branches else noisy(), Rounding()
        ddp = DistributedDataParallel(net, **settings)
        if not branches:  # then DDP reduces an arm's gradients, too
            ddp.register_comm_hook(None, rounding.hook)

        def losses_at(step: int, net: Any = net, ddp: Any = ddp) -> torch.Tensor:
            net.branch = step % 2
            return losses_of(ddp, taught(100 * step + rank))

        search = hdet.AutoLR(ddp, report_only=True) if controlled else None
        torch.manual_seed(7 + rank)
        [*_] = training(net, losses_at, ALL + 4, search=search, plain=not controlled)
        assert search is None or search.interval.trial.first_losses
        gradients = [p.grad for p in net.parameters()]
        hooked = rounding.calls, rounding.error
        found.append([net.state_dict(), gradients, *hooked, torch.get_rng_state()])
    return [same(*pair) for pair in zip(*found, strict=True)], rounding.calls


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize(("view", "branches"), [(False, False), (True, False), (False, True)])
def test_under_ddp_a_shadow_is_bitwise_the_plain_run(view: bool, branches: bool) -> None:
    """With a communication hook; where gradients are views of DDP's buckets; where it finds unused
    parameters."""
    assert run_ranks(under_ddp, 2, view, branches) == [([True] * 5, 0 if branches else ALL + 4)] * 2


@pytest.mark.filterwarnings("ignore:Detected call")
def test_a_scaler_and_what_it_scales_are_left_as_they_were() -> None:
    """It begins with steps that overflow, and its scale grows twice."""
    found = []
    for controlled in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=20)
        run = auto_run(controlled=controlled, shadow=True, of={"scaler": scaler})

        def losses(run: Run = run) -> torch.Tensor:
            with torch.autocast("cpu", torch.float16):
                return run.losses(taught(run.index))

        for run.index in range(2 * ALL):
            run.optimizer.zero_grad()
            scaler.scale(losses().mean()).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.ensemble.step(1.0, closure=losses)
        found.append([state(run), scaler.state_dict()])
        assert not controlled or run.search.interval.trial.arms[1].losses
    assert same(*found) and found[0][1]["scale"] < 2.0**30
