"""What a sweep goes back to: all that the run had at its first step, and of a model that another optimizer trains too, nothing else."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.tensors.buffers import Averaged
from tests.harness import Run, losses_of, model, probe, taught

from ..distributed import run_ranks
from .helpers import STOCK, flat, on_all_ranks, same, state_of, told, trained
from .test_line import Fixed, batch_norm, line_run


def short(net: nn.Module, **settings: Any) -> Run:
    """Goes back after four steps."""
    return line_run(1e-2, net=net, line=hdet.LineController(net, rule=Fixed(back=True)), **{"total": 400, "every": 1} | settings)


def swept(run: Run) -> Run:
    while run.ensemble.sweeping:
        run.steps(1)
    return run


# -- buffers -------------------------------------------------------------------------------------------------------------


class Normaliser(nn.Module):
    """As reinforcement learning has them: a new tensor for the statistics in every pass; one of them is made in the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count = self.count + len(x)
            self.mean = self.mean + (x.mean(0) - self.mean) * (len(x) / self.count).to(x.dtype)
            self.late = torch.ones(3) if self.late is None else self.late + 1
        return self.layer(x - self.mean)


class Counting(nn.Module):
    """In eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


def run_through(net: nn.Module, run: Run) -> None:
    net(taught(0)[0])


def load(net: nn.Module, run: Run) -> None:
    other = batch_norm()
    trained(other, torch.optim.SGD(other.parameters(), lr=0.01), range(20))
    net.load_state_dict(other.state_dict())


def load_a_part(net: nn.Module, run: Run) -> None:
    net[1].load_state_dict({**net[1].state_dict(), "running_mean": torch.full((8,), 5.0)})


def cast(net: nn.Module, run: Run) -> None:
    net.double()


def call_parts(net: nn.Module, run: Run) -> None:
    run.losses = lambda data: ((functools.reduce(lambda x, part: part(x), net, data[0]) - data[1]) ** 2).mean(1)


def look(net: nn.Module, run: Run) -> None:
    net.eval()
    run_through(net, run)
    net.train()


def copies(net: nn.Module, run: Run) -> None:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        run_through(other, run)
        other.load_state_dict(net.state_dict())


@pytest.mark.parametrize(
    ("make", "before"),
    [
        (batch_norm, [load]), (batch_norm, [run_through, load]), (batch_norm, [run_through, load_a_part]), (batch_norm, [cast]),
        (batch_norm, [call_parts]), (batch_norm, [copies]), (Counting, [look]), (Normaliser, []),
    ],
)  # fmt: skip
def test_a_sweep_goes_back_to_what_its_first_forward_pass_found(make: Callable[[], nn.Module], before: list[Any]) -> None:
    net = make()
    run = short(net)
    for act in before:
        act(net, run)
    begin = state_of(net)
    run.steps(4)
    assert not run.ensemble.sweeping and same(state_of(net), begin)
    run.ensemble.close()
    hooks = ("_forward_pre_hooks", "_load_state_dict_post_hooks")
    assert not any(getattr(module, name) for module in net.modules() for name in hooks)


def test_a_model_that_is_cast_after_a_pass_goes_back_to_what_was_before_it() -> None:
    net = batch_norm()
    run = short(net)
    run_through(net, run)
    cast(net, run)
    run.steps(4)
    assert same(state_of(net), state_of(batch_norm().double()))


@pytest.mark.parametrize("way", ["torch.compile(model)", "model.compile()"])
def test_a_compiled_model_is_taken_back_to_the_bit_and_not_compiled_again(way: str) -> None:
    torch.compiler.reset()
    graphs: list[Any] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = batch_norm()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts(x)

    net = Whole()
    run = short(net)
    begin = state_of(net)
    compiled = torch.compile(net, backend=counting, fullgraph=True) if way == "torch.compile(model)" else net
    if compiled is net:
        net.compile(backend=counting, fullgraph=True)
    run.losses = functools.partial(losses_of, compiled)
    run.steps(4)
    assert same(state_of(net), begin)
    run.steps(4)
    assert len(graphs) == 2, "in training mode, and in eval mode without gradients"
    torch.compiler.reset()


# -- the optimizer's state -------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    **{name: getattr(torch.optim, name) for name in STOCK},
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "FusedSGD": functools.partial(hdet.FusedSGD, momentum=0.9),
    "FusedAdamW": hdet.FusedAdamW,
    "FusedLion": hdet.FusedLion,
    "fp32": functools.partial(hdet.FusedAdamW, master_weights="fp32"),
    "split": functools.partial(hdet.FusedAdamW, master_weights="split"),
}


def moments(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """By parameter."""
    return [copy.deepcopy(dict(optimizer.state.get(p, {}))) for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restart_begins_as_a_new_run_would(name: str, loaded: bool) -> None:
    """With the moments that were loaded after construction, as everything that is loaded; and a parameter that had none then has none again."""

    def build(net: nn.Module) -> Any:
        optimizer = OPTIMIZERS[name](net.parameters(), lr=1e-2)
        if loaded:
            optimizer.load_state_dict(copy.deepcopy({**state, "param_groups": optimizer.state_dict()["param_groups"]}))
        return optimizer

    dtype = torch.bfloat16 if name in ("fp32", "split") else torch.float32
    net, other = model().to(dtype), model().to(dtype)
    before = OPTIMIZERS[name](net.parameters(), lr=1e-2)
    trained(net, before, range(7))
    state = before.state_dict()
    if name == "AdamW":
        del state["state"][3]
    run = short(net, optimizer=lambda *_, **__: build(net))
    begin, held = state_of(net), moments(run.optimizer)
    assert any(held) is loaded or name == "Adagrad"
    run.steps(4)
    assert same(state_of(net), begin) and (same(moments(run.optimizer), held) or not loaded)
    other.load_state_dict(begin)
    optimizer = build(other)
    for _ in range(3):
        optimizer.param_groups[0]["lr"] = run.rate
        optimizer.zero_grad()
        losses_of(other, taught(run.index)).mean().backward()
        optimizer.step()
        run.steps(1)
        assert torch.equal(run.weights(), flat(other))


def test_a_whole_sweep_goes_back_to_what_was_loaded() -> None:
    """Several times: to read the line, perhaps because training broke, and at its end."""
    net = batch_norm()
    before = torch.optim.AdamW(net.parameters(), lr=1e-3)
    trained(net, before, range(9))
    run = line_run(0.3, net=net, total=400)
    run.optimizer.load_state_dict({**before.state_dict(), "param_groups": run.optimizer.state_dict()["param_groups"]})
    begin, held = state_of(net), moments(run.optimizer)
    swept(run)
    assert same(state_of(net), begin) and same(moments(run.optimizer), held)


# -- a second optimizer over the same model --------------------------------------------------------------------------------


def partly(net: nn.Module, own: nn.Module, other: Callable[[], Any] = lambda: None, **settings: Any) -> Run:
    """Trains ``own``, a part of the model; ``other`` is called after each of its optimizer's steps."""
    settings = {"line": hdet.LineController(net), "total": 400, "optimizer": torch.optim.AdamW, **settings}
    make = settings.pop("optimizer")
    run = line_run(1e-2, net=net, optimizer=lambda *_, **more: make(own.parameters(), **more), **settings)
    run.optimizer.register_step_post_hook(lambda *_: other())
    return run


