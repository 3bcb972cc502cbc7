"""Parameters whose memory has another order than their dimensions: channels_last, and transposed
matrices."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet.testing.rules import STORED, assert_equal, run

from .common import BACKENDS, BY_NAME, MUON, RULES, Rule, each_rule, everything, names, replicated


def model(channels_last: bool = True) -> nn.Module:
    torch.manual_seed(3)
    convolutions = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, groups=2)]
    net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 16, 5))
    return net.to(memory_format=torch.channels_last) if channels_last else net


def train(net: nn.Module, optimizer: Any, steps: int = 4, seed: int = 0) -> nn.Module:
    for step in range(steps):
        optimizer.zero_grad()
        batch = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed + step))
        net(batch.to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
    return net


def conv(net: nn.Module) -> Tensor:
    weight: Any = net.get_submodule("0").weight
    assert not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)
    return weight


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES, ids=names)
def test_channels_last_is_trained_as_by_its_peer(rule: Rule, backend: str) -> None:
    options = {"lr": 1e-2, "weight_decay": 0.1, **rule.keeps}
    ours, theirs = model(), model()
    optimizer = rule.fused(ours.parameters(), backend=backend, max_grad_norm=1e6, **options)
    train(ours, optimizer)
    train(theirs, rule.peer(theirs.parameters(), **options))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    state = optimizer.state[conv(ours)]
    assert all(t.stride() == conv(ours).stride() for t in state.values() if t.dim() == 4)


@pytest.mark.usefixtures("small_tensors_have_codes")
@pytest.mark.parametrize("stored", ["float32", "float32 masters", "clipped", "8 bits"])
@each_rule
def test_transposed_matrices_are_stepped_as_others(rule: Rule, stored: str) -> None:
    """In two replicas, of Muon also a stack of matrices; and after a state was loaded."""
    made = [replicated(2, rule, transposed=lies, **STORED[stored]) for lies in (True, False)]
    for params, optimizer, _ in made:
        run(optimizer, params, range(2))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run(optimizer, params, range(2, 4))
    (ours, a, sets), (_, _, others) = made
    assert ours[0].stride() == (1, 33)
    assert all(x.stride() == (1, 33) for x in everything(a) if x.shape == (33, 17))
    coarse = stored == "8 bits" or (rule is MUON and stored == "float32 masters")
    for one, other in zip(itertools.chain(*sets), itertools.chain(*others), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-2 if coarse else 1e-5)


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_muon_steps_convolutions_by_adamw(max_grad_norm: float | None) -> None:
    trained = []
    for channels_last in (False, True):
        net = model(channels_last)
        optimizer = hdet.FusedMuon(
            net.named_parameters(),
            lr=1e-2,
            use_muon=lambda name, p: p.dim() == 2,
            max_grad_norm=max_grad_norm,
            adamw_lr=1e-2,
        )
        trained.append(train(net, optimizer))
    for a, b in zip(*(net.parameters() for net in trained), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "options",
    [
        {"master_weights": "fp32"},
        {"master_weights": "split"},
        {"moment_dtype": torch.bfloat16},
        {"moment_dtype": "8bit"},
    ],
    ids=lambda options: str(*options.values()),
)
def test_all_that_is_stored_lies_as_its_parameter(options: dict[str, Any]) -> None:
    """Bit for bit the run of the same numbers in the order of memory, of which kernels know
    nothing; and on both backends."""
    runs = {}
    for order, backend in (("channels_last", "cpu"), ("channels_last", "torch"), ("memory", "cpu")):
        weight = torch.randn(32, 3, 3, 16, generator=torch.Generator().manual_seed(1))
        weight = weight.bfloat16() if "master_weights" in options else weight
        lying = lambda x, order=order: x if order == "memory" else x.permute(0, 3, 1, 2)
        param = nn.Parameter(lying(weight))
        own = {"stochastic_rounding": "moment_dtype" in options, "backend": backend, **options}
        optimizer = hdet.FusedAdamW([param], lr=1e-2, weight_decay=0.1, **own)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            param.grad = lying(torch.randn(weight.shape, generator=generator).to(param.dtype))
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict()["state"][0])
        if "remainder" in saved:  # bits, of which some are NaN as a bfloat16
            saved["remainder"] = saved["remainder"].view(torch.int16)
        tensors = [param.detach(), *(t for t in saved.values() if t.dim() == 4)]
        in_memory = tensors if order == "memory" else [t.permute(0, 2, 3, 1) for t in tensors]
        runs[order, backend] = in_memory
    first, *others = runs.values()
    for other in others:
        assert len(other) == len(first) >= 3 and all(map(torch.equal, first, other))


@pytest.mark.parametrize("moment_dtype", [torch.float32, "8bit"])
@pytest.mark.parametrize("fused", [hdet.FusedAdamW, hdet.FusedScheduleFreeAdamW])
def test_states_go_from_one_order_to_the_other(fused: Any, moment_dtype: Any) -> None:
    """A checkpoint of a contiguous model goes on in channels_last, and a model may change its order
    between two steps."""
    losses = []
    for moved in ("never", "by checkpoint", "in place"):
        net = model(channels_last=False)
        optimizer = fused(net.parameters(), lr=1e-2, moment_dtype=moment_dtype)
        train(net, optimizer)
        if moved == "in place":
            net.to(memory_format=torch.channels_last)
            conv(net)
        elif moved == "by checkpoint":
            saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            net = model()
            optimizer = fused(net.parameters(), lr=1e-2, moment_dtype=moment_dtype)
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        train(net, optimizer, seed=10)
        losses.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    coarse = {"rtol": 0.0, "atol": 2e-2} if moment_dtype == "8bit" else {}
    for other in losses[1:]:  # blocks of codes have other members
        torch.testing.assert_close(other, losses[0], **coarse)


OTHERWISE = {
    "in order": lambda gradient: gradient.contiguous(),
    "transposed": lambda gradient: gradient.transpose(0, -1).contiguous().transpose(0, -1),
    "with gaps": lambda gradient: torch.stack([gradient, gradient], -1)[..., 0],
    "expanded": lambda gradient: gradient.flatten()[:1].expand(gradient.shape),
    "negated": lambda gradient: torch._neg_view(-gradient),
}


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("rule", [BY_NAME["adamw"], MUON], ids=names)
@pytest.mark.parametrize("lies", OTHERWISE)
def test_a_gradient_that_lies_otherwise_is_taken(
    lies: str, rule: Rule, max_grad_norm: float | None
) -> None:
    """As torch's optimizers do; also clipped, and where gradients are zeroed by the step."""
    made = []
    for change in (OTHERWISE[lies], lambda gradient: gradient):
        options = {"zero_gradients": True, "max_grad_norm": max_grad_norm}
        params, optimizer, _ = replicated(1, rule, **options)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                values = torch.empty_like(param)
                values.copy_(torch.randn(param.shape, generator=generator))
                if lies == "expanded" and param.dim():
                    values = torch.empty_like(param).copy_(OTHERWISE[lies](values))
                param.grad = change(values) if step != 1 and param.dim() else values
            optimizer.step()
            assert not any(param.grad.any() for param in params)  # type: ignore[union-attr]
        made.append(params)
    assert_equal(*made)
