"""FusedMuon beside a float64 twin and beside torch's Muon and AdamW."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import hdet
from hdet.kernels import tables
from hdet.optim import (
    POLAR_EXPRESS,
    FusedMuon,
    hidden_matrices,
    hidden_matrix,
    lists,
    matrices,
    newton_schulz,
)

from .common import assert_close, assert_equal, assert_norms
from .test_replicas import copies

SHAPES = [(6, 4), (4, 6), (6, 4), (3, 5, 4), (2, 9), (6,), (7, 3), ()]
"""a stack of three, one twice as long as high, and the last three by AdamW"""
MATRICES = 5
USUAL = (3.4445, -4.7750, 2.0315)


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def make(params: Sequence[Tensor], muon: dict[str, Any] | None = None, **options: Any) -> FusedMuon:
    both = [
        {"params": params[:MATRICES], "use_muon": True, **(muon or {})},
        {"params": params[MATRICES:], "use_muon": False},
    ]
    return FusedMuon(both, **{"lr": 2e-2, "adamw_lr": 1e-2, **options})


def run(optimizer: Any, params: Sequence[Tensor], steps: range, scale: float = 1.0) -> None:
    for step in steps:
        for param, gradient in zip(params, gradients(step, scale), strict=True):
            param.grad = gradient.to(param.dtype)
        optimizer.step()


# -- the twin --------------------------------------------------------------------------------------


def twin_direction(
    u: Tensor, coefficients: Sequence[Any] = USUAL, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """(m, n) in float64, from the equation alone: singular values go through the polynomials,
    singular vectors stay. `coefficients`: of all steps, or of each."""
    left, values, right = torch.linalg.svd(u, full_matrices=False)
    s = values / max(float(values.square().sum().sqrt()), eps)
    for a, b, c in coefficients if isinstance(coefficients[0], tuple) else [coefficients] * steps:
        s = a * s + b * s**3 + c * s**5
    return left @ torch.diag(s) @ right


def twin(start: Tensor, steps: int, rho: float = 1.0, **said: Any) -> Tensor:
    """A matrix, or a stack, after some steps on `gradients`."""
    s = {
        "lr": 2e-2,
        "momentum": 0.95,
        "nesterov": True,
        "weight_decay": 0.1,
        "adjust_lr_fn": None,
        "ns_coefficients": USUAL,
        "ns_steps": 5,
    }
    s |= {"eps": 1e-7, "maximize": False, "decay_at": "replica", "cautious_decay": False, **said}
    place = next(i for i, shape in enumerate(SHAPES) if torch.Size(shape) == start.shape)
    p, m, (rows, columns) = (
        start.detach().double(),
        torch.zeros_like(start, dtype=torch.float64),
        start.shape[-2:],
    )
    for step in range(steps):
        g = gradients(step)[place].double() * (-1 if s["maximize"] else 1)
        m = s["momentum"] * m + (1 - s["momentum"]) * g
        u = s["momentum"] * m + (1 - s["momentum"]) * g if s["nesterov"] else m
        stack = u.reshape(-1, rows, columns)
        o = torch.stack(
            [twin_direction(x, s["ns_coefficients"], s["ns_steps"], s["eps"]) for x in stack]
        ).view(p.shape)
        rate = s["lr"] * rho
        factor = (
            0.2 * math.sqrt(max(rows, columns))
            if s["adjust_lr_fn"] == "match_rms_adamw"
            else math.sqrt(max(1, rows / columns))
        )
        decay = (s["lr"] if s["decay_at"] == "base" else rate) * s["weight_decay"]
        acts = (o * p >= 0) if s["cautious_decay"] else 1
        p = p * (1 - decay * acts) - rate * factor * o
    return p


SAID: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.8},
    {"momentum": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"adjust_lr_fn": "original", "ns_steps": 1},
    {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7},
    {"ns_coefficients": POLAR_EXPRESS},
    {"maximize": True, "eps": 3.0},
]


@pytest.mark.parametrize("said", SAID, ids=str)
def test_the_float64_twin(said: dict[str, Any]) -> None:
    params = parameters()
    starts = [param.detach().clone() for param in params]
    run(make(params, said), params, range(6))
    for param, start in zip(
        [*params[:2], *params[3:MATRICES]], [*starts[:2], *starts[3:MATRICES]], strict=True
    ):
        torch.testing.assert_close(
            param.detach().double(), twin(start, 6, **said), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    "said", [{"decay_at": "replica"}, {"decay_at": "base"}, {"cautious_decay": True}], ids=str
)
def test_a_multiplier_is_a_scaled_rate(said: dict[str, Any]) -> None:
    said |= {"weight_decay": 1.0}
    params = parameters()
    start = params[0].detach().clone()
    optimizer = make(params, **said)
    optimizer.multipliers = [[1.5, 1.0]]
    run(optimizer, params, range(4))
    torch.testing.assert_close(
        params[0].detach().double(), twin(start, 4, 1.5, **said), rtol=1e-5, atol=1e-5
    )
    assert optimizer.param_groups[0]["lr"] == 2e-2


@pytest.mark.parametrize("shape", [(3, 40, 40), (2, 20, 40), (1, 24, 96), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("steps", [1, 4, 5])
def test_newton_schulz_of_ill_conditioned_matrices(shape: tuple[int, int, int], steps: int) -> None:
    """Singular values over six orders of magnitude, where steps on the Gram matrix would lose the
    small ones: as exact as plain steps."""
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.logspace(0, -6, shape[2])
    x[0, :, : shape[2] // 2] *= 1e-3
    how = newton_schulz.Iteration((USUAL,) * steps, 1e-7, torch.float32)
    (made,) = newton_schulz.orthogonalise([x], how)
    expected = (
        torch.stack([twin_direction(one.double(), steps=steps) for one in x]) if x.numel() else x
    )
    torch.testing.assert_close(made, expected.float(), rtol=0, atol=1e-4)
    (standing,) = newton_schulz.orthogonalise([x.mT], how)
    torch.testing.assert_close(standing, made.mT, rtol=0, atol=1e-4)


def spectrum(kind: str, shape: tuple[int, int]) -> Tensor:
    x = torch.randn(shape)
    if kind == "steep":  # over six orders of magnitude
        return x * torch.logspace(0, -6, shape[1])
    if kind == "one large":
        return x + 10 * torch.randn(shape[0], 1) @ torch.randn(1, shape[1])
    return x * {"normal": 1.0, "large": 1e12, "small": 1e-12}[kind]


@pytest.mark.parametrize("kind", ["normal", "steep", "one large", "large", "small"])
@pytest.mark.parametrize("shape", [(64, 64), (96, 144), (48, 192), (192, 768)], ids=str)
@pytest.mark.parametrize("coefficients", [(USUAL,) * 5, POLAR_EXPRESS], ids=["usual", "polar"])
def test_float16_is_several_times_nearer_than_bfloat16(
    coefficients: Any, shape: tuple[int, int], kind: str
) -> None:
    """Beside singular values in float64. From twice as long as high, float16 takes two steps at
    a time on X X^T."""
    torch.manual_seed(0)
    x = spectrum(kind, shape)
    exact = twin_direction(x.double(), coefficients, eps=1e-30)
    off = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        how = newton_schulz.Iteration(coefficients, 1e-30, dtype)
        (made,) = newton_schulz.orthogonalise([x], how)
        assert made.dtype == dtype
        off[dtype] = float((made.double() - exact).norm() / exact.norm())
    in_pairs = shape[1] >= 2 * shape[0]
    assert off[torch.float16] < off[torch.bfloat16] / (2.5 if in_pairs else 6.0)
    assert off[torch.float32] < off[torch.float16] / 30
    if kind != "one large":  # where all else is small beside it
        assert off[torch.float16] < (5e-3 if in_pairs else 2.5e-3)


def test_float16_keeps_digits_of_small_numbers() -> None:
    """Elements of 7e-6, as at norm 1 those of a matrix of 10^10 elements would be."""
    torch.manual_seed(0)
    x = torch.randn(96, 144)
    eps = 1200 * float(x.norm())
    how = newton_schulz.Iteration((USUAL,) * 5, eps, torch.float16)
    (made,) = newton_schulz.orthogonalise([x], how)
    exact = twin_direction(x.double(), eps=eps)
    assert (made.double() - exact).norm() / exact.norm() < 2e-3


@pytest.mark.parametrize("shape", [(64, 64), (96, 144), (48, 192)], ids=str)
def test_polar_express_is_nearer_to_orthogonal_than_the_quintic(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    left, _, right = torch.linalg.svd(x.double(), full_matrices=False)
    off = []
    for coefficients in ((USUAL,) * 5, POLAR_EXPRESS):
        how = newton_schulz.Iteration(coefficients, 1e-7, torch.float32)
        (made,) = newton_schulz.orthogonalise([x], how)
        off.append(float((made.double() - left @ right).norm() / shape[0] ** 0.5))
    assert off[1] < 0.7 * off[0] < 0.2


def test_a_matrix_that_is_not_finite_or_zero_leaves_the_others_of_its_batch_alone() -> None:
    torch.manual_seed(0)
    x = [torch.randn(3, 5), torch.full((5, 3), math.nan), torch.zeros(3, 5)]
    how = newton_schulz.Iteration((USUAL,) * 5, 1e-7, torch.float32)
    first, bad, nothing = newton_schulz.orthogonalise(x, how)
    assert_close([first], [twin_direction(x[0].double()).float()], 1e-5)
    assert bad.isnan().all() and not nothing.any()


# -- torch's ---------------------------------------------------------------------------------------


def torchs(params: Sequence[Tensor], **said: Any) -> list[Any]:
    two_d = [param for param in params[:MATRICES] if param.ndim == 2]
    return [torch.optim.Muon(two_d, lr=2e-2, **said), torch.optim.AdamW(params[MATRICES:], lr=1e-2)]


def run_torchs(
    pair: Sequence[Any], params: Sequence[Tensor], steps: range, wide: bool = True
) -> None:
    """`wide`: torch computes Newton-Schulz in bfloat16 whatever the parameter is; here in the
    parameter's float32."""
    for step in steps:
        for param, gradient in zip(params, gradients(step), strict=True):
            param.grad = gradient
        with mock.patch.object(Tensor, "bfloat16", Tensor.clone) if wide else mock.MagicMock():
            for optimizer in pair:
                optimizer.step()


