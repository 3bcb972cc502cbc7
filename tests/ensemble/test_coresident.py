"""CoresidentReplicas by itself: whose weights the model has, where gradients go, what is put back, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.harness import batch, loss_of, model


def apart(net: nn.Module, count: int = 3) -> hdet.CoresidentReplicas:
    """Replicas with weights of their own: replica k's are the model's + k."""
    replicas = hdet.CoresidentReplicas(net, count)
    for k in range(1, count):
        with replicas.use(k), torch.no_grad():
            for p in net.parameters():
                if p.requires_grad:
                    p.add_(k)
    return replicas


def by_hand(make: Callable[[], nn.Module], count: int) -> list[torch.Tensor]:
    """Gradients: one copy of the model for each replica of `apart`, added up in order."""
    totals: list[torch.Tensor] = []
    for k in range(count):
        plain = make()
        with torch.no_grad():
            for p in plain.parameters():
                p.add_(k)
        (loss_of(plain, batch(k)) / count).backward()
        own = [p.grad for p in plain.parameters()]
        totals = own if not totals else [a + b for a, b in zip(totals, own, strict=True)]
    return totals


def values(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


# -- whose weights -----------------------------------------------------------------------------------------------------------


def test_inside_of_use_the_model_is_that_replica_and_outside_it_is_itself() -> None:
    net = model()
    own, before, keys = list(net.parameters()), values(net), list(net.state_dict())
    replicas, places = apart(net), {}
    for k in (2, 0, 1, 1, 2):
        with replicas.use(k):
            assert replicas.index == k and replicas.in_use
            place = [p.data_ptr() for p in net.parameters()]
            assert places.setdefault(k, place) == place, "switching copies nothing"
            assert [
                torch.equal(p, b + k) for p, b in zip(net.parameters(), before, strict=True)
            ] == [True] * 4
            assert list(net.state_dict()) == keys
        assert (
            all(a is b for a, b in zip(net.parameters(), own, strict=True))
            and not replicas.in_use
            and replicas.index == 0
        )
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before, strict=True))


def test_nested_and_interleaved_uses_and_exceptions_end_at_the_model() -> None:
    net = model()
    weight = net[0].weight
    replicas = apart(net)
    with replicas.use(1):
        with replicas.use(2):
            assert replicas.index == 2
        assert replicas.index == 1
    with pytest.raises(ArithmeticError), replicas.use(2):
        raise ArithmeticError
    assert net[0].weight is weight
    first, second = replicas.use(1), replicas.use(2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert replicas.index == 2, "the one that is still open counts"
    second.__exit__(None, None, None)
    assert net[0].weight is weight and not replicas.in_use


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.outside = nn.Linear(6, 6), nn.Linear(6, 6)
        self.outside.weight = self.inside.weight
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.outside(self.inside(x).tanh()))


def test_a_tied_weight_is_exchanged_wherever_it_occurs_and_is_one_leaf() -> None:
    net = Tied()
    replicas = apart(net, 2)
    with replicas.use(1):
        assert net.inside.weight is net.outside.weight
        loss_of(net, batch(0)).backward()
    gradient, net.inside.weight.grad = net.inside.weight.grad, None
    plain = Tied()
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(1)
    loss_of(plain, batch(0)).backward()
    assert torch.equal(gradient, plain.inside.weight.grad)


def test_modules_that_keep_lists_of_their_own_weights_are_exchanged_too() -> None:
    """nn.LSTM reads its weights from a list beside its parameters."""
    torch.manual_seed(0)
    net = nn.LSTM(4, 3)
    x = torch.randn(5, 2, 4)
    replicas = apart(net, 2)
    before = net(x)[0]
    with replicas.use(1):
        other = net(x)[0]
    plain = nn.LSTM(4, 3)
    plain.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    assert torch.equal(other, plain(x)[0]) and not torch.equal(other, before)
    assert torch.equal(net(x)[0], before)


# -- gradients ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["inside", "outside", "at the end", "inside of another"])
@pytest.mark.parametrize("zeros", [False, True])
def test_gradients_of_all_replicas_add_up_in_the_models_own(where: str, zeros: bool) -> None:
    net = model()
    replicas = apart(net)
    if zeros:
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
    held = [p.grad for p in net.parameters()]
    losses = []
    for k in range(3):
        with replicas.use(k):
            loss = loss_of(net, batch(k)) / 3
            if where == "inside":
                loss.backward()
        if where == "outside":
            loss.backward()
        losses.append(loss)
    if where in ("at the end", "inside of another"):
        with replicas.use(1) if where == "inside of another" else nullcontext():
            for loss in losses:
                loss.backward()
    for p, total in zip(net.parameters(), by_hand(model, 3), strict=True):
        assert torch.equal(p.grad, total)
    if zeros:
        assert all(p.grad is h for p, h in zip(net.parameters(), held, strict=True)), (
            "added up in place"
        )
    for tensors in replicas.sets(list(net.parameters()))[1:]:
        assert all(t.grad is None for t in tensors), "one gradient, not K"


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def test_frozen_parameters_and_buffers_are_shared() -> None:
    net = WithNorm()
    replicas = hdet.CoresidentReplicas(net, 2)
    frozen, mean = net.first.weight, net.norm.running_mean
    with replicas.use(1):
        assert (
            net.first.weight is frozen
            and net.norm.running_mean is mean
            and net.first.bias is not None
        )
        net(batch(0)[0])
    with replicas.use(0):
        net(batch(1)[0])
    assert int(net.norm.num_batches_tracked) == 2, "K times a step"
    net.first.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="'first.weight' was frozen"), replicas.use(1):
        pass


def test_freezing_later_holds_for_all_replicas() -> None:
    net = model()
    replicas = apart(net, 2)
    net[0].requires_grad_(False)
    with replicas.use(1):
        assert not net[0].weight.requires_grad and net[2].weight.requires_grad
        loss_of(net, batch(0)).backward()
    assert net[0].weight.grad is None and net[2].weight.grad is not None


# -- until the first step ------------------------------------------------------------------------------------------------------


def test_until_the_first_step_all_replicas_follow_the_model() -> None:
    net = model()
    replicas = hdet.CoresidentReplicas(net, 2)
    with replicas.use(1):
        net(batch(0)[0])
    loaded = {name: value + 1 for name, value in net.state_dict().items()}
    net.load_state_dict(loaded)
    with replicas.use(1):
        assert all(torch.equal(p, loaded[name]) for name, p in net.named_parameters())


def test_warm_noise_is_each_replicas_own() -> None:
    net = model()
    replicas = hdet.CoresidentReplicas(net, 3)
    for k in (1, 2, 0):
        with replicas.use(k):
            hdet.warm_noise_(net.parameters(), nu=0.1, replicas=replicas)
            with replicas.use((k + 1) % 3):
                net(batch(0)[0])
    for k in range(3):
        other = model()
        hdet.warm_noise_(other.parameters(), nu=0.1, replicas=hdet.Replicas(k, 3, None))
        with replicas.use(k):
            assert all(
                torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True)
            )


# -- compiled models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", ["model.compile()", "torch.compile(model)", "CoresidentReplicas(torch.compile(model))"]
)
def test_a_compiled_model_is_compiled_once_for_all_replicas(way: str) -> None:
    torch.compiler.reset()
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net = Tied()
    compiled = net if way == "model.compile()" else torch.compile(net, backend=counting)
    if compiled is net:
        net.compile(backend=counting)
    replicas = apart(compiled if way.startswith("Coresident") else net, 4)
    outputs = []
    for _ in range(2):
        for k in range(4):
            with replicas.use(k):
                loss = loss_of(compiled, batch(0))
                loss.backward()
                outputs.append(loss.detach())
    assert len(graphs) == 1
    plain = Tied()
    for k in range(4):
        plain.load_state_dict({name: value + k for name, value in net.state_dict().items()})
        assert torch.allclose(outputs[k], loss_of(plain, batch(0)).detach())
    assert len({float(x) for x in outputs}) == 4
    torch.compiler.reset()


# -- what is refused -----------------------------------------------------------------------------------------------------------


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.all = [self.layer.weight]


class FullyShardedDataParallel(nn.Linear):
    """Named like torch's, which needs a process group."""


