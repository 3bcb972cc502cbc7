"""While arms are trained in its place nobody sees, and nothing changes, the run; whatever surrounds
it."""

from __future__ import annotations

import functools
import random
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.trial.rule import STEPS
from tests.distributed import run_ranks
from tests.ensemble.helpers import STOCK, same
from tests.harness import Run, losses_of, model, taught

from .common import ALL, auto_run, noisy, sgd, training


class Made(torch.optim.Optimizer):
    """Of others, in whose state the moments are."""

    def __init__(self, parameters: Any, lr: float, attribute: str) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {"lr": lr})
        parts = [torch.optim.AdamW(some, lr=lr) for some in (parameters[:2], parameters[2:])]
        setattr(
            self, attribute, parts if attribute == "parts" else torch.optim.AdamW(parameters, lr=lr)
        )
        held = getattr(self, attribute)
        self.inner = lambda: held if attribute == "parts" else [held]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for inner in self.inner():
            inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            inner.step()


class Wrapped(torch.Tensor):
    """A tensor subclass in the style of torchao's: another tensor holds its values, and there are
    few operations."""

    KEPT = ("detach", "clone", "copy_", "_to_copy", "alias", "add_", "mul_")
    READ = ("t", "addmm", "mm", "zeros_like", "linalg_vector_norm")

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name not in cls.KEPT + cls.READ:
            raise NotImplementedError(f"Wrapped has no {name}")
        result = function(
            *map(plain, args), **{key: plain(value) for key, value in (kwargs or {}).items()}
        )
        return args[0] if name.endswith("_") else cls(result) if name in cls.KEPT else result


def plain(value: Any) -> Any:
    return value.held if isinstance(value, Wrapped) else value


class WrappedMoments(torch.optim.Optimizer):
    """SGD with momentum; ``weights``: a parameter is of the subclass, too."""

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


def wrapped() -> nn.Module:
    net = model()
    net[2].weight = nn.Parameter(Wrapped(net[2].weight.detach()))
    return net


def copy_of(value: Any) -> Any:
    return plain(value.detach()).clone() if isinstance(value, torch.Tensor) else value


def state(run: Run) -> Any:
    """All of it, to the bit."""
    own = [
        copy_of(tensor)
        for tensor in (
            *run.net.parameters(),
            *run.net.buffers(),
            *(p.grad for p in run.net.parameters()),
        )
    ]
    inner = getattr(run.optimizer, "inner", list)()
    held = [
        copy_of(value)
        for one in (run.optimizer, *inner)
        for of in one.state.values()
        for value in of.values()
    ]
    numbers = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    return own, held, [module.training for module in run.net.modules()], numbers


KINDS: dict[str, Any] = {
    **{name: getattr(torch.optim, name) for name in STOCK},
    **{name: getattr(hdet, name) for name in ("FusedAdamW", "FusedLion", "FusedSGD")},
    **{
        masters: functools.partial(hdet.FusedAdamW, master_weights=masters)
        for masters in ("fp32", "split")
    },
    **{
        attribute: functools.partial(Made, attribute=attribute)
        for attribute in ("parts", "base_optimizer", "optim")
    },
    "moments of a tensor subclass": WrappedMoments,
    "weights of a tensor subclass": WrappedMoments,
    "a closure that calls backward": torch.optim.AdamW,
}


def backward_inside(losses: Any, data: Any) -> torch.Tensor:
    loss = losses(data).mean()
    if torch.is_grad_enabled():
        loss.backward()
    return loss