TORCHS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.5},
]


@pytest.mark.parametrize("said", TORCHS, ids=str)
def test_torchs_muon_and_adamw(said: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    run(make(ours, said), ours, range(20))
    run_torchs(torchs(theirs, **said), theirs, range(20))
    three_d = ours.pop(3), theirs.pop(3)
    assert_close(ours, theirs, 2e-5)
    assert three_d[0].shape == three_d[1].shape and not torch.equal(
        *three_d
    )  # torch leaves it alone


def test_in_bfloat16_as_near_to_the_twin_as_torchs() -> None:
    ours, theirs = parameters(), parameters()
    start = ours[0].detach().clone()
    run(make(ours, ns_dtype=torch.bfloat16), ours, range(10))
    run_torchs(torchs(theirs), theirs, range(10), wide=False)
    expected = twin(start, 10)
    off, torchs_off = (
        (params[0].detach().double() - expected).norm().item() for params in (ours, theirs)
    )
    assert 1e-4 < off < 1.5 * torchs_off < 0.1


def test_states_of_torchs_two_optimizers_load_and_go_back() -> None:
    """A run that torch began, hdet goes on with, and torch ends."""
    params, others = parameters(), parameters()
    for each in (params, others):
        each.pop(3)
    steps = [
        [gradient for i, gradient in enumerate(gradients(step)) if i != 3] for step in range(6)
    ]  # fmt: skip

    def train(optimizers: Sequence[Any], tensors: Sequence[Tensor], which: range) -> None:
        for step in which:
            for param, gradient in zip(tensors, steps[step], strict=True):
                param.grad = gradient
            with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
                for optimizer in optimizers:
                    optimizer.step()

    count = MATRICES - 1

    def pair(tensors: Sequence[Tensor]) -> list[Any]:
        return [
            torch.optim.Muon(tensors[:count], lr=2e-2),
            torch.optim.AdamW(tensors[count:], lr=1e-2),
        ]

    straight = pair(others)
    train(straight, others, range(6))
    began = pair(params)
    train(began, params, range(2))
    ours = FusedMuon(
        [
            {"params": params[:count], "use_muon": True},
            {"params": params[count:], "use_muon": False},
        ]
    )
    muon, adamw = (copy.deepcopy(optimizer.state_dict()) for optimizer in began)
    muon["state"] |= {count + i: values for i, values in adamw["state"].items()}
    adamw["param_groups"][0]["params"] = [count + i for i in adamw["param_groups"][0]["params"]]
    ours.load_state_dict(
        {"state": muon["state"], "param_groups": muon["param_groups"] + adamw["param_groups"]}
    )
    assert [group["name"] for group in ours.param_groups] == [
        "muon",
        "adamw",
    ] and ours.param_groups[0]["lr"] == 2e-2
    train([ours], params, range(2, 4))
    saved, back = ours.state_dict(), pair(params)
    for optimizer, group, first in zip(back, saved["param_groups"], (0, count), strict=True):
        state = {i - first: values for i, values in saved["state"].items() if i in group["params"]}
        optimizer.load_state_dict(
            {"state": state, "param_groups": [{**group, "params": list(state)}]}
        )
    train(back, params, range(4, 6))
    assert_close(params, others, 1e-5)


# -- replicas --------------------------------------------------------------------------------------


STORED = [
    (torch.float32, None),
    (torch.bfloat16, "fp32"),
    (torch.bfloat16, "split"),
    (torch.float16, "split"),
]


@pytest.mark.parametrize(("dtype", "master_weights"), STORED)
def test_replicas_step_as_separate_runs_would_and_share_newton_schulz(
    dtype: torch.dtype, master_weights: str | None
) -> None:
    rhos = [[0.5, 1.0], [1.0, 0.7], [1.75, 2.0]]
    params = parameters(dtype)
    optimizer = make(params, master_weights=master_weights)
    optimizer.set_replicas(3, copies(3))
    optimizer.multipliers = copy.deepcopy(rhos)
    with mock.patch.object(matrices, "of_stacks", wraps=matrices.of_stacks) as made:
        run(optimizer, params, range(4))
    assert made.call_count == 4 * 3, "one batch for all of 4 and 6, whatever lies or stands"
    for k, rho in enumerate(rhos):
        alone = parameters(dtype)
        other = make(alone, master_weights=master_weights)
        other.multipliers = [rho]
        run(other, alone, range(4))
        assert_equal(optimizer.replica_parameters(k), alone)
        for one, two in zip(optimizer.masters(params, k), other.masters(alone), strict=True):
            assert (one is None) == (two is None) and (one is None or torch.equal(one, two))
    optimizer.average_replicas([1.0, 0.0, 1.0])
    assert_equal(optimizer.replica_parameters(0), optimizer.replica_parameters(1))


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_written_to_a_matrix_is_taken_over_into_its_master(asked: bool) -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    pair = [make(params, master_weights="fp32") for params in (ours, theirs)]
    run(pair[0], ours, range(2))
    run(pair[1], theirs, range(2))
    with torch.no_grad():
        ours[0].mul_(2)
        theirs[0].mul_(2)
        pair[1].state[theirs[0]]["master_param"].copy_(theirs[0])
    if asked:
        assert torch.equal(pair[0].masters(ours)[0], pair[1].masters(theirs)[0])
    run(pair[0], ours, range(2, 3))
    run(pair[1], theirs, range(2, 3))
    assert_equal(ours, theirs)


def test_small_states_and_stochastic_rounding() -> None:
    """bfloat16 throughout: the mean of many seeds is where float32 masters are."""
    exact = parameters(torch.bfloat16)
    run(make(exact, master_weights="fp32", moment_dtype=torch.bfloat16), exact, range(2))
    sums = torch.zeros(6, 4, dtype=torch.float64)
    for seed in range(64):
        params = parameters(torch.bfloat16)
        optimizer = make(
            params, {"lr": 1e-3}, stochastic_rounding=True, moment_dtype=torch.bfloat16, seed=seed
        )
        run(optimizer, params, range(1))
        assert optimizer.state[params[0]]["momentum_buffer"].dtype == torch.bfloat16
        sums += params[0].detach().double()
    wide = parameters(torch.bfloat16)
    other = make(wide, {"lr": 1e-3}, master_weights="fp32")
    run(other, wide, range(1))
    moved = (
        other.state[wide[0]]["master_param"].double()
        - parameters(torch.bfloat16)[0].detach().double()
    )
    found = sums / 64 - parameters(torch.bfloat16)[0].detach().double()
    assert (found * moved).sum() / (moved * moved).sum() == pytest.approx(1.0, abs=0.5)


def test_two_rates_are_explored_over_coresident_replicas() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    optimizer = FusedMuon(model.named_parameters(), lr=0.02, adamw_lr=0.003)
    replicas = hdet.CoresidentReplicas(model, 4)
    batches = [torch.randn(8, 6) for _ in range(8)]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - x.flip(1)).square().mean()

    probe = hdet.ProbeController(loss_fn, batches, model=model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    knobs = [hdet.LearningRate(0.3, groups=["muon", "adamw"])]
    ensemble = hdet.Ensemble(
        optimizer, scheduler, knobs=knobs, replicas=replicas, sync=hdet.Sync(3), controller=probe
    )
    losses, multipliers = [], []
    for _ in range(12):
        for k in range(4):
            with replicas.use(k):
                loss = loss_fn(model, batches[k])
                ensemble.observe(loss)
                (loss / 4).backward()
        optimizer.step()
        multipliers.append(copy.deepcopy(optimizer.multipliers))
        optimizer.zero_grad()
        ensemble.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    of_muon, of_adamw = zip(*multipliers[0], strict=True)
    assert (
        sorted(of_muon) == sorted(of_adamw) == pytest.approx([0.7, 0.7, 1.3, 1.3])
        and of_muon != of_adamw
    )
    assert [
        group["lr"] != rate
        for group, rate in zip(optimizer.param_groups, (0.02, 0.003), strict=True)
    ] == [True, True]


def test_knobs_take_the_groups_that_have_the_key() -> None:
    optimizer = make(parameters())
    assert [bound.name for bound in hdet.LearningRate(groups="each").bind(optimizer)] == [
        "lr/muon",
        "lr/adamw",
    ]
    assert [bound.name for bound in hdet.Betas(groups="each").bind(optimizer)] == [
        "beta1/adamw",
        "beta2/adamw",
    ]
    assert [bound.name for bound in hdet.GroupValue("momentum").bind(optimizer)] == ["momentum"]
    with pytest.raises(ValueError, match="groups names 'muon', which has no beta1"):
        hdet.Betas(groups=["muon"]).bind(optimizer)
    with pytest.raises(ValueError, match="have no 'dampening'"):
        hdet.GroupValue("dampening").bind(optimizer)


# -- what else a step does -------------------------------------------------------------------------


def test_the_norm_is_that_of_both_kinds() -> None:
    ours, theirs = parameters(), parameters()
    a, b = make(ours, max_grad_norm=1.5), make(theirs)
    for step in range(3):
        for params in (ours, theirs):
            for param, gradient in zip(params, gradients(step), strict=True):
                param.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.5)
        a.step()
        b.step()
        torch.testing.assert_close(a.grad_norm, norm)
        assert_norms(a.gradient_norms(), dict(enumerate(gradients(step))))
    assert_close(ours, theirs, 1e-5)


