"""The optimizers on a GPU: as torch's, without waiting, on any stream, captured and replayed."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hdet import FusedAdamW, FusedLion, FusedSGD, WeightAverage
from hdet.tensors.buffers import Copy

from .common import groups, parameters, same_bits, set_gradients, state_of

pytestmark = pytest.mark.gpu

BETAS = {"betas": (0.7, 0.9)}


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Any synchronisation with the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured_step(optimizer: torch.optim.Optimizer) -> torch.cuda.CUDAGraph:
    """A step is done on a side stream, as capturing needs, and then one is captured, which does
    nothing until it is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


def test_as_torchs_fused_adamw_over_100_steps(backend: str) -> None:
    """Driven by a scaler: where gradients overflow the scale falls and the step is skipped."""
    ours, theirs = parameters(), parameters()
    a = FusedAdamW(groups(ours), lr=1e-3, weight_decay=0.1, backend=backend)
    b = torch.optim.AdamW(groups(theirs), lr=1e-3, weight_decay=0.1, fused=True)
    sides = [
        (
            optimizer,
            params,
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100),
            torch.amp.GradScaler("cuda", init_scale=2.0**14, growth_interval=30),
        )
        for optimizer, params in ((a, ours), (b, theirs))
    ]
    for turn in range(100):
        for optimizer, params, scheduler, scaler in sides:
            set_gradients(params, turn)
            scale = scaler.scale(torch.ones((), device="cuda"))
            for param in params:
                param.grad.mul_(scale * (math.inf if turn in (0, 40) else 1.0))
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert sides[0][3].get_scale() == sides[1][3].get_scale()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=2e-5, atol=2e-6)
        assert a.state[x]["step"].item() == b.state[y]["step"].item() == 98


def test_a_step_never_waits(backend: str) -> None:
    """Not even where rates change, gradients move, norms are taken and a scaler speaks."""
    params = parameters()
    optimizer = FusedAdamW(params, lr=1e-3, max_grad_norm=1.0, zero_gradients=True, backend=backend)
    set_gradients(params, 0)
    optimizer.step()
    new = [[torch.randn_like(p) for p in params] for _ in range(3)]
    scale, found = torch.full((), 8.0, device="cuda"), torch.zeros(1, device="cuda")
    with refusing_to_wait():
        for turn, gradients in enumerate(new):
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[0]["betas"] = (0.8, 0.9 + 0.01 * turn)
            optimizer.grad_scale, optimizer.found_inf = scale, found  # type: ignore[attr-defined]
            optimizer.step()
    assert optimizer.step_skipped is not None and optimizer.step_skipped.item() == 0


@pytest.mark.alone
def test_a_stream_of_its_own_with_a_producer_that_is_late(backend: str) -> None:
    """Gradients are written 50 ms after step() has returned, on the stream the step runs on."""
    ours, theirs = parameters(), parameters()
    a, b = (FusedAdamW(params, lr=1e-2, backend=backend) for params in (ours, theirs))
    for params, optimizer in ((ours, a), (theirs, b)):
        set_gradients(params, 0)
        optimizer.step()
    late = [torch.randn_like(p) for p in ours]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for param, gradient in zip(ours, late, strict=True):
            assert param.grad is not None
            param.grad.copy_(gradient)
        a.param_groups[0]["lr"] = 0.5
        a.step()
        assert not stream.query(), "the producer was not late"
    stream.synchronize()
    for param, gradient in zip(theirs, late, strict=True):
        assert param.grad is not None
        param.grad.copy_(gradient)
    b.param_groups[0]["lr"] = 0.5
    b.step()
    assert same_bits(state_of(a), state_of(b))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FusedAdamW, {}),
        (FusedAdamW, {"max_grad_norm": 1.0, "zero_gradients": True}),
        (FusedLion, {}),
        (FusedSGD, {"momentum": 0.9, "nesterov": True}),
        (FusedAdamW, {"ema": (0.9, WeightAverage(None, every=2, begin=1))}),
    ],
)
def test_capture_and_replay_with_changing_hyperparameters(
    kind: Any, options: dict[str, Any], backend: str
) -> None:
    """Rates, decay and betas change between replays; the bits are those of steps that are not
    captured."""
    ours, theirs = parameters(), parameters()
    a, b = (
        kind([{"params": params}], lr=1e-2, backend=backend, **options) for params in (ours, theirs)
    )
    for params in (ours, theirs):
        set_gradients(params, 0)
    b.step()
    graph = captured_step(a)
    for turn in range(1, 7):
        changes: dict[str, Any] = {"lr": 1e-2 / turn, "weight_decay": 0.1 * turn}
        changes |= (
            {"momentum": 0.5 + 0.05 * turn}
            if kind is FusedSGD
            else {"betas": (0.5 + 0.05 * turn, 0.9 + 0.01 * turn)}
        )
        for params, optimizer in ((ours, a), (theirs, b)):
            optimizer.param_groups[0].update(changes)
            set_gradients(params, turn)
        a.write_hyperparameters()
        graph.replay()
        b.step()
        assert same_bits(state_of(a), state_of(b)), f"replay {turn}"
        assert a.state[ours[0]]["step"].item() == turn + 1, "a captured counter that stands still"


