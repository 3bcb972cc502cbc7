"""Pairs of optimizers: a fused one and torch's, on equal parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

import hdet.optim
from hdet import kernels
from hdet import rules as facts
from hdet.optim import FusedOptimizer
from hdet.testing.rules import (
    ReferenceOptimizer,
    Update,
    parameters,
    replicate,
    set_gradients,
    state_of,
)


@contextmanager
def plans_made() -> Iterator[mock.Mock]:
    """Counts the plans that steps need anew."""
    with mock.patch.object(kernels, "step_plan", wraps=kernels.step_plan) as made:
        yield made


BACKENDS = ["cpu", "torch"]
PEERS: dict[str, Update] = {}
"""of rules that torch does not have, as torch would write them after decoupled decay"""


def peer(update: Update) -> Update:
    PEERS[update.__name__] = update
    return update


@peer
def lion(group: dict[str, Any], t: float, p: Tensor, g: Tensor, m: Tensor) -> None:
    """Chen et al. 2023, Algorithm 2"""
    p.add_(m.lerp(g, 1 - group["betas"][0]).sign(), alpha=-group["lr"])
    m.lerp_(g, 1 - group["betas"][1])


@peer
def nadamw(group: dict[str, Any], t: float, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    """Choi et al. 2019, Table 1"""
    beta1, beta2 = group["betas"]
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = v.sqrt().div_((1 - beta2**t) ** 0.5).add_(group["eps"])
    p.addcdiv_(m.lerp(g, 1 - beta1), root, value=-group["lr"] / (1 - beta1**t))


@peer
def ademamix(
    group: dict[str, Any], t: float, p: Tensor, g: Tensor, m: Tensor, slow: Tensor, v: Tensor
) -> None:
    """Pagliardini et al. 2024, Algorithm 1 and Equation 1"""
    (beta1, beta2, beta3), alpha = group["betas"], group["alpha"]
    if t < group["t_alpha"]:
        alpha *= t / group["t_alpha"]
    if t < group["t_beta3"]:
        share, ln1, ln3 = t / group["t_beta3"], math.log(beta1), math.log(beta3)
        beta3 = math.exp(ln1 * ln3 / ((1 - share) * ln3 + share * ln1))
    m.lerp_(g, 1 - beta1)
    slow.lerp_(g, 1 - beta3)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = v.sqrt().div_((1 - beta2**t) ** 0.5).add_(group["eps"])
    p.addcdiv_(m / (1 - beta1**t) + alpha * slow, root, value=-group["lr"])


@peer
def adopt(group: dict[str, Any], t: float, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    """Taniguchi et al. 2024, Algorithm 2, clipped as in the authors' code"""
    beta1, beta2 = group["betas"]
    if t > 1:
        limit = (t - 1) ** 0.25
        m.lerp_((g / v.sqrt().clamp(min=group["eps"])).clamp(-limit, limit), 1 - beta1)
        p.add_(m, alpha=-group["lr"])
    v.mul_(beta2 if t > 1 else 0).addcmul_(g, g, value=1 - beta2 if t > 1 else 1)


def _agreeing(u: Tensor, g: Tensor) -> Tensor:
    """Liang et al. 2024, Algorithm 1, with the mean as the authors' code has it"""
    mask = (u.sign() * g.sign() > 0).to(u.dtype)
    return u * mask / mask.mean().clamp(min=1e-3) if u.numel() else u


@peer
def cautious_adamw(
    group: dict[str, Any], t: float, p: Tensor, g: Tensor, m: Tensor, v: Tensor
) -> None:
    beta1, beta2 = group["betas"]
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = v.sqrt().div_((1 - beta2**t) ** 0.5).add_(group["eps"])
    p.addcdiv_(_agreeing(m, g), root, value=-group["lr"] / (1 - beta1**t))


@peer
def cautious_lion(group: dict[str, Any], t: float, p: Tensor, g: Tensor, m: Tensor) -> None:
    p.add_(_agreeing(m.lerp(g, 1 - group["betas"][0]).sign(), g), alpha=-group["lr"])
    m.lerp_(g, 1 - group["betas"][1])


@peer
def mars(
    group: dict[str, Any], t: float, p: Tensor, g: Tensor, m: Tensor, v: Tensor, last: Tensor
) -> None:
    """Yuan et al. 2024, Algorithm 2, approximate"""
    beta1, beta2 = group["betas"]
    c = g + group["gamma"] * beta1 / (1 - beta1) * (g - last)
    c = c / c.norm().clamp(min=1)
    last.copy_(g)
    m.lerp_(c, 1 - beta1)
    v.mul_(beta2).addcmul_(c, c, value=1 - beta2)
    root = v.sqrt().div_((1 - beta2**t) ** 0.5).add_(group["eps"])
    p.addcdiv_(m, root, value=-group["lr"] / (1 - beta1**t))