@pytest.mark.parametrize("where", [0, MATRICES], ids=["in a matrix", "in a bias"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": math.inf}, {"master_weights": "split", "stochastic_rounding": True}],
    ids=str,
)
def test_a_gradient_that_is_not_finite_skips_the_step(where: int, options: dict[str, Any]) -> None:
    params = parameters(torch.bfloat16)
    optimizer = make(params, zero_gradients=True, **options)
    run(optimizer, params, range(2))
    before = copy.deepcopy([params, [optimizer.state[param] for param in params]])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for param, gradient in zip(params, gradients(2), strict=True):
        param.grad = gradient.bfloat16()
    params[where].grad.fill_(math.inf)  # type: ignore[union-attr]
    scaler.step(optimizer)
    assert optimizer.step_skipped is not None and optimizer.step_skipped.item() == 1
    assert_equal(params, before[0])
    for param, state in zip(params, before[1], strict=True):
        assert all(torch.equal(optimizer.state[param][key], value) for key, value in state.items())
    assert not any(param.grad.any() for param in params)  # type: ignore[union-attr]
    run(optimizer, params, range(3, 4))
    assert optimizer.step_skipped.item() == 0 and optimizer.state[params[0]]["step"].item() == 3


def test_what_is_told_is_of_the_last_step() -> None:
    params = parameters()
    optimizer = make(params, max_grad_norm=math.inf)
    told = []
    for gradient, chosen in [
        (1.0, params),
        (math.nan, params[MATRICES:]),
        (1.0, params),
        (math.nan, params[:MATRICES]),
        (1.0, []),
    ]:
        for param in params:
            param.grad = (
                torch.full_like(param, gradient) if any(param is p for p in chosen) else None
            )
        optimizer.step()
        told.append(
            [
                None if value is None else math.isfinite(value) and float(value)
                for value in (optimizer.grad_norm, optimizer.step_skipped)
            ]
        )
    count = float(sum(param.numel() for param in params)) ** 0.5
    assert told == [
        [pytest.approx(count), 0.0],
        [False, 1.0],
        [pytest.approx(count), 0.0],
        [False, 1.0],
        [None, None],
    ]


def test_a_scaler_divides_the_gradients_of_matrices() -> None:
    """Momentum remembers the scale of a gradient, its direction does not."""
    ours, theirs = parameters(), parameters()
    a, b = make(ours), make(theirs)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    run(a, ours, range(1))
    run(b, theirs, range(1))
    for param, gradient in zip(ours, gradients(1, 64.0), strict=True):
        param.grad = gradient
    scaler.step(a)
    run(b, theirs, range(1, 2))
    assert_close(ours, theirs)
    assert_close([a.state[ours[0]]["momentum_buffer"]], [b.state[theirs[0]]["momentum_buffer"]])


def test_gradients_that_are_none() -> None:
    ours, theirs = parameters(), parameters()
    a, b = make(ours), torchs(theirs)
    for step in range(9):
        for params in (ours, theirs):
            for i, (param, gradient) in enumerate(zip(params, gradients(step), strict=True)):
                param.grad = (
                    None
                    if (step + i) % 3 == 0 or i == 3 or (step == 4 and i < MATRICES) or step == 5
                    else gradient
                )
        a.step()
        with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
            for optimizer in b:
                optimizer.step()
    assert_close(ours, theirs, 1e-5)
    assert a.state[ours[3]] == {}


@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_goes_on_alone(how: Callable[[FusedMuon], FusedMuon]) -> None:
    params = parameters()
    optimizer = make(params, {"ns_steps": 3}, ns_dtype=torch.float32)
    optimizer.multipliers = [[0.5, 2.0]]
    run(optimizer, params, range(2))
    other = how(optimizer)
    copied = [param for group in other.param_groups for param in group["params"]]
    before = [param.detach().clone() for param in params]
    run(other, copied, range(2, 4))
    assert_equal(params, before)
    run(optimizer, params, range(2, 4))
    assert_equal(params, copied)


def test_a_state_goes_on_to_the_bit() -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    a, b = make(ours, master_weights="split"), make(theirs, master_weights="split")
    run(a, ours, range(2))
    with torch.no_grad():
        for one, other in zip(theirs, ours, strict=True):
            one.copy_(other)
    b.load_state_dict(pickle.loads(pickle.dumps(a.state_dict())))
    run(a, ours, range(2, 4))
    run(b, theirs, range(2, 4))
    assert_equal(ours, theirs)


# -- what a GPU would do ---------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts what torch is called for, but for views and memory."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "empty" in str(func))
        return func(*args, **(kwargs or {}))


class OfTheHost(TorchDispatchMode):
    """Refuses to read a number of a tensor, for which a GPU would be waited, and to make a tensor
    of Python's numbers, which a captured graph would not see change."""

    NAMES = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "lift_fresh", "scalar_tensor")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name().split("::")[1].split(".")[0] not in self.NAMES, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ns_dtype": torch.float16},
        {"max_grad_norm": 1.0, "zero_gradients": True},
        {"master_weights": "split", "moment_dtype": "8bit", "cautious_decay": True},
        {"stochastic_rounding": True, "ns_dtype": torch.bfloat16},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_is_what_a_graph_captures(options: dict[str, Any], count: int) -> None:
    """All that kernels read lies where it lay, and none of it is written by the host: neither
    gradients' addresses nor rates, which write_hyperparameters() brings before."""
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    both = parameters(dtype), parameters(dtype)
    captured, plain = (make(params, **options) for params in both)
    for params, optimizer in zip(both, (captured, plain), strict=True):
        optimizer.set_replicas(count, copies(count))
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        run(optimizer, params, range(2))
        optimizer.param_groups[0].update(lr=0.5, momentum=0.5, weight_decay=0.3)
        optimizer.param_groups[1]["lr"] = 0.1
        if "max_grad_norm" in options:
            run(optimizer, params, range(2, 3))  # brings them, as they cannot be written then
        for param, gradient in zip(params, gradients(1), strict=True):
            param.grad.copy_(gradient)  # type: ignore[union-attr]
    if "max_grad_norm" not in options:
        captured.write_hyperparameters()
    refused = mock.MagicMock(side_effect=AssertionError("written by the host"))
    with (
        mock.patch.object(tables.Inputs, "gradients", refused),
        mock.patch.object(tables, "check_settings", refused),  # of those that are written
        OfTheHost(),
    ):
        captured.step()
    plain.step()
    for k in range(count):
        assert_equal(captured.replica_parameters(k), plain.replica_parameters(k))