def test_capture_refuses_what_it_could_not_replay(backend: str) -> None:
    params = parameters()
    optimizer = FusedAdamW(params, lr=1e-2, backend=backend)
    set_gradients(params, 0)
    with (
        pytest.raises(RuntimeError, match="before capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    torch.cuda.synchronize()
    optimizer.step()
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["lr"] = 0.5
    with (
        pytest.raises(RuntimeError, match="write_hyperparameters"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    torch.cuda.synchronize()
    assert same_bits(params, before)
    optimizer.write_hyperparameters()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    assert same_bits(params, before), "a capture has run"
    optimizer.max_grad_norm = 1.0
    optimizer.write_hyperparameters()
    with (
        pytest.raises(RuntimeError, match="as no step before it did"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    torch.cuda.synchronize()
    optimizer.step()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_a_captured_step_reads_the_rate_on_the_device(backend: str) -> None:
    """Changed in place between replays, without a word to the optimizer; the bits are those of
    steps that are not captured."""
    ours, theirs = parameters(), parameters()
    rates = [torch.tensor(0.5, device="cuda") for _ in range(2)]
    a, b = (
        FusedAdamW(groups(params), lr=rate, backend=backend)
        for params, rate in zip((ours, theirs), rates, strict=True)
    )
    for params in (ours, theirs):
        set_gradients(params, 0)
    b.step()
    graph = captured_step(a)
    for turn, lr in enumerate((0.5, 0.03, 0.0, 0.2), 1):
        before = ours[0].detach().clone()
        for params, rate in ((ours, rates[0]), (theirs, rates[1])):
            rate.fill_(lr)
            set_gradients(params, turn)
        graph.replay()
        b.step()
        assert same_bits(state_of(a), state_of(b)), f"replay {turn}"
        assert torch.equal(ours[0], before) == (lr == 0), "a rate that was captured as a number"


def test_a_training_step_of_a_compiled_model_is_captured_whole(backend: str) -> None:
    def made() -> tuple[Any, torch.Tensor, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        forward = torch.compile(model.cuda(), backend="aot_eager")
        optimizer = FusedAdamW(model.parameters(), lr=1e-2, zero_gradients=True, backend=backend)
        batch = torch.ones(4, 8, device="cuda")

        def train() -> None:
            forward(batch).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                train()
        torch.cuda.current_stream().wait_stream(side)
        return optimizer, batch, train

    (a, ours, train), (b, theirs, same) = made(), made()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    for turn in range(4):
        for optimizer, batch in ((a, ours), (b, theirs)):
            batch.fill_(turn)
            optimizer.param_groups[0]["lr"] = 0.1 / (turn + 1)
        a.write_hyperparameters()
        graph.replay()
        same()
    for x, y in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        assert a.state[x]["step"].item() == b.state[y]["step"].item() == 7


def test_a_graph_outlives_the_plan_it_captured(backend: str) -> None:
    """The plan is replaced, its tables' memory is given to others: the graph still updates the
    tensors that it captured."""
    params = parameters()
    optimizer = FusedSGD(params, lr=0.5, backend=backend)
    set_gradients(params, 0)
    graph = captured_step(optimizer)
    gradients = [param.grad for param in params]
    counters = [
        value for param in params for value in optimizer.state[param].values()
    ]  # the caller's to keep
    optimizer.param_groups[0]["params"] = params[:1]
    optimizer.step()  # another plan
    del optimizer
    gc.collect()
    torch.cuda.synchronize()
    others = [
        torch.full((n,), -1, dtype=torch.int64, device="cuda")
        for n in (1, 4, 16, 64, 256)
        for _ in range(50)
    ]
    before = [param.detach().clone() for param in params]
    graph.replay()
    torch.cuda.synchronize()
    assert all(int(other.max()) == int(other.min()) == -1 for other in others)
    for param, old, gradient in zip(params, before, gradients, strict=True):
        assert gradient is not None
        torch.testing.assert_close(param.detach(), old - 0.5 * gradient)
    assert counters


def kernels_of(call: Any) -> list[str]:
    """Names of the kernels that a call launches."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [
        event.name
        for event in profile.events()
        if event.device_type == torch.profiler.DeviceType.CUDA
    ]
    return [name for name in events if not name.lower().startswith(("memcpy", "memset"))]


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, {"cuda": 2, "triton": 4}), ({"max_grad_norm": 1.0}, {"cuda": 4, "triton": 4})],
)
def test_launches_of_a_step_on_300_tensors(
    options: dict[str, Any], most: dict[str, int], backend: str
) -> None:
    params = [torch.nn.Parameter(torch.randn(50 + i, device="cuda")) for i in range(300)]
    optimizer = FusedAdamW(params, lr=1e-3, backend=backend, **options)
    for param in params:
        param.grad = torch.randn_like(param)
    names = kernels_of(optimizer.step)
    if not names:
        pytest.skip("the profiler sees no kernels here")
    assert len(names) <= most[backend], names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_on_the_host_lies_as_its_tensor() -> None:
    """What is made of it on the device again may be codes of 8 bits, whose scales are those of
    neighbours in memory."""
    tensor = torch.randn(8, 4, 3, 3, device="cuda").to(memory_format=torch.channels_last)
    again = Copy(tensor, on_host=True).put(None)
    assert again.stride() == tensor.stride() and torch.equal(again, tensor)