@peer
def adan(
    group: dict[str, Any],
    t: float,
    p: Tensor,
    g: Tensor,
    m: Tensor,
    d: Tensor,
    n: Tensor,
    neg_pre_grad: Tensor,
) -> None:
    """Xie et al. 2022, Algorithm 1, with the corrections of the authors' code"""
    beta1, beta2, beta3 = group["betas"]
    e = g + neg_pre_grad if t > 1 else g - g
    neg_pre_grad.copy_(-g)
    m.lerp_(g, 1 - beta1)
    d.lerp_(e, 1 - beta2)
    look = g + beta2 * e
    n.mul_(beta3).addcmul_(look, look, value=1 - beta3)
    root = n.sqrt().div_((1 - beta3**t) ** 0.5).add_(group["eps"])
    p.addcdiv_(m / (1 - beta1**t) + beta2 / (1 - beta2**t) * d, root, value=-group["lr"])


def _peer_of(rule: facts.Rule) -> Callable[..., Optimizer]:
    if rule.name in PEERS:
        return partial(ReferenceOptimizer, rule=rule.name, update=PEERS[rule.name])
    return getattr(torch.optim, rule.takes or f"there is no @peer {rule.name}")


@dataclass(frozen=True)
class Rule:
    """A fused optimizer, its peer, and settings for three groups."""

    name: str
    fused: type[FusedOptimizer]
    peer: Callable[..., Optimizer]
    groups: list[dict[str, Any]]
    moments: tuple[str, ...]
    keeps: dict[str, Any]
    """settings without which there are no moments"""


GROUPS: list[dict[str, Any]] = [
    {"lr": 3e-3, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.3, "t_beta3": 4},
    {"betas": (0.8, 0.9), "eps": 1e-4, "momentum": 0.8, "nesterov": True, "t_alpha": 3},
    {"weight_decay": 0.0, "maximize": True, "momentum": 0.9},
]


def known(rule: facts.Rule, settings: dict[str, Any]) -> dict[str, Any]:
    """Those that the rule has, as many betas as it has."""
    keys = (*rule.keys, "maximize")
    found = {key: value for key, value in settings.items() if key in keys}
    if "betas" in found:
        count = len(found["betas"])
        found["betas"] = (*found["betas"], *rule.settings["betas"][count:])
    return found


def _rows(rule: facts.Rule) -> Iterator[Rule]:
    fused = getattr(hdet.optim, str(rule.optimizer))
    keeps = {} if rule.kept_if is None else {rule.kept_if: 0.9}
    groups = [known(rule, group) for group in GROUPS]
    peer = _peer_of(rule)
    yield Rule(rule.name, fused, peer, groups, rule.moments, keeps)
    if keeps:
        yield Rule(f"plain {rule.name}", fused, peer, _PLAIN, (), {})


_PLAIN: list[dict[str, Any]] = [{"weight_decay": 0.1}, {}, {"maximize": True}]
RULES = [
    row
    for rule in facts.RULES.values()
    if rule.optimizer and rule.base == "FusedOptimizer"  # others have tests of their own
    for row in _rows(rule)
]
BY_NAME = {rule.name: rule for rule in RULES}
MUON_SETTINGS: list[dict[str, Any]] = [
    {"nesterov": False, "momentum": 0.8},
    {"momentum": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"adjust_lr_fn": "original", "ns_steps": 1},
    {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7},
    {"ns_coefficients": hdet.optim.POLAR_EXPRESS},
    {"maximize": True, "eps": 3.0},
]