@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.float16])
def test_more_matrices_of_a_shape_are_no_more_calls(ns_dtype: torch.dtype) -> None:
    """Calls for many tensors are a launch or a few on a GPU."""
    counted = []
    for count in (2, 7):
        params = [
            Parameter(torch.randn(shape))
            for shape in [*[(6, 4)] * count, *[(4, 6)] * count, (3, 5, 4)]
        ]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = FusedMuon([{"params": params, "use_muon": True}], ns_dtype=ns_dtype)
        optimizer.step()
        with Calls() as calls:
            optimizer.step()
        counted.append(calls.count)
    assert counted[0] == counted[1] < 70


# -- which parameters ------------------------------------------------------------------------------


RULE = {
    "blocks.0.attn.qkv.weight": ((6, 4), True),
    "layers.1.experts.w1": ((3, 5, 4), True),
    "conv.weight": ((3, 5, 4), False),
    "stem.weight": ((3, 5, 4, 4), False),
    "blocks.0.attention.output.dense.weight": ((6, 4), True),
    "model.output.weight": ((6, 4), False),
    "transformer.wte.weight": ((6, 4), False),
    "model.embed_tokens.weight": ((6, 4), False),
    "lm_head.weight": ((6, 4), False),
    "blocks.0.norm.weight": ((4,), False),
    "members.0.weight": ((4, 4), True),
}


