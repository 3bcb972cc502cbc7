"""What a sweep goes back to: all that the run had at its first step, and of a model that another optimizer trains too, nothing else."""

from __future__ import annotations

import copy
import functools
import gc
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.run.snapshot import Snapshot
from hdet.tensors.buffers import Averaged
from tests.harness import Run, losses_of, model, taught

from ..distributed import run_ranks
from .test_line import Fixed, batch_norm, line_run

STOCK = ["AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "Rprop", "RMSprop", "ASGD", "SGD"]


def fixed(net: nn.Module) -> hdet.LineController:
    """Goes back after four steps."""
    return hdet.LineController(net, rule=Fixed(back=True))


def short(net: nn.Module, **settings: Any) -> Run:
    return line_run(1e-2, net=net, line=fixed(net), **{"total": 400, "every": 1} | settings)


def plain_steps(net: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for key in range(count):
        optimizer.zero_grad()
        losses_of(net, taught(1000 + key)).mean().backward()
        optimizer.step()


def contents(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of the state, by parameter."""
    return [copy.deepcopy(dict(optimizer.state.get(p, {}))) for group in optimizer.param_groups for p in group["params"]]


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)


def state_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in net.state_dict().items()}


# -- buffers -------------------------------------------------------------------------------------------------------------


def test_a_model_that_is_loaded_before_the_first_step_is_gone_back_to() -> None:
    """Running statistics too, whatever has been loaded when, and whether or not it has run in between."""
    trained = batch_norm()
    plain_steps(trained, torch.optim.SGD(trained.parameters(), lr=0.01), 20)
    for forward_first in (False, True):
        net = batch_norm()
        run = short(net)
        if forward_first:
            net(taught(0)[0])
        net.load_state_dict(trained.state_dict())
        begin = state_of(net)
        run.steps(4)
        assert not run.ensemble.sweeping and same(state_of(net), begin)
        run.steps(1)
        assert int(net[1].num_batches_tracked) == 21


def test_a_part_of_the_model_that_is_loaded_counts_too() -> None:
    net = batch_norm()
    run = short(net)
    net(taught(0)[0])
    net[1].load_state_dict({**net[1].state_dict(), "running_mean": torch.full((8,), 5.0)})
    begin = state_of(net)
    run.steps(4)
    assert same(state_of(net), begin)


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


def test_buffers_that_a_forward_pass_replaces_are_taken_back() -> None:
    net = Normaliser()
    begin = state_of(net)
    short(net).steps(4)
    assert same(state_of(net), begin) and net.late is None


@pytest.mark.parametrize("when", ["before", "after a pass"])
def test_a_model_that_is_cast_after_construction_is_taken_back_as_it_is_then(when: str) -> None:
    net = batch_norm()
    run = short(net)
    if when == "after a pass":
        net(taught(0)[0])
    begin_of_buffers = {name: b.double() for name, b in batch_norm().named_buffers()}
    net.double()
    begin = {name: p.clone() for name, p in net.named_parameters()}
    run.steps(4)
    assert same(dict(net.named_parameters()), begin)
    assert all(torch.equal(b.double(), begin_of_buffers[name]) for name, b in net.named_buffers())
    assert net[1].running_mean.dtype == torch.float64


def test_of_a_model_whose_parts_are_called_by_themselves_the_first_call_counts() -> None:
    net = batch_norm()
    begin = state_of(net)
    run = short(net)

    def losses(batch: Any) -> torch.Tensor:
        x = batch[0]
        for part in net:
            x = part(x)
        return ((x - batch[1]) ** 2).mean(1)

    run.losses = losses
    run.steps(4)
    assert same(state_of(net), begin)


def test_a_look_at_the_model_before_the_run_is_not_its_beginning() -> None:
    """In eval mode, of a module that counts all the same."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layer(x)

    net = Counting()
    run = short(net)
    net.eval()
    net(taught(0)[0])
    net.train()
    run.steps(4)
    assert float(net.calls) == 1


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = batch_norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x)


@pytest.mark.parametrize("way", ["torch.compile(model)", "model.compile()"])
def test_a_compiled_model_is_taken_back_to_the_bit_and_not_compiled_again(way: str) -> None:
    torch.compiler.reset()
    net: nn.Module = Whole()
    graphs: list[Any] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

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


def test_a_copy_or_a_pickle_of_the_model_has_nothing_of_the_run() -> None:
    net = batch_norm()
    run = short(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        other(taught(0)[0])
        other.load_state_dict(net.state_dict())
    begin = state_of(net)
    run.steps(4)
    assert same(state_of(net), begin)
    run.ensemble.close()
    hooks = ("_forward_pre_hooks", "_load_state_dict_post_hooks")
    assert not any(getattr(module, name) for module in net.modules() for name in hooks)


# -- the optimizer's state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*STOCK, "FusedAdamW", "FusedSGD"])
def test_a_restart_begins_as_a_new_run_would(name: str) -> None:
    """Whatever its state begins as."""

    def make(parameters: Any, lr: float, weight_decay: float = 0.0) -> Any:
        momentum = {"momentum": 0.9} if name in ("SGD", "FusedSGD") else {}
        return getattr(hdet if name.startswith("Fused") else torch.optim, name)(parameters, lr=lr, **momentum)

    net = model()
    run = short(net, optimizer=make)
    begin = state_of(net)
    run.steps(4)
    assert same(state_of(net), begin)
    other = model()
    optimizer = make(other.parameters(), run.optimizer.param_groups[0]["lr"])
    run.steps(1)
    losses_of(other, taught(4)).mean().backward()
    optimizer.step()
    assert torch.equal(run.weights(), torch.cat([p.detach().flatten() for p in other.parameters()]))


@pytest.mark.parametrize("name", [*STOCK, "FusedAdamW", "FusedSGD", "FusedLion"])
def test_moments_that_were_loaded_come_back(name: str) -> None:
    """After construction, as everything that is loaded; a parameter that had none then has none again."""

    def make(parameters: Any, lr: float, weight_decay: float = 0.0) -> Any:
        momentum = {"momentum": 0.9} if name in ("SGD", "FusedSGD") else {}
        return getattr(hdet if name.startswith("Fused") else torch.optim, name)(parameters, lr=lr, **momentum)

    net = model()
    trained = make(net.parameters(), 1e-2)
    plain_steps(net, trained, 7)
    run = short(net, optimizer=make)
    state = copy.deepcopy(trained.state_dict())
    if name == "AdamW":
        del state["state"][3]
    run.optimizer.load_state_dict({**state, "param_groups": run.optimizer.state_dict()["param_groups"]})
    begin, moments = state_of(net), contents(run.optimizer)
    run.steps(4)
    assert same(state_of(net), begin) and same(contents(run.optimizer), moments)
    assert any(moments) and (name != "AdamW" or float(moments[0]["step"]) == 7)


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_loaded_moments_beside_masters_come_back(masters: str) -> None:
    net = model().bfloat16()
    make = functools.partial(hdet.FusedAdamW, master_weights=masters)
    trained = make(net.parameters(), lr=1e-2)
    plain_steps(net, trained, 7)
    run = short(net, optimizer=make)
    run.optimizer.load_state_dict({**trained.state_dict(), "param_groups": run.optimizer.state_dict()["param_groups"]})
    begin, moments = state_of(net), contents(run.optimizer)
    run.steps(4)
    assert same(state_of(net), begin) and same(contents(run.optimizer), moments)


def test_a_whole_sweep_goes_back_to_what_was_loaded() -> None:
    """Several times: to read the line, perhaps because training broke, and at its end."""
    net = batch_norm()
    trained = torch.optim.AdamW(net.parameters(), lr=1e-3)
    plain_steps(net, trained, 9)
    run = line_run(0.3, net=net, total=400)
    run.optimizer.load_state_dict({**trained.state_dict(), "param_groups": run.optimizer.state_dict()["param_groups"]})
    begin, moments = state_of(net), contents(run.optimizer)
    while run.ensemble.sweeping:
        run.steps(1)
    assert same(state_of(net), begin) and same(contents(run.optimizer), moments)


class Listed(torch.optim.SGD):
    """Keeps tensors in lists and dicts, and something that is nobody's parameter's."""

    def step(self, closure: Any = None) -> None:
        self.state.setdefault("all", {"steps": 0})["steps"] += 1
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("past", []).append(p.grad.clone())
            state.setdefault("inner", {"sum": torch.zeros_like(p)})["sum"].add_(p.grad)
            p.data.sub_(0.01 * state["inner"]["sum"])


def test_state_of_any_form_comes_back() -> None:
    net = model()
    optimizer = Listed(net.parameters(), lr=0.01)
    plain_steps(net, optimizer, 2)
    anchor = Snapshot(list(net.parameters()), optimizer, "host")
    anchor.take()
    before, everyone = contents(optimizer), dict(optimizer.state["all"])
    plain_steps(net, optimizer, 3)
    anchor.restore()
    assert same(contents(optimizer), before) and optimizer.state["all"] == everyone == {"steps": 2}


def test_what_does_not_exist_at_the_beginning_costs_nothing() -> None:
    weight = nn.Parameter(torch.zeros(1000, 1000))
    net = nn.ParameterList([weight])
    run = line_run(1e-3, net=net, total=400)
    weight.grad = torch.ones_like(weight)
    gc.collect()
    gc.freeze()
    run.optimizer.step()
    made = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.numel() == 1_000_000]
    gc.unfreeze()
    assert len({x.data_ptr() for x in made} - {weight.data_ptr(), weight.grad.data_ptr()}) == 4  # anchor, mean, two moments


# -- a second optimizer over the same model --------------------------------------------------------------------------------


def two_optimizers(net: nn.Module, make: Callable[..., Any] = torch.optim.AdamW, **settings: Any) -> tuple[Run, torch.optim.Optimizer]:
    """One has the first layer, the other one all that follows."""
    own = nn.ModuleList([net[0]])
    run = line_run(1e-2, net=own, line=hdet.LineController(net), total=400, optimizer=make, **settings)
    rest = [p for p in net.parameters() if not any(p is q for q in own.parameters())]
    return run, torch.optim.AdamW(rest, lr=1e-3)


def train(net: nn.Module, run: Run, other: torch.optim.Optimizer | None, count: int) -> None:
    for _ in range(count):
        batch = taught(run.index)
        net.zero_grad()
        loss = losses_of(net, batch).mean()
        loss.backward()
        run.optimizer.step()
        if other is not None:
            other.step()
        run.ensemble.step(loss.detach(), closure=functools.partial(losses_of, net, batch))
        run.index += 1


def test_a_second_optimizer_is_refused_and_all_is_as_at_the_beginning() -> None:
    net = batch_norm()
    run, other = two_optimizers(net)
    begin = state_of(net)
    with pytest.raises(
        ValueError, match=r"model has '1.weight', which is not this Ensemble's optimizer's.*into one optimizer.*ensemble.sweeping"
    ):
        train(net, run, other, 20)
    assert run.index < 8 and same(state_of(net), begin) and not run.optimizer.state


def test_a_write_that_no_version_counts_is_seen_too() -> None:
    net = model()
    run, _ = two_optimizers(net)
    begin = state_of(net)

    class Old:
        def step(self) -> None:
            net[2].weight.data.add_(1e-3)

    with pytest.raises(ValueError, match=r"'2.weight'"):
        train(net, run, Old(), 20)
    assert same(state_of(net), begin)


def test_a_second_optimizer_that_waits_for_the_end_of_the_sweep_is_welcome() -> None:
    net = model()
    run, other = two_optimizers(net)
    begin = state_of(net)
    while run.ensemble.sweeping:
        train(net, run, None, 1)
    assert same(state_of(net), begin)
    train(net, run, other, 5)
    assert not torch.equal(net[2].weight, begin["2.weight"])


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_nobody_trains_are_not_refused(frozen: bool) -> None:
    """Neither frozen ones nor others, whatever they hold."""
    net = model()
    with torch.no_grad():
        net[2].bias.fill_(math.nan if frozen else 1.0)
    net.register_parameter("unused", nn.Parameter(torch.full((3,), math.nan)))
    net[2].requires_grad_(not frozen)
    run, _ = two_optimizers(net)
    with torch.no_grad():
        net[2].bias.fill_(1.0)
    while run.ensemble.sweeping:
        train(net, run, None, 1)
    assert run.ensemble.corrections["lr"] != 1 / 16


@pytest.mark.parametrize("thawed", [False, True])
def test_a_large_frozen_part_that_moves_is_told_of_or_refused(thawed: bool) -> None:
    """It is no copy that is kept, but what is written to it is counted: a teacher's average is told of, a second optimizer refused."""
    net = nn.ModuleDict({"trained": model(), "frozen": nn.Linear(100, 100).requires_grad_(False)})
    own = net["trained"]
    run = line_run(1e-2, net=own, line=hdet.LineController(net), total=400)

    def steps(count: int) -> None:
        for _ in range(count):
            batch = taught(run.index)
            loss = losses_of(own, batch).mean()
            loss.backward()
            run.optimizer.step()
            own.zero_grad()
            run.ensemble.step(loss.detach(), closure=functools.partial(losses_of, own, batch))
            run.index += 1

    steps(1)
    with torch.no_grad():
        net["frozen"].weight.mul_(0.9)
    if thawed:
        net["frozen"].requires_grad_(True)
        with pytest.raises(ValueError, match=r"'frozen.weight'.*is not this Ensemble's optimizer's"):
            steps(20)
    else:
        with pytest.warns(UserWarning, match=r"frozen parameter 'frozen.weight' was written in the search, and is not taken back"):
            steps(60)
        assert not run.ensemble.sweeping


def test_a_teacher_inside_of_the_model_goes_back_with_it() -> None:
    """It asks for no gradients, and somebody moves it all the same."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = model(), model().requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.student(x)

    net = Pair()
    begin = state_of(net)
    run = line_run(1e-2, net=net.student, line=fixed(net), total=400, every=1)

    class Follow:
        @torch.no_grad()
        def step(self) -> None:
            for p, q in zip(net.teacher.parameters(), net.student.parameters(), strict=True):
                p.lerp_(q, 0.5)

    train(net, run, Follow(), 3)
    assert not torch.equal(net.teacher[0].weight, begin["teacher.0.weight"])
    train(net, run, Follow(), 1)
    assert same(state_of(net), begin)


def test_an_optimizer_with_copies_of_the_parameters_is_no_second_one() -> None:
    net = model()
    copies = [nn.Parameter(p.detach().clone()) for p in net.parameters()]
    optimizer = torch.optim.AdamW(copies, lr=1e-3)

    def refresh() -> None:
        with torch.no_grad():
            for p, q in zip(net.parameters(), copies, strict=True):
                p.copy_(q)

    line = hdet.LineController(net)
    ensemble = hdet.Ensemble(optimizer, controller=line, total_steps=400, sync=hdet.Sync(1, refresh=refresh))
    begin = state_of(net)
    for step in range(60):
        loss = losses_of(net, taught(step)).mean()
        net.zero_grad()
        loss.backward()
        for p, q in zip(net.parameters(), copies, strict=True):
            q.grad = p.grad
        optimizer.step()
        refresh()
        ensemble.step(loss.detach(), closure=lambda step=step: losses_of(net, taught(step)))
        if not ensemble.sweeping:
            break
    assert not ensemble.sweeping and same(state_of(net), begin)


def test_co_resident_replicas_are_taken_back_too_and_share_what_another_optimizer_has() -> None:
    net = model()
    optimizer = hdet.FusedAdamW(net[0].parameters(), lr=1e-2)
    other = torch.optim.AdamW(net[2].parameters(), lr=1e-2)
    replicas = hdet.CoresidentReplicas(net, 2)
    probe = hdet.ProbeController(lambda m, b: losses_of(m, b).mean(), [taught(i) for i in range(8)], model=net)
    line = hdet.SequentialController(hdet.LineController(net, late=False), probe)
    ensemble = hdet.Ensemble(optimizer, total_steps=400, sync=hdet.Sync(2), controller=line, replicas=replicas)
    begin = state_of(net)

    def step(index: int, trained: bool) -> None:
        net.zero_grad()
        for k in range(2):
            with replicas.use(k):
                loss = losses_of(net, taught(2 * index + k)).mean()
                ensemble.observe(loss.detach())
                (loss / 2).backward()
        optimizer.step()
        if trained:
            other.step()
        ensemble.step(closure=lambda: losses_of(net, taught(2 * index)))

    with pytest.raises(ValueError, match="'2.weight'"):
        for index in range(20):
            step(index, trained=True)
            with replicas.use(1):
                assert torch.equal(net[2].weight, replicas.sets([net[2].weight])[0][0])
    for k in range(2):
        with replicas.use(k):
            assert same(state_of(net), begin)


def second_on_one_rank(rank: int, world: int) -> Any:
    """A shard may have moved on one rank only; no rank may wait for ever."""
    net = model()
    run, _ = two_optimizers(net, every=1)
    begin = state_of(net)

    class Second:
        def step(self) -> None:
            if rank == 1:
                net[2].weight.data.add_(1.0)

    try:
        for _ in range(20):
            batch = taught(run.index)
            net.zero_grad()
            loss = losses_of(net, batch).mean()
            loss.backward()
            run.optimizer.step()
            Second().step()
            run.ensemble.step(loss.detach(), closure=functools.partial(losses_of, net, batch))
            run.index += 1
    except ValueError as error:
        return str(error), same(state_of(net), begin)
    return "no error", False


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
        for part in (net[0], net[2]):
            fully_shard(part, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net[0].parameters(), lr=1e-2)
        line = hdet.LineController(net)
        replicas = hdet.Replicas.from_mesh(mesh, replicate="dp_replicate")
        ensemble = hdet.Ensemble(optimizer, total_steps=200, sync=hdet.Sync(1), controller=line, replicas=replicas)
        begin = [p.to_local().clone() for p in net.parameters()]
        message = ""
        try:
            for step in range(40):
                optimizer.zero_grad()
                loss = losses_of(net, taught(step)).mean()
                loss.backward()
                optimizer.step()
                for name, p in net.named_parameters():
                    if name == moves:
                        p.to_local().detach().add_(1.0)
                ensemble.step(loss.detach(), closure=lambda step=step, net=net: losses_of(net, taught(step)))
                if not ensemble.sweeping:
                    break
        except ValueError as error:
            message = str(error)
        found.append((message, all(torch.equal(p.to_local(), b) for p, b in zip(net.parameters(), begin, strict=True))))
    return found


def test_shards_are_compared_and_taken_back() -> None:
    for none, bias, weight in run_ranks(sharded, 4):
        assert none == ("", True)
        assert ("'2.bias'" in bias[0] or "on another rank" in bias[0]) and bias[1]
        assert ("'2.weight'" in weight[0] or "on another rank" in weight[0]) and weight[1]


# -- buffers in the average ------------------------------------------------------------------------------------------------


def replaced(rank: int, world: int) -> Any:
    """Each rank has seen data of its own."""
    net = Normaliser()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(
        optimizer, knobs=[hdet.LearningRate(0.0)], sync=hdet.Sync(2, buffers=net, gradients="local", moments="average")
    )
    net.double()
    seen = []
    for step in range(4):
        net.zero_grad()
        loss = losses_of(net, taught(10 * step + rank)).mean()
        loss.backward()
        passed = ensemble.in_sync
        optimizer.step()
        ensemble.step(loss)
        seen.append((net.mean.clone(), float(net.late[0]), ensemble.in_sync, passed))
    net(taught(rank)[0])
    after_a_pass = ensemble.in_sync
    ensemble.converge()
    return seen, net.mean.clone(), after_a_pass, ensemble.in_sync


def test_buffers_that_a_forward_pass_replaces_are_averaged_and_converged_is_true() -> None:
    (one, mean, moved, converged), (two, mean_too, *_) = run_ranks(replaced, 2)
    for step, (a, b) in enumerate(zip(one, two, strict=True)):
        equal = step % 2 == 1
        assert torch.equal(a[0], b[0]) == equal == a[2] == b[2]
        assert not a[3], "a forward pass has moved them"
    assert torch.equal(mean, mean_too) and not moved and converged


@pytest.mark.parametrize("converge", [hdet.converge.Plain(), hdet.converge.Streaming(2), hdet.converge.Compressed("bf16")], ids=repr)
def test_every_way_of_averaging_finds_them(converge: Any) -> None:
    for equal in run_ranks(replaced_under, 2, converge):
        assert equal


def replaced_under(rank: int, world: int, converge: Any) -> bool:
    net = Normaliser()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(optimizer, sync=hdet.Sync(2, buffers=net, gradients="local", moments="keep", converge=converge))
    for step in range(2):
        net.zero_grad()
        loss = losses_of(net, taught(10 * step + rank)).mean()
        loss.backward()
        optimizer.step()
        ensemble.step(loss)
    ensemble.converge()
    means = [torch.empty_like(net.mean) for _ in range(world)]
    torch.distributed.all_gather(means, net.mean)
    return torch.equal(means[0], means[1])


def unequal(rank: int, world: int) -> str:
    """A buffer that only one of them has made by now."""
    net = Normaliser()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(optimizer, sync=hdet.Sync(2, buffers=net, gradients="local", moments="keep"))
    try:
        for step in range(2):
            net.train(rank == 0 and step == 1)
            net.zero_grad()
            loss = losses_of(net, taught(10 * step + rank)).mean()
            loss.backward()
            optimizer.step()
            ensemble.step(loss)
    except hdet.ReplicaDisagreement as error:
        return str(error)
    return "no error"


def test_buffers_that_not_all_replicas_have_are_refused() -> None:
    assert all("the model's buffers differ in number" in text for text in run_ranks(unequal, 2))


def test_a_rollback_takes_back_the_model_s_buffers_counters_included() -> None:
    net = batch_norm()
    run = line_run(1e-3, net=net, line=None, total=100, every=2, buffers=net, divergence=hdet.Divergence(rollback="device")).steps(4)
    first = taught(run.index)
    net(first[0])  # the next step's forward pass comes before its anchor
    begin = state_of(net)
    run.optimizer.zero_grad()
    losses_of(net.eval(), first).mean().backward()
    run.optimizer.step()
    net.train()
    run.ensemble.step(math.nan)
    net(first[0])
    run.optimizer.step()
    run.ensemble.step(math.nan)
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