class MuonInFloat32(hdet.optim.FusedMuon):
    """On any processor."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **{"ns_dtype": torch.float32, **options})


MUON = Rule(
    "muon",
    MuonInFloat32,
    Optimizer,
    [
        {"use_muon": True, "weight_decay": 0.1},
        {
            "use_muon": True,
            "higher_dims": "stack",
            "momentum": 0.8,
            "nesterov": False,
            "maximize": True,
        },
        {"use_muon": False, "betas": (0.8, 0.9), "weight_decay": 0.0},
    ],
    ("momentum_buffer",),
    {},
)
FREE = Rule(
    "schedule-free",
    hdet.optim.FusedScheduleFreeAdamW,
    Optimizer,
    [{"lr": 3e-3}, {"betas": (0.8, 0.9), "r": 1.0}, {"maximize": True, "warmup_steps": 4}],
    ("exp_avg_sq", "z"),
    {},
)
OURS = [*RULES, MUON, FREE]
"""for promises that need no peer; these two have tests of their own beside theirs"""
TORCH_RULES = [rule for rule in RULES if isinstance(rule.peer, type)]


def names(rule: Rule) -> str:
    return rule.name


each_rule = pytest.mark.parametrize("rule", OURS, ids=names)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def groups(params: Sequence[Parameter], rule: Rule = BY_NAME["adamw"]) -> list[dict[str, Any]]:
    cuts = [params[:2], params[2:4], params[4:]]
    if rule is MUON:  # a matrix, a stack of them, and the rest
        cuts = [params[:1], params[3:4], [*params[1:3], *params[4:]]]
    return [
        {"params": list(cut), **settings} for cut, settings in zip(cuts, rule.groups, strict=True)
    ]


Make = Callable[[list[Parameter], Any], Optimizer]


class Pair:
    """`ours` and `theirs`: equal parameters; `a` and `b`: the fused optimizer and its peer."""

    def __init__(
        self, rule: Rule = BY_NAME["adamw"], make: Make | None = None, **options: Any
    ) -> None:
        self.rule = rule
        self.ours, self.theirs = parameters(), parameters()
        if make is None:
            self.a: Any = rule.fused(groups(self.ours, rule), lr=1e-2, **options)
            self.b: Any = rule.peer(groups(self.theirs, rule), lr=1e-2)
        else:
            self.a, self.b = make(self.ours, rule.fused), make(self.theirs, rule.peer)

    def run(
        self, steps: int | range, skip: Callable[[int, int], bool] = lambda step, i: False
    ) -> Iterator[int]:
        """Steps both; yields after each."""
        for step in range(steps) if isinstance(steps, int) else steps:
            set_gradients(self.ours, step, skip)
            set_gradients(self.theirs, step, skip)
            self.a.step()
            self.b.step()
            yield step

    def go(
        self, steps: int | range, skip: Callable[[int, int], bool] = lambda step, i: False
    ) -> None:
        for _ in self.run(steps, skip):
            pass

    def check(self) -> None:
        assert_close(self.ours, self.theirs)
        if self.rule in TORCH_RULES:
            assert_same_state(self.a, self.b)


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-6) -> None:
    """Of the parameters' scale, which is 1."""
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=tolerance, atol=tolerance)


def assert_norms(found: Mapping[Any, Tensor], gradients: Mapping[Any, Tensor]) -> None:
    """`gradient_norms()` beside torch's, of the gradients with these keys."""
    assert list(found) == list(gradients)
    for key, gradient in gradients.items():
        norm = torch.linalg.vector_norm(gradient.double()).float()
        torch.testing.assert_close(found[key], norm, rtol=2e-7, atol=0)


def assert_same_state(ours: Optimizer, theirs: Optimizer) -> None:
    """Torch's layout: the same names, dtypes, shapes and values, and equal groups.

    SGD counts steps here, torch's does not.
    """
    one, other = ours.state_dict(), theirs.state_dict()
    extra = {"step"} if isinstance(theirs, SGD) else set()
    for key, values in other["state"].items():
        values = {name: value for name, value in values.items() if value is not None}
        assert one["state"][key].keys() == values.keys() | extra
        for name, value in values.items():
            found = one["state"][key][name]
            assert (found.dtype, found.shape, found.device) == (
                value.dtype,
                value.shape,
                value.device,
            )
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    assert one["state"].keys() == other["state"].keys() or isinstance(theirs, SGD)
    assert [group.keys() for group in one["param_groups"]] == [
        group.keys() for group in other["param_groups"]
    ]
    assert one["param_groups"] == other["param_groups"]


def everything(optimizer: Any) -> list[Tensor]:
    """All tensors of its state, of the first parameter first and by name, and the parameters."""
    entries = [state[key] for state in state_of(optimizer) for key in sorted(state)]
    kept = [one for value in entries for one in (value if isinstance(value, list) else [value])]
    return [*kept, *(param for group in optimizer.param_groups for param in group["params"])]


# -- replicas --------------------------------------------------------------------------------------


def replicated(
    count: int = 3,
    rule: Rule = BY_NAME["adamw"],
    dtype: torch.dtype = torch.float32,
    transposed: bool = True,
    **options: Any,
) -> tuple[list[Parameter], FusedOptimizer, list[list[Tensor]]]:
    """See `replicate`."""
    made = groups(parameters(dtype=dtype), rule)
    return replicate(rule.fused, made, count, transposed, **options)


@torch.no_grad()
def put(source: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for param, value in zip(into, source, strict=True):
        param.copy_(value)