@pytest.mark.parametrize("shadow", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_the_run_is_the_one_without_a_trial_to_the_bit(name: str, shadow: bool) -> None:
    """To the end of a trial, if what is found is not done; else to its last step but one."""
    found = []
    for controlled in (True, False):
        net = (
            wrapped()
            if name.startswith("weights")
            else model()
            if name in ("fp32", "split")
            else noisy()
        )
        settings = {
            "dtype": torch.bfloat16 if name in ("fp32", "split") else None,
            "every": 100 if name.startswith("weights") else 20,
        }
        make = lambda parameters, lr, weight_decay: KINDS[name](parameters, lr=lr)
        draw = {
            "before_step": lambda: torch.rand(3)
        }  # as an optimizer that rounds stochastically does
        run = auto_run(
            1e-3, net=net, optimizer=make, controlled=controlled, shadow=shadow, of=draw, **settings
        )
        if name == "a closure that calls backward":
            run.closure = functools.partial(backward_inside, run.losses)
        random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
        found.append(state(run.steps(ALL + 4 if shadow else ALL - 1)))
        assert not (controlled and shadow) or run.controller.search.interval.trial.first_losses
    assert same(*found) and found[0][0]


def test_gradients_that_the_loop_keeps_are_still_there() -> None:
    run = auto_run()
    for _ in range(ALL):
        run.backward()
        before = [p.grad for p in run.net.parameters()]
        values = [copy_of(gradient) for gradient in before]
        run.optimizer.step()
        run.ensemble.step(1.0, closure=lambda: run.losses(taught(0)))
        assert all(p.grad is g for p, g in zip(run.net.parameters(), before, strict=True)) and same(
            before, values
        )


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
    losses = [arm.losses for arm in run.controller.interval.trial.arms]
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


def of_the_run(weights: Any, steps: int, lr: float = 0.03) -> bool:
    return same(weights, auto_run(lr, controlled=False).steps(steps).weights())


def test_a_handler_that_saves_gets_the_runs_weights() -> None:
    saved: list[Any] = []
    handler, before = (
        (lambda *_: saved.append(run.net.state_dict() and run.weights())),
        signal.getsignal(signal.SIGUSR1),
    )
    run = with_closure(lambda run: signal.raise_signal(signal.SIGUSR1))
    signal.signal(signal.SIGUSR1, handler)
    try:
        run.steps(4)
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(saved) == 1 and of_the_run(saved[0], 4)


def test_another_thread_that_saves_waits_for_the_run() -> None:
    saved: list[Any] = []
    thread = threading.Thread(target=lambda: saved.append(run.net.state_dict() and run.weights()))
    run = with_closure(
        lambda run: [thread.start(), thread.join(0.1), saved.append(thread.is_alive())]
    )
    run.steps(4)
    thread.join()
    assert saved[0] is True and of_the_run(saved[1], 4)


def test_ctrl_c_leaves_the_run(request: pytest.FixtureRequest) -> None:
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    run = with_closure(lambda run: signal.raise_signal(signal.SIGINT)).steps(3)
    with pytest.raises(KeyboardInterrupt):
        run.step()
    assert of_the_run(run.weights(), 4)


REFUSED: dict[str, Callable[[Run], object]] = {
    "model.state_dict()": lambda run: run.net.state_dict(),
    "optimizer.state_dict()": lambda run: run.optimizer.state_dict(),
    "ensemble.state_dict()": lambda run: run.ensemble.state_dict(),
    "ensemble.step()": lambda run: run.ensemble.step(1.0),
    "ensemble.converge()": lambda run: run.ensemble.converge(),
    "ensemble.close()": lambda run: run.ensemble.close(),
    "ensemble.load_state_dict()": lambda run: run.ensemble.load_state_dict({}),
}


@pytest.mark.parametrize("at", [3, STEPS + 1])
@pytest.mark.parametrize("name", REFUSED)
def test_what_may_only_be_done_to_the_run_is_refused_by_name(name: str, at: int) -> None:
    run = with_closure(REFUSED[name], at=at, call=0).steps(at)
    with pytest.raises(
        RuntimeError,
        match=re.escape(name) + " was called while a trial's copy is in the place of the run",
    ):
        run.step()
    assert (
        of_the_run(run.weights(), at + 1) and run.net.state_dict() and run.ensemble.close() is None
    )


@pytest.mark.parametrize("at", [3, STEPS + 1])
def test_modes_that_the_closure_sets_are_taken_back(at: int) -> None:
    run = with_closure(lambda run: run.net.eval(), at=at, call=0, net=noisy()).steps(at + 1)
    assert all(module.training for module in run.net.modules())


@pytest.mark.parametrize(
    ("at", "call", "stops"),
    [(3, 4, True), (3, 2, True), (3, 1, False), (3, 0, False), (0, 4, False)],
)
def test_an_error_at_a_high_rate_is_an_arm_that_breaks_and_any_other_is_the_loops(
    at: int, call: int, stops: bool
) -> None:
    run = with_closure(lambda run: 1 / 0, at=at, call=call, lr=1e-4).steps(at)
    if stops:
        with pytest.warns(
            UserWarning, match="counts as a rate that breaks: the closure raised ZeroDivisionError"
        ):
            arms = run.steps(ALL - at).controller.interval.trial.arms
        assert [not arm.losses for arm in arms] == [number == call for number in range(5)]
    else:
        with pytest.raises(ZeroDivisionError):
            run.step()
        assert of_the_run(run.weights(), at + 1, 1e-4)


@pytest.mark.parametrize("lr", [0.03, 3.0])
def test_a_module_that_the_loop_adds_in_the_middle_stays(lr: float) -> None:
    """Also where the run goes back to its first weights."""
    run, added = auto_run(lr).steps(10), nn.BatchNorm1d(1)
    run.net.add_module("extra", added)
    while not run.controller.done:
        run.step()
    assert (run.ensemble.corrections["lr"] < 1) == (
        lr == 3.0
    ) and added.state_dict().keys() == nn.BatchNorm1d(1).state_dict().keys()


def under_ddp(rank: int, world: int, view: bool, branches: bool) -> Any:
    """What is equal with a trial and without; how often the communication hook was called."""
    found = []
    for controlled in (True, False):
        net = Either() if branches else noisy()
        ddp = DistributedDataParallel(
            net, gradient_as_bucket_view=view, find_unused_parameters=branches
        )
        held: dict[str, Any] = {"calls": 0, "error": torch.zeros(4096)}

        def hook(held, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
            """Rounds, and keeps what is left for the next step."""
            held["calls"] += 1
            whole = bucket.buffer() + held["error"][: bucket.buffer().numel()]
            rounded = (whole * 64).round() / 64
            held["error"][: whole.numel()] = whole - rounded
            return (
                torch.distributed.all_reduce(rounded, async_op=True)
                .get_future()
                .then(lambda done: done.value()[0] / world)
            )

        if not branches:  # then DDP reduces an arm's gradients, too
            ddp.register_comm_hook(held, hook)

        def losses_at(step: int, net: Any = net, ddp: Any = ddp) -> torch.Tensor:
            net.branch = step % 2
            return losses_of(ddp, taught(100 * step + rank))

        controller = hdet.Shadow(hdet.AutoLR(ddp)) if controlled else None
        torch.manual_seed(7 + rank)
        *_, ensemble = training(
            net, losses_at, ALL + 4, controller=controller, plain=not controlled
        )
        assert not controlled or ensemble.engine.controller.search.interval.trial.first_losses
        found.append(
            [
                net.state_dict(),
                [p.grad for p in net.parameters()],
                held["calls"],
                held["error"],
                torch.get_rng_state(),
            ]
        )
    return [same(*pair) for pair in zip(*found, strict=True)], held["calls"]


class Either(nn.Module):
    """Steps use one of two branches in turn: DDP has to be told, and remembers it from step to
    step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches, self.branch = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)]), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[self.branch](x)


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
        assert not controlled or run.controller.search.interval.trial.arms[1].losses
    assert same(*found) and found[0][1]["scale"] < 2.0**30