def hooked() -> nn.Module:
    net = nn.Linear(2, 2)
    net.weight.register_hook(lambda gradient: gradient)
    return net


class Sharded(nn.Parameter):
    placements = ()

    def to_local(self) -> torch.Tensor:
        return self.data


def sharded() -> nn.Module:
    net = nn.Linear(2, 2)
    net.weight = Sharded(torch.ones(2, 2))
    return net


@pytest.mark.parametrize(
    ("make", "count", "kind", "message"),
    [
        (lambda: nn.Linear(2, 2), 1, ValueError, "num_replicas must be a whole number >= 2, got 1"),
        (lambda: nn.Linear(2, 2), 2.0, ValueError, "num_replicas"),
        (lambda: [nn.Linear(2, 2)], 2, TypeError, "model must be a torch.nn.Module, got list"),
        (
            lambda: nn.Linear(2, 2).requires_grad_(False),
            2,
            ValueError,
            "no parameter that is trained",
        ),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), 2, ValueError, "wrapped in DataParallel"),
        (
            lambda: nn.Sequential(FullyShardedDataParallel(2, 2)),
            2,
            ValueError,
            "module '0' is wrapped in FullyShardedDataParallel",
        ),
        (lambda: torch.jit.script(nn.Linear(2, 2)), 2, ValueError, "scripted"),
        (lambda: nn.LazyLinear(2), 2, ValueError, "'weight' is not initialised"),
        (Hidden, 2, ValueError, "keeps a parameter in the plain attribute 'all'"),
        (hooked, 2, ValueError, "'weight' has gradient hooks"),
        (sharded, 2, ValueError, "'weight' is a DTensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:`torch.jit")
def test_models_that_cannot_be_switched_are_refused_by_name(
    make: Any, count: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
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