class Named(torch.nn.Module):
    """A language model whose names say nothing.

    ``tied``: its output layer has the embedding's weight.
    """

    def __init__(self, tied: bool, words: int = 11, width: int = 4) -> None:
        super().__init__()
        self.tok, self.pos = torch.nn.Embedding(words, width), Parameter(torch.zeros(7, width))
        self.attention = torch.nn.MultiheadAttention(width, 2)
        self.mix = torch.nn.ModuleList(
            [torch.nn.Linear(width, 3 * width), torch.nn.Linear(3 * width, width)]
        )
        self.to_logits = torch.nn.Linear(width, words, bias=False)
        self.aside = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.Linear(width, 2)
        )  # the last layer of a second task
        if tied:
            self.to_logits.weight = self.tok.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_rule_that_knows_the_modules(tied: bool) -> None:
    model = Named(tied)
    rule = hidden_matrices(model)
    attention = ["attention.in_proj_weight", "attention.out_proj.weight"]
    assert [name for name, param in model.named_parameters() if rule(name, param)] == [
        *attention, "mix.0.weight", "mix.1.weight", "aside.0.weight"
    ]  # fmt: skip
    optimizer = FusedMuon(model.named_parameters(), use_muon=rule)
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        5,
        len(list(model.parameters())) - 5,
    ]


def test_that_rule_is_there_before_anything_else_is_asked_for() -> None:
    """As the documents write it: in a fresh interpreter nothing has imported the package's room
    yet."""
    code = (
        "import torch, hdet; print(hdet.hidden_matrices(torch.nn.Linear(2, 2))('0.weight', "
        "torch.ones(2, 2)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "True\n"
    )


def test_the_default_rule() -> None:
    named = [(name, Parameter(torch.zeros(shape))) for name, (shape, _) in RULE.items()]
    assert {name: hidden_matrix(name, param) for name, param in named} == {
        name: use for name, (_, use) in RULE.items()
    }
    optimizer = FusedMuon(named)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        [n for n, (_, u) in RULE.items() if u is x] for x in (True, False)
    ]
    several = FusedMuon(
        [{"params": named[:1], "name": "a", "lr": 0.5}, {"params": named[1:3], "name": "b"}]
    )
    assert [(group["name"], group["lr"]) for group in several.param_groups] == [
        ("a", 0.5),
        ("b/muon", 1e-3),
        ("b/adamw", 1e-3),
    ]


# those of torch's own tests
TORCHS: list[dict[str, Any]] = [
    {},
    {"lr": 0.01},
    {"lr": torch.tensor(0.001)},
    {"weight_decay": 0.2},
    {"momentum": 0.8},
    {"ns_steps": 6},
    {"ns_coefficients": (3.4, -4.7, 2.0)},
]


@pytest.mark.parametrize("settings", TORCHS, ids=str)
def test_matrices_without_names_are_what_torchs_takes(settings: dict[str, Any]) -> None:
    """Calls that name no torch or hdet: the same ones for both, also of another group later."""

    def trained(muon: Any, **own: Any) -> list[Parameter]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(5, 3), (3, 7), (10, 10)]
        params = [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = muon(params[:2], **settings, **own)
        optimizer.add_param_group({"params": params[2:], "lr": 0.05})
        for _ in range(4):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
        return params

    ours = trained(FusedMuon, ns_dtype=torch.bfloat16)
    for one, other in zip(ours, trained(torch.optim.Muon), strict=True):
        # updates are sums of directions, about 1 / sqrt(10) times the rate, computed in bfloat16
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0.05 * 4 * 2**-8)


def test_a_group_that_is_split_gives_its_settings_to_those_that_have_them() -> None:
    """As factories make groups (timm's, by decay and by layer)."""
    named = [("a", Parameter(torch.zeros(3, 2))), ("b", Parameter(torch.zeros(3)))]
    group = {"params": named, "lr": 0.5, "weight_decay": 0.0, "betas": (0.5, 0.6), "momentum": 0.7}
    muon, adamw = FusedMuon([{**group, "lr_scale": 0.25}], use_muon=hidden_matrix).param_groups
    for one in (muon, adamw):
        assert (one["lr"], one["weight_decay"], one["lr_scale"]) == (0.5, 0.0, 0.25)
    assert muon["momentum"] == 0.7 and "betas" not in muon
    assert adamw["betas"] == (0.5, 0.6) and "momentum" not in adamw