def write(net: nn.Module) -> Callable[[], Any]:
    """No version counts it."""
    return lambda: net[2].weight.data.add_(1e-3)


@pytest.mark.parametrize(
    ("make", "other", "message"),
    [
        (batch_norm, lambda net: torch.optim.AdamW(net[1:].parameters(), lr=1e-3).step, r"model has '1.weight', which is not this Ensemble's optimizer's.*into one optimizer.*ensemble.sweeping"),
        (model, write, "'2.weight'"),
    ],
)  # fmt: skip
def test_a_second_optimizer_is_refused_and_all_is_as_at_the_beginning(make: Any, other: Any, message: str) -> None:
    net = make()
    run = partly(net, net[0], other(net))
    begin = state_of(net)
    with pytest.raises(ValueError, match=message):
        run.steps(20)
    assert run.index < 8 and same(state_of(net), begin) and not run.optimizer.state


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_nobody_trains_before_the_sweep_s_end_are_not_refused(frozen: bool) -> None:
    """Neither frozen ones nor others, whatever they hold; nor a second optimizer that waits."""
    net = model()
    net.register_parameter("unused", nn.Parameter(torch.full((3,), math.nan)))
    net[2].requires_grad_(not frozen)
    run = partly(net, net[0], lambda: run.ensemble.sweeping or write(net)(), data=lambda key: taught(key // 100))
    run.losses = lambda data: losses_of(net[:3], data)
    begin = state_of(net)
    swept(run)
    assert torch.equal(net[2].weight, begin["2.weight"]) and run.ensemble.corrections["lr"] != 1 / 16
    run.steps(5)
    assert not torch.equal(net[2].weight, begin["2.weight"])


@pytest.mark.parametrize("thawed", [False, True])
def test_a_large_frozen_part_that_moves_is_told_of_or_refused(thawed: bool) -> None:
    """It is no copy that is kept, but what is written to it is counted: a teacher's average is told of, a second optimizer refused."""
    net = nn.ModuleDict({"trained": model(), "frozen": nn.Linear(100, 100).requires_grad_(False)})
    run = partly(net, net["trained"])
    run.losses = functools.partial(losses_of, net["trained"])
    run.steps(1)
    with torch.no_grad():
        net["frozen"].weight.mul_(0.9)
    if thawed:
        net["frozen"].requires_grad_(True)
        with pytest.raises(ValueError, match=r"'frozen.weight'.*is not this Ensemble's optimizer's"):
            run.steps(20)
    else:
        with pytest.warns(UserWarning, match=r"frozen parameter 'frozen.weight' was written in the search, and is not taken back"):
            swept(run)


def test_a_teacher_inside_of_the_model_goes_back_with_it() -> None:
    """It asks for no gradients, and somebody moves it all the same."""
    net = nn.ModuleDict({"student": model(), "teacher": model().requires_grad_(False)})

    @torch.no_grad()
    def follow() -> None:
        for p, q in zip(net["teacher"].parameters(), net["student"].parameters(), strict=True):
            p.lerp_(q, 0.5)

    begin = state_of(net)
    run = partly(net, net["student"], follow, line=hdet.LineController(net, rule=Fixed(back=True)), every=1)
    run.losses = functools.partial(losses_of, net["student"])
    run.steps(3)
    assert not torch.equal(net["teacher"][0].weight, begin["teacher.0.weight"])
    run.steps(1)
    assert same(state_of(net), begin)


def test_an_optimizer_with_copies_of_the_parameters_is_no_second_one() -> None:
    net = model()
    copied = nn.ParameterList([p.detach().clone() for p in net.parameters()])

    def refresh() -> None:
        with torch.no_grad():
            for p, q in zip(net.parameters(), copied, strict=True):
                p.copy_(q)

    def gradients(*_: Any) -> None:
        for p, q in zip(net.parameters(), copied, strict=True):
            q.grad, p.grad = p.grad, None

    run = partly(net, copied, refresh, refresh=refresh)
    run.optimizer.register_step_pre_hook(gradients)
    begin = state_of(net)
    run.steps(8)
    assert not same(state_of(net), begin)
    assert same(state_of(swept(run).net), begin)


def test_co_resident_replicas_are_taken_back_too_and_share_what_another_optimizer_has() -> None:
    net = model()
    other = torch.optim.AdamW(net[2].parameters(), lr=1e-2)
    line = hdet.SequentialController(hdet.LineController(net, late=False), probe(net))
    run = partly(net, net[0], other.step, line=line, optimizer=hdet.FusedAdamW, together=2, every=2)
    begin = state_of(net)
    with pytest.raises(ValueError, match="'2.weight'"):
        for _ in range(20):
            run.step()
            with run.replica(1):
                assert torch.equal(net[2].weight, run.replicas.sets([net[2].weight])[0][0])
    for k in range(2):
        with run.replica(k):
            assert same(state_of(net), begin)


def second_on_one_rank(rank: int, world: int) -> Any:
    """A shard may have moved on one rank only; no rank may wait for ever."""
    net = model()
    run = partly(net, net[0], write(net) if rank == 1 else lambda: None, every=1)
    begin = state_of(net)
    return told(lambda: run.steps(20)), same(state_of(net), begin)


def test_all_ranks_refuse_alike() -> None:
    (one, begun), (two, begun_too) = run_ranks(second_on_one_rank, 2)
    assert "on another rank" in one and "'2.weight'" in two and begun and begun_too


def sharded(rank: int, world: int) -> Any:
    """FSDP2: the second layer is another optimizer's. Its bias has one row, which lies on the first rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    found = []
    for moves in (None, "2.bias", "2.weight"):
        net = model()
        for part in (net[0], net[2], net):
            fully_shard(part, mesh=mesh)
        moved = [p.to_local().detach() for name, p in net.named_parameters() if name == moves]
        replicas = hdet.Replicas.from_mesh(mesh, replicate="dp_replicate")
        run = partly(net, net[0], lambda moved=moved: [p.add_(1.0) for p in moved], replicas=replicas, total=200, every=1)
        begin = [p.to_local().clone() for p in net.parameters()]
        message = told(lambda run=run: swept(run))
        found.append((message, all(torch.equal(p.to_local(), b) for p, b in zip(net.parameters(), begin, strict=True))))
    return found


def test_shards_are_compared_and_taken_back() -> None:
    for none, bias, weight in run_ranks(sharded, 4):
        assert none == ("no error", True)
        assert ("'2.bias'" in bias[0] or "on another rank" in bias[0]) and bias[1]
        assert ("'2.weight'" in weight[0] or "on another rank" in weight[0]) and weight[1]


# -- buffers in the average ------------------------------------------------------------------------------------------------


def averaged(rank: int, **settings: Any) -> Run:
    """Each rank has seen data of its own."""
    net = Normaliser()
    settings = {"scheduler": None, "spread": 0.0, "every": 2, "gradients": "local", "moments": "average", **settings}
    return Run(rank, net=net, ddp=False, buffers=net, **settings)


def replaced(rank: int, world: int, converge: Any) -> Any:
    """(equal?, said to be so?, said to be so before the step ends?) after each step, after a further pass and after `converge`."""
    run = averaged(rank, converge=converge)
    run.net.double()
    seen = []
    for _ in range(4):
        run.backward()
        passed = run.ensemble.in_sync
        run.optimizer.step()
        run.ensemble.step(1.0)
        run.index += 1
        seen.append((on_all_ranks(run.net.mean), run.ensemble.in_sync, passed))
    run.net(taught(rank)[0].double())
    moved = run.ensemble.in_sync
    run.ensemble.converge()
    return seen, moved, on_all_ranks(run.net.mean), run.ensemble.in_sync


@pytest.mark.parametrize("converge", [hdet.converge.Plain(), hdet.converge.Streaming(2), hdet.converge.Compressed("bf16")], ids=repr)
def test_buffers_that_a_forward_pass_replaces_are_averaged_and_converged_is_true(converge: Any) -> None:
    for seen, moved, equal, converged in run_ranks(replaced, 2, converge):
        if isinstance(converge, hdet.converge.Plain):
            assert seen == [(step % 2 == 1, step % 2 == 1, False) for step in range(4)]
        assert not moved and equal and converged


def unequal(rank: int, world: int) -> str:
    """A buffer that only one of them has made by now."""
    run = averaged(rank, moments="keep")
    run.net.eval()
    run.steps(1)
    run.net.train(rank == 0)
    return told(lambda: run.steps(1))


def test_buffers_that_not_all_replicas_have_are_refused() -> None:
    assert all("the model's buffers differ in number" in text for text in run_ranks(unequal, 2))


def test_a_rollback_takes_back_the_model_s_buffers_counters_included() -> None:
    net = batch_norm()
    run = line_run(1e-3, net=net, line=None, total=100, every=2, buffers=net, divergence=hdet.Divergence(rollback="device")).steps(4)
    x, _ = taught(run.index)
    net(x)  # the next step's forward pass comes before its anchor
    begin = state_of(net)
    net.eval()
    run.step(report=math.nan)
    net.train()
    net(x)
    net.eval()
    run.step(report=math.nan)
    assert run.records[-1]["rolled_back"] and same(state_of(net), begin)


def test_the_tensors_that_are_averaged_are_those_of_the_moment() -> None:
    net = Normaliser()
    tensors = Averaged(list(net.parameters()), model=net)
    assert len(tensors) == 4 and tensors[2] is net.count and tensors[:1] == [net.layer.weight]
    marks = tensors.marks()
    assert tensors.unwritten(marks)
    net(taught(0)[0])
    assert len(tensors) == 5 and tensors[3] is net.mean and not tensors.unwritten(marks)
    marks = tensors.marks()
    net.mean.add_(1)
    assert not tensors.unwritten(marks)
