"""CoresidentReplicas alone: whose weights the model has, where gradients go, what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hdet
from tests.harness import Batch, batch, loss_of, model

from .helpers import same


def moved(net: nn.Module, k: int) -> nn.Module:
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(k)
    return net


def apart(net: nn.Module, count: int = 3) -> hdet.CoresidentReplicas:
    """Replica k's weights are the model's + k."""
    replicas = hdet.CoresidentReplicas(net, count)
    for k in range(1, count):
        with replicas.use(k):
            moved(net, k)
    return replicas


def by_hand(make: Callable[[], nn.Module], count: int) -> list[torch.Tensor]:
    """The gradients of one copy of the model for each replica of `apart`, added up in order."""
    found = []
    for k in range(count):
        net = moved(make(), k)
        (loss_of(net, batch(k)) / count).backward()
        found.append([p.grad for p in net.parameters()])
    return [sum(of, torch.zeros_like(of[0])) for of in zip(*found, strict=True)]


def gradients(net: nn.Module) -> list[Any]:
    return [p.grad for p in net.parameters()]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.outside = nn.Linear(6, 6), nn.Linear(6, 6)
        self.outside.weight = self.inside.weight
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.outside(self.inside(x).tanh()))


class Recurrent(nn.LSTM):
    """Reads its weights from a list beside its parameters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


# -- whose weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [model, Tied, Recurrent])
def test_inside_of_use_the_model_is_that_replica_and_outside_it_is_itself(make: Any) -> None:
    net, data = make(), batch(0)[0]
    own, before, keys = list(net.parameters()), list(make().parameters()), list(net.state_dict())
    replicas, places, output = apart(net), {}, net(data)
    for k in (2, 0, 1, 1, 2):
        with replicas.use(k):
            assert replicas.index == k and replicas.in_use
            place = [p.data_ptr() for p in net.parameters()]
            assert places.setdefault(k, place) == place, "switching copies nothing"
            assert same(list(net.parameters()), [b + k for b in before])
            assert torch.equal(net(data), moved(make(), k)(data))
            assert list(net.state_dict()) == keys
        assert not replicas.in_use and replicas.index == 0
        assert all(a is b for a, b in zip(net.parameters(), own, strict=True))
    assert same(own, before) and same(net.state_dict(), make().state_dict())
    assert torch.equal(net(data), output)


# -- gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [model, Tied, Recurrent])
@pytest.mark.parametrize("where", ["inside", "outside", "at the end", "inside of another"])
@pytest.mark.parametrize("zeros", [False, True])
def test_gradients_of_replicas_add_up_in_the_models(where: str, zeros: bool, make: Any) -> None:
    net = make()
    replicas, losses = apart(net), []
    for p in net.parameters() if zeros else ():
        p.grad = torch.zeros_like(p)
    held = gradients(net)
    for k in range(3):
        with replicas.use(k):
            losses.append(loss_of(net, batch(k)) / 3)
            if where == "inside":
                losses.pop().backward()
        if where == "outside":
            losses.pop().backward()
    with replicas.use(1) if where == "inside of another" else nullcontext():
        for loss in losses:
            loss.backward()
    assert same(gradients(net), by_hand(make, 3))
    if zeros:  # added up in place
        assert all(p.grad is h for p, h in zip(net.parameters(), held, strict=True))
    for tensors in replicas.sets(list(net.parameters()))[1:]:
        assert all(t.grad is None for t in tensors), "one gradient, not K"


def test_frozen_parameters_and_buffers_are_shared() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    net[0].weight.requires_grad_(False)
    replicas = hdet.CoresidentReplicas(net, 2)
    frozen, mean = net[0].weight, net[1].running_mean
    for k in (1, 0):
        with replicas.use(k):
            assert net[0].weight is frozen and net[1].running_mean is mean
            net(batch(k)[0])
    assert int(net[1].num_batches_tracked) == 2, "K times a step"
    net[2].requires_grad_(False)  # later
    with replicas.use(1):
        assert not net[2].weight.requires_grad and net[1].weight.requires_grad
    net[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match="'0.weight' was frozen"), replicas.use(1):
        pass


# -- compiled models ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", ["model.compile()", "torch.compile(model)", "CoresidentReplicas(torch.compile(model))"]
)
def test_a_compiled_model_is_compiled_once_for_all_replicas(way: str) -> None:
    torch.compiler.reset()
    graphs: list[Any] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net = Tied()
    compiled = net if way == "model.compile()" else torch.compile(net, backend=counting)
    if compiled is net:
        net.compile(backend=counting)
    replicas, outputs = apart(compiled if way.startswith("Coresident") else net, 4), []
    for k in [*range(4), *range(4)]:
        with replicas.use(k):
            loss = loss_of(compiled, batch(0))
            loss.backward()
            outputs.append(loss.detach())
    assert len(graphs) == 1 and len({float(x) for x in outputs}) == 4
    for k in range(4):
        assert torch.allclose(outputs[k], loss_of(moved(Tied(), k), batch(0)).detach())
    torch.compiler.reset()


# -- what is refused ---------------------------------------------------------------------------