def test_parameters_given_by_a_generator() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = FusedMuon([{"params": model.parameters(), "use_muon": True}])
    optimizer.add_param_group({"params": iter([Parameter(torch.zeros(2, 3))]), "use_muon": True})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def refused(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_what_is_refused_when_it_is_made() -> None:
    matrix, vector = Parameter(torch.zeros(3, 2)), Parameter(torch.zeros(3))
    named = [("a", matrix), ("b", vector)]
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (
            ValueError,
            r"use_muon is not given, and parameter 0 of group 0 of shape \(3, 2\) has no name",
            lambda: FusedMuon([matrix, vector]),
        ),
        (
            ValueError,
            "lr of group 0 would be that of Muon and of AdamW alike",
            lambda: FusedMuon([{"params": named, "lr": 0.1}]),
        ),
        (
            ValueError,
            "eps of group 0 would be that of Muon and of AdamW alike",
            lambda: FusedMuon([{"params": named, "eps": 0.1}], use_muon=hidden_matrix),
        ),
        (
            ValueError,
            r"has the shape \(3,\), and use_muon=True is for",
            lambda: FusedMuon(named, use_muon=lambda *_: True),
        ),
        (
            ValueError,
            r"momentum=1.0 of .* must be in \[0, 1\)",
            lambda: FusedMuon(named, momentum=1.0),
        ),
        (ValueError, "ns_steps=100 of", lambda: FusedMuon(named, ns_steps=100)),
        (
            ValueError,
            "ns_coefficients=.* three finite",
            lambda: FusedMuon(named, ns_coefficients=(1.0, math.nan, 0.0)),
        ),
        (
            ValueError,
            "ns_coefficients=.* three finite numbers, or 4 times three",
            lambda: FusedMuon(named, ns_coefficients=POLAR_EXPRESS, ns_steps=4),
        ),
        (
            ValueError,
            "adjust_lr_fn='rms' of .* choose \"original\"",
            lambda: FusedMuon(named, adjust_lr_fn="rms"),
        ),
        (ValueError, "ns_dtype=torch.float64", lambda: FusedMuon(named, ns_dtype=torch.float64)),
        (ValueError, "lr=-1.0 of the defaults", lambda: FusedMuon(named, lr=-1.0)),
        (ValueError, "beta1=", lambda: FusedMuon(named, adamw_betas=(1.0, 0.5))),
        (
            ValueError,
            "amsgrad",
            lambda: FusedMuon([{"params": [vector], "use_muon": False, "amsgrad": True}]),
        ),
        (
            TypeError,
            "float64",
            lambda: FusedMuon([("a", Parameter(torch.zeros(2, 2, dtype=torch.float64)))]),
        ),
        (TypeError, "unexpected keyword", lambda: FusedMuon(named, betas=(0.9, 0.99))),
        (
            ValueError,
            "use_muon of parameter group 2 is None",
            lambda: FusedMuon(named).add_param_group({"params": [Parameter(torch.zeros(2))]}),
        ),
        (RuntimeError, "needs a step before", lambda: FusedMuon(named).write_hyperparameters()),
        (ValueError, "empty parameter list", lambda: FusedMuon(iter([]))),
    ]
    for kind, message, call in cases:
        refused(kind, message, call)


@pytest.mark.parametrize("steps", [0, 1], ids=["in a first step", "in a later one"])
def test_what_a_step_refuses_before_anything_is_changed(steps: int) -> None:
    def spoil(key: str, value: Any) -> Callable[[FusedMuon, list[Parameter]], None]:
        return lambda optimizer, params: optimizer.param_groups[0].__setitem__(key, value)

    def sparse(optimizer: FusedMuon, params: list[Parameter]) -> None:
        params[0].grad = torch.ones(6, 4).to_sparse()

    def wide(optimizer: FusedMuon, params: list[Parameter]) -> None:
        params[0].data = params[0].data.mT

    def many(optimizer: FusedMuon, params: list[Parameter]) -> None:
        optimizer.multipliers = [[1.0, 1.0], [1.0, 1.0]]

    def below(optimizer: FusedMuon, params: list[Parameter]) -> None:
        optimizer.multipliers = [[-1.0, 1.0]]

    def sparse_vector(optimizer: FusedMuon, params: list[Parameter]) -> None:
        optimizer.max_grad_norm = 1.0
        params[5].grad = torch.ones(6).to_sparse()

    def with_gaps(optimizer: FusedMuon, params: list[Parameter]) -> None:
        params[0].data = torch.zeros(6, 8)[:, ::2]

    def stacked_in_between(optimizer: FusedMuon, params: list[Parameter]) -> None:
        params[3].data = params[3].data.transpose(0, 1).contiguous().transpose(0, 1)
        params[3].grad = torch.empty_like(params[3]).fill_(1.0)

    def double(optimizer: FusedMuon, params: list[Parameter]) -> None:
        params[0].grad = None
        params[0].data = params[0].data.double()
        params[0].grad = torch.ones(6, 4).double()
        params[0].grad.data = torch.ones(6, 4)

    def overlapping(optimizer: FusedMuon, params: list[Parameter]) -> None:
        params[2].data = params[0].data

    def overlapping_the_rest(optimizer: FusedMuon, params: list[Parameter]) -> None:
        params[6].data = params[0].data.view(-1)[:21].view(7, 3)

    cases: list[tuple[str, Callable[[FusedMuon, list[Parameter]], None]]] = [
        ("lr=nan of parameter group 0", spoil("lr", math.nan)),
        ("momentum=2.0 of parameter group 0", spoil("momentum", 2.0)),
        ("ns_steps=0 of parameter group 0", spoil("ns_steps", 0)),
        ("layout", sparse),
        ("multipliers has 2 lists for 1", many),
        ("multipliers of parameter group 0", below),
        ("shape", wide),
        ("the gradient of parameter 5 has the layout", sparse_vector),
        ("parameter 0 of shape .* is not contiguous", with_gaps),
        ("parameter 3 of shape .* is not contiguous", stacked_in_between),
        ("dtype torch.float64", double),
        ("overlap in memory", overlapping),
        ("parameter 6 and parameter 0 overlap in memory", overlapping_the_rest),
    ]
    for message, change in cases:
        params = parameters()
        optimizer = make(params)
        run(optimizer, params, range(steps))
        for param, gradient in zip(params, gradients(0), strict=True):
            param.grad = gradient
        change(optimizer, params)
        before = copy.deepcopy([params, [optimizer.state.get(param, {}) for param in params]])
        refused((ValueError, TypeError), message, optimizer.step)  # type: ignore[arg-type]
        assert_equal(params, before[0])
        for param, state in zip(params, before[1], strict=True):
            assert optimizer.state.get(param, {}).keys() == state.keys()
            assert all(
                torch.equal(optimizer.state[param][key], value)
                for key, value in state.items()
                if key != "replica_params"
            )
            assert steps or state.keys() <= {"replica_params"}