class Hidden(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.all = [self.weight]


def nested() -> nn.Module:
    net: Any = layer()
    net.nest = [{"a": (1, [net.weight])}]
    return net


class FullyShardedDataParallel(nn.Linear):
    """Named like torch's, which needs a process group."""


class Sharded(nn.Parameter):
    placements = ()

    def to_local(self) -> torch.Tensor:
        return self.data


def layer(weight: nn.Parameter | None = None, hook: Any = None) -> nn.Module:
    net = nn.Linear(2, 2)
    net.weight = net.weight if weight is None else weight
    if hook:
        net.weight.register_hook(hook)
    return net


@pytest.mark.parametrize(("make", "count", "message"), [
    (layer, 1, "num_replicas must be a whole number >= 2, got 1"),
    (layer, 2.0, "num_replicas"),
    (lambda: [layer()], 2, "model must be a torch.nn.Module, got list"),
    (lambda: layer().requires_grad_(False), 2, "no parameter that is trained"),
    (lambda: nn.DataParallel(layer()), 2, "wrapped in DataParallel"),
    (lambda: nn.Sequential(FullyShardedDataParallel(2, 2)), 2,
     "module '0' is wrapped in FullyShardedDataParallel"),
    (Hidden, 2, "keeps a parameter in the plain attribute 'all'"),
    (nested, 2, "keeps a parameter in the plain attribute 'nest'"),
    (lambda: layer(hook=lambda gradient: gradient), 2, "'weight' has gradient hooks"),
    (lambda: layer(Sharded(torch.ones(2, 2))), 2, "'weight' is a DTensor"),
])  # fmt: skip
def test_what_cannot_be_switched_is_refused_by_name(make: Any, count: Any, message: str) -> None:
    with pytest.raises(TypeError if "got list" in message else ValueError, match=message):
        hdet.CoresidentReplicas(make(), count)


@pytest.mark.parametrize("replica", [-1, 3, 1.0, None, True])
def test_a_replica_that_does_not_exist_is_refused(replica: Any) -> None:
    replicas = hdet.CoresidentReplicas(model(), 3)
    with pytest.raises(ValueError, match="replica must be one of 0 .. 2"), replicas.use(replica):
        pass
    assert replicas.index == 0


def test_stock_optimizers_and_foreign_parameters_are_refused_by_name() -> None:
    net = model()
    replicas = hdet.CoresidentReplicas(net, 2)
    with pytest.raises(TypeError, match=r"torch\.optim\.adamw\.AdamW.*hdet\.FusedAdamW"):
        hdet.Ensemble(torch.optim.AdamW(net.parameters()), replicas=replicas)
    optimizer = hdet.FusedAdamW([*net.parameters(), nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="parameter 4 of group 0 is not in the model"):
        hdet.Ensemble(optimizer, replicas=replicas)
    assert optimizer.multipliers == [[1.0]]


# -- activation checkpointing ------------------------------------------------------------------


BOTH = pytest.mark.parametrize("reentrant", [False, True])
REMEDY = r"call backward inside the same `with replicas.use\(k\):`"


class Blocks(nn.Module):
    """The layers are checkpointed, all or but for the first."""

    def __init__(self, reentrant: bool | None = None, first_too: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        self.layers, self.last = nn.Sequential(nn.Linear(6, 8), *blocks), nn.Linear(8, 1)
        self.reentrant, self.first_too = reentrant, first_too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            again = self.reentrant is not None and (i > 0 or self.first_too)
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if again else layer(x)
        return self.last(x)


def differentiable(key: int) -> Batch:
    x, y = batch(key)
    return x.requires_grad_(), y


def loss_at(net: nn.Module, k: int) -> torch.Tensor:
    return loss_of(net, differentiable(k))


@BOTH
@pytest.mark.parametrize("first_too", [False, True])
def test_inside_of_use_gradients_are_those_of_training_by_hand(
    reentrant: bool, first_too: bool
) -> None:
    net = Blocks(reentrant, first_too)
    replicas = apart(net)
    for k in range(3):
        with replicas.use(k):
            (loss_at(net, k) / 3).backward()
    assert same(gradients(net), by_hand(Blocks, 3))


@BOTH
@pytest.mark.parametrize(("first_too", "k", "j"), [
    *((first_too, k, None) for first_too in (False, True) for k in (1, 2)),
    *((False, k, j) for k, j in ((0, 1), (1, 0), (1, 2))),
])  # fmt: skip
def test_outside_of_use_backward_is_an_error(
    reentrant: bool, first_too: bool, k: int, j: int | None
) -> None:
    """And inside of the use of another replica, j."""
    net = Blocks(reentrant, first_too)
    replicas = apart(net)
    with replicas.use(k):
        loss = loss_at(net, k)
    use = nullcontext() if j is None else replicas.use(j)
    said = "" if j is None else f"replica {k}'s backward .* those of replica {j}: "
    with pytest.raises(ValueError, match=said + REMEDY), use:
        loss.backward()


def test_a_copy_or_a_pickle_of_the_model_is_a_model() -> None:
    net = Blocks(True, first_too=True)
    apart(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        loss_at(other, 0).backward()
        assert same(gradients(other), by_hand(Blocks, 1))