def test_states_of_a_first_step_outlive_a_failure_in_newton_schulz() -> None:
    """AdamW has been stepped by then: what it stepped has its moments, and the matrices are as
    before a first step."""
    (ours, theirs), before = (parameters(), parameters()), parameters()
    a, b = make(ours), make(theirs)
    with (
        mock.patch.object(matrices, "of_stacks", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        run(a, ours, range(1))
    run(b, theirs, range(1))
    assert_equal(ours, [*before[:MATRICES], *theirs[MATRICES:]])
    for one, other in zip(ours[MATRICES:], theirs[MATRICES:], strict=True):
        assert_equal(list(a.state[one].values()), list(b.state[other].values()))
    assert all(not a.state[matrix]["step"] for matrix in ours[:MATRICES])
    run(a, ours, range(1, 2))
    assert [float(a.state[param]["step"]) for param in ours] == [1.0] * MATRICES + [2.0] * (
        len(ours) - MATRICES
    )


def test_a_matrix_is_planned_for_once_at_its_first_gradient() -> None:
    params = parameters()
    optimizer = make(params)
    for step in range(6):
        for param, gradient in zip(params, gradients(step), strict=True):
            param.grad = gradient
        if step in (0, 1, 4):
            params[0].grad = None
        with mock.patch.object(optimizer, "_plan", wraps=optimizer._plan) as planned:
            optimizer.step()
        assert planned.called == (step in (0, 2))
    assert optimizer.state[params[0]]["step"] == 3


@pytest.mark.parametrize("moved", [False, True])
def test_a_momentum_of_another_shape_is_refused_before_anything_is_changed(moved: bool) -> None:
    """Also one that lies where it lay."""
    params = parameters()
    optimizer = make(params)
    run(optimizer, params, range(1))
    state = optimizer.state[params[0]]
    if moved:
        state["momentum_buffer"] = torch.zeros(4, 6)
    else:
        state["momentum_buffer"].data = state["momentum_buffer"].data.mT
    before = copy.deepcopy(params)
    refused(
        ValueError,
        r"momentum_buffer of parameter 0 (has the shape \(4, 6\)|.* is not contiguous)",
        lambda: run(optimizer, params, range(1, 2)),
    )
    assert_equal(params, before)


def test_a_gradient_of_matrices_alone_is_refused_before_anything_is_changed() -> None:
    params = parameters()[:MATRICES]
    optimizer = FusedMuon([{"params": params, "use_muon": True}])
    for step in range(2):
        for param, gradient in zip(params, gradients(step), strict=False):
            param.grad = gradient
        good, params[1].grad = params[1].grad, params[1].grad.to_sparse()
        before = copy.deepcopy([params, [optimizer.state.get(param) for param in params]])
        refused(TypeError, "the gradient of parameter 1 has the layout", optimizer.step)
        assert_equal(params, before[0])
        assert step == 0 or all(
            float(optimizer.state[p]["step"]) == float(s["step"])
            for p, s in zip(params, before[1], strict=True)
        )
        params[1].grad = good
        optimizer.step()


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_gradients_that_lie_in_another_order_are_copied_and_zeroed(
    max_grad_norm: float | None,
) -> None:
    found = []
    for is_transposed in (False, True):
        params = parameters()
        optimizer = make(params, max_grad_norm=max_grad_norm, zero_gradients=True)
        for step in range(2):
            for param, gradient in zip(params, gradients(step), strict=True):
                param.grad = gradient
            if is_transposed:
                params[0].grad = params[0].grad.mT.contiguous().mT  # type: ignore[union-attr]
            optimizer.step()
            assert not any(param.grad.any() for param in params)  # type: ignore[union-attr]
        found.append(params)
    assert_equal(*found)


@pytest.mark.parametrize("adamw_too", [False, True])
def test_states_of_a_first_step_that_fails_half_way_are_kept(
    adamw_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of one shape have moved; the batch of the next one finds no memory."""
    params = parameters()
    optimizer = FusedMuon(
        [
            {"params": params[:MATRICES], "use_muon": True},
            {"params": params[MATRICES:], "use_muon": False},
        ]
    )
    for place, (param, gradient) in enumerate(zip(params, gradients(0), strict=True)):
        param.grad = gradient if adamw_too or place < MATRICES else None
    real, calls = matrices.of_stacks, iter(range(10))

    def fails(*given: Any, **named: Any) -> Any:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return real(*given, **named)

    monkeypatch.setattr(matrices, "of_stacks", fails)
    before = [param.detach().clone() for param in params]
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    moved = [place for place, old in enumerate(before) if not torch.equal(params[place], old)]
    assert 0 < sum(place < MATRICES for place in moved) < MATRICES and adamw_too == (
        moved[-1] >= MATRICES
    )
    assert all("step" in optimizer.state[params[place]] for place in moved)
    assert all(
        bool(optimizer.state[params[place]]["momentum_buffer"].any())
        for place in moved
        if place < MATRICES
    )


@pytest.mark.parametrize("place", [0, MATRICES])
@pytest.mark.parametrize(
    "change",
    [torch._neg_view, lambda gradient: torch.stack([-gradient] * 2, -1)[..., 0]],
    ids=["negated", "gaps"],
)
def test_a_gradient_that_lies_otherwise_is_taken_in_every_step(place: int, change: Any) -> None:
    made = []
    for lies in (change, torch.neg):
        params = parameters()
        optimizer = FusedMuon(
            [
                {"params": params[:MATRICES], "use_muon": True},
                {"params": params[MATRICES:], "use_muon": False},
            ]
        )
        for step in range(3):
            for i, (param, gradient) in enumerate(zip(params, gradients(step), strict=True)):
                param.grad = lies(gradient) if i == place and step != 1 else gradient
            optimizer.step()
        made.append(params)
    assert_equal(*made)


# -- what is kept from step to step ----------------------------------------------------------------


LAID = 1
"""a matrix that is transposed in memory, of which a plan has views"""

Change = Callable[[FusedMuon, list[Parameter]], Any]


def go(optimizer: FusedMuon, step: int, without: Sequence[int] = ()) -> list[Tensor]:
    """A step; returns the parameters."""
    params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
    for i, (param, gradient) in enumerate(zip(params, gradients(step), strict=False)):
        param.grad = None if i in without else torch.empty_like(param).copy_(gradient)
    optimizer.step()
    return params


def moved(tensor: Tensor) -> None:
    """Its values, doubled, at another address."""
    tensor.data = torch.empty_like(tensor.data).copy_(2 * tensor.data)


def said(**settings: Any) -> Change:
    return lambda optimizer, params: optimizer.param_groups[0].update(settings)


def written(name: str, value: Any) -> Change:
    return lambda optimizer, params: setattr(optimizer, name, value)


def of_state(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda optimizer, params: change(optimizer.state[params[LAID]])


def of_another_type(optimizer: FusedMuon, params: list[Parameter]) -> None:
    """Through others, so that it may lie where it lay."""
    params[LAID].grad = None
    params[LAID].data = params[LAID].data.half()
    params[LAID].data = params[LAID].data.bfloat16()


def loaded(optimizer: FusedMuon, params: list[Parameter]) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][LAID]["momentum_buffer"].mul_(-1.0)
    optimizer.load_state_dict(saved)


def grouped_anew(optimizer: FusedMuon, params: list[Parameter]) -> None:
    """A matrix goes to a group with other settings."""
    first, second = (
        optimizer.param_groups[0],
        {**optimizer.param_groups[0], "lr": 0.5, "nesterov": False, "name": "another"},
    )
    first["params"], second["params"] = first["params"][:1], first["params"][1:]
    optimizer.param_groups.insert(1, second)
    optimizer.multipliers = [[1.0, 1.0, 1.0]]


CHANGES: dict[str, Change] = {
    "momentum replaced": of_state(
        lambda state: state.update(momentum_buffer=-2 * state["momentum_buffer"])
    ),
    "momentum moved": of_state(lambda state: moved(state["momentum_buffer"])),
    "momentum written to": of_state(lambda state: state["momentum_buffer"].mul_(-2)),
    "counter replaced": of_state(lambda state: state.update(step=7.0)),
    "state emptied": of_state(dict.clear),
    "master replaced": of_state(lambda state: state.update(master_param=2 * state["master_param"])),
    "master moved": of_state(lambda state: moved(state["master_param"])),
    "parameter moved": lambda optimizer, params: moved(params[LAID]),
    "parameter of another type": of_another_type,
    "state loaded": loaded,
    "without a gradient": lambda optimizer, params: go(optimizer, 7, without=(LAID, 3)),
    "replicas set": lambda optimizer, params: optimizer.set_replicas(2, copies(2)),
    "replica moved": lambda optimizer, params: (
        optimizer.set_replicas(2, copies(2)),
        go(optimizer, 7),
        moved(optimizer.replica_parameters(1)[LAID]),
    ),
    "group added": lambda optimizer, params: optimizer.add_param_group(
        {"params": [Parameter(torch.ones(2, 2))], "use_muon": True}
    ),
    "group divided": grouped_anew,
    "by AdamW": said(use_muon=False, betas=(0.9, 0.99)),
    **{str(settings): said(**settings) for settings in [*SAID[1:], {"lr": 0.5}]},
    "multipliers": written("multipliers", [[3.0, 0.5]]),
    "max_grad_norm": written("max_grad_norm", 0.1),
    "zero_gradients": written("zero_gradients", True),
}


@pytest.mark.parametrize("master_weights", [None, "fp32"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_after_a_change_is_that_of_an_optimizer_that_has_kept_nothing(
    change: str, master_weights: str | None
) -> None:
    if "master" in change and master_weights is None:
        pytest.skip("it has none")
    params = parameters(torch.float32 if master_weights is None else torch.bfloat16)
    params[LAID].data = params[LAID].data.mT.contiguous().mT
    optimizer = make(params, master_weights=master_weights)
    go(optimizer, 0)
    go(optimizer, 1)
    CHANGES[change](optimizer, params)
    fresh = copy.deepcopy(optimizer)  # without plans
    for step in (2, 3):
        ours, theirs = go(optimizer, step), go(fresh, step)
        for k in range(optimizer.num_replicas):
            assert_equal(optimizer.replica_parameters(k), fresh.replica_parameters(k))
        for one, other in zip(ours, theirs, strict=True):
            assert optimizer.state[one].keys() == fresh.state[other].keys()
            assert all(
                torch.equal(fresh.state[other][key], value)
                for key, value in optimizer.state[one].items()
                if key[:7] != "replica"
            )
            assert (one.grad is None) == (other.grad is None) and (
                one.grad is None or torch.equal(one.grad, other.grad)
            )  # type: ignore[arg-type]


def test_nothing_is_made_or_checked_again_while_nothing_changes() -> None:
    params = parameters()
    optimizer = make(params, max_grad_norm=1.0)
    run(optimizer, params, range(2))
    with (
        mock.patch.object(optimizer, "_plan", side_effect=AssertionError),
        mock.patch.object(lists, "check_gradients", side_effect=AssertionError),
        mock.patch.object(matrices, "Batch", side_effect=AssertionError),
    ):
        optimizer.param_groups[0]["lr"] = 0.5
        run(optimizer, params, range(2, 4))


def test_what_is_refused_when_a_state_is_loaded() -> None:
    params = parameters()
    optimizer = make(params)
    run(optimizer, params, range(1))

    def spoiled(change: Callable[[dict[str, Any]], Any]) -> Callable[[], None]:
        saved = copy.deepcopy(optimizer.state_dict())
        change(saved)
        return lambda: optimizer.load_state_dict(saved)

    for message, change in [
        ("lacks momentum_buffer", lambda saved: saved["state"][0].pop("momentum_buffer")),
        (
            "use_muon=False of parameter group 0",
            lambda saved: saved["param_groups"][0].update(use_muon=False, betas=(0.9, 0.9)),
        ),
        ("lacks ns_steps", lambda saved: saved["param_groups"][0].pop("ns_steps")),
        ("is not that of torch.optim.AdamW", lambda saved: saved["param_groups"][1].pop("betas")),
    ]:
        refused(ValueError, message, spoiled(change))
