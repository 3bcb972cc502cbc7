"""FusedMuon beside a float64 twin and beside torch's Muon and AdamW."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
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
from hdet.optim.readings import readings_of
from hdet.testing.rules import assert_equal, copies
from tests.harness import Run, model

from .common import MUON_SETTINGS, assert_close

pytestmark = pytest.mark.filterwarnings("ignore:no parameter's name says")

SHAPES = [(6, 4), (4, 6), (6, 4), (3, 5, 4), (2, 9), (6,), (7, 3), ()]
"""a stack of three, one twice as long as high, and the last three by AdamW"""
MATRICES, STACK = 5, 3
USUAL = (3.4445, -4.7750, 2.0315)
BF16 = torch.bfloat16


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def make(params: Sequence[Tensor], **options: Any) -> FusedMuon:
    both = [
        {"params": params[:MATRICES], "use_muon": True, "higher_dims": "stack"},
        {"params": params[MATRICES:], "use_muon": False},
    ]
    return FusedMuon(both, **{"lr": 2e-2, "adamw_lr": 1e-2, "ns_dtype": torch.float32, **options})


def give(
    params: Sequence[Tensor], step: int, without: Sequence[int] = (), scale: float = 1.0
) -> None:
    for i, (param, gradient) in enumerate(zip(params, gradients(step, scale), strict=False)):
        param.grad = None if i in without else gradient.to(param.dtype)


def run(optimizer: Any, params: Sequence[Tensor], steps: range, **given: Any) -> None:
    """An optimizer, or several of which each has a part of the parameters."""
    for step in steps:
        give(params, step, **given)
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.step()


def states(optimizer: FusedMuon, params: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [optimizer.state.get(param, {}) for param in params]


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


def twin(
    place: int,
    start: Tensor,
    steps: int,
    rho: float = 1.0,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    adjust_lr_fn: str | None = None,
    ns_coefficients: Any = USUAL,
    ns_steps: int = 5,
    eps: float = 1e-7,
    maximize: bool = False,
    decay_at: str = "replica",
    cautious_decay: bool = False,
) -> Tensor:
    """A matrix, or a stack, after some steps on `gradients` at the rate 0.02."""
    p, m = start.double(), torch.zeros_like(start, dtype=torch.float64)
    rows, columns = start.shape[-2:]
    rms = adjust_lr_fn == "match_rms_adamw"
    factor = 0.2 * math.sqrt(max(rows, columns)) if rms else math.sqrt(max(1, rows / columns))
    decay = 0.02 * weight_decay * (rho if decay_at == "replica" else 1)
    for step in range(steps):
        g = gradients(step)[place].double() * (-1 if maximize else 1)
        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g if nesterov else m
        each = u.reshape(-1, rows, columns)
        made = [twin_direction(one, ns_coefficients, ns_steps, eps) for one in each]
        o = torch.stack(made).view(p.shape)
        p = p * (1 - decay * ((o * p >= 0) if cautious_decay else 1)) - 0.02 * rho * factor * o
    return p


DECAYS = [{}, {"decay_at": "base"}, {"cautious_decay": True}]


@pytest.mark.parametrize(
    "said",
    [{}, *MUON_SETTINGS, *({"rho": 1.5, "weight_decay": 1.0, **of} for of in DECAYS)],
    ids=str,
)
def test_the_float64_twin(said: dict[str, Any]) -> None:
    params, given = parameters(), dict(said)
    starts = [param.detach().clone() for param in params]
    rho = given.pop("rho", 1.0)
    maximize = given.pop("maximize", False)
    optimizer = make(params, **given)
    optimizer.param_groups[0]["maximize"] = maximize
    optimizer.multipliers = [[rho, 1.0]]
    run(optimizer, params, range(6))
    for i in (0, 1, STACK, 4):
        expected = twin(i, starts[i], 6, **said)
        torch.testing.assert_close(params[i].detach().double(), expected, rtol=1e-5, atol=1e-5)
    assert optimizer.param_groups[0]["lr"] == 2e-2


def iteration(
    coefficients: Any = (USUAL,) * 5, eps: float = 1e-7, dtype: torch.dtype = torch.float32
) -> newton_schulz.Iteration:
    return newton_schulz.Iteration(coefficients, eps, dtype)


@pytest.mark.parametrize("shape", [(3, 40, 40), (2, 20, 40), (1, 24, 96), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("steps", [1, 4, 5])
def test_newton_schulz_of_ill_conditioned_matrices(shape: tuple[int, int, int], steps: int) -> None:
    """Singular values over six orders of magnitude, where steps on the Gram matrix would lose the
    small ones: as exact as plain steps."""
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.logspace(0, -6, shape[2])
    x[0, :, : shape[2] // 2] *= 1e-3
    how = iteration((USUAL,) * steps)
    (made,) = newton_schulz.orthogonalise([x], how)
    exact = [twin_direction(one.double(), steps=steps).float() for one in x if x.numel()]
    expected = torch.stack(exact) if exact else x
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-4)
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
    for dtype in (torch.float32, BF16, torch.float16):
        (made,) = newton_schulz.orthogonalise([x], iteration(coefficients, 1e-30, dtype))
        assert made.dtype == dtype
        off[dtype] = float((made.double() - exact).norm() / exact.norm())
    in_pairs = shape[1] >= 2 * shape[0]
    assert off[torch.float16] < off[BF16] / (2.5 if in_pairs else 6.0)
    assert off[torch.float32] < off[torch.float16] / 30
    if kind != "one large":  # where all else is small beside it
        assert off[torch.float16] < (5e-3 if in_pairs else 2.5e-3)


@pytest.mark.parametrize(
    ("device", "has_amx", "dtype"),
    [("cuda", False, torch.float16), ("cpu", True, BF16), ("cpu", False, torch.float32)],
)
def test_the_fastest_type_that_is_as_near_as_torchs(
    device: str, has_amx: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert newton_schulz.fastest_dtype.__wrapped__(device) == dtype


def test_float16_keeps_digits_of_small_numbers() -> None:
    """Elements of 7e-6, as at norm 1 those of a matrix of 10^10 elements would be."""
    torch.manual_seed(0)
    x = torch.randn(96, 144)
    eps = 1200 * float(x.norm())
    (made,) = newton_schulz.orthogonalise([x], iteration(eps=eps, dtype=torch.float16))
    exact = twin_direction(x.double(), eps=eps)
    assert (made.double() - exact).norm() / exact.norm() < 2e-3


@pytest.mark.parametrize("shape", [(64, 64), (96, 144), (48, 192)], ids=str)
def test_polar_express_is_nearer_to_orthogonal_than_the_quintic(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    left, _, right = torch.linalg.svd(x.double(), full_matrices=False)
    off = []
    for coefficients in ((USUAL,) * 5, POLAR_EXPRESS):
        (made,) = newton_schulz.orthogonalise([x], iteration(coefficients))
        off.append(float((made.double() - left @ right).norm() / shape[0] ** 0.5))
    assert off[1] < 0.7 * off[0] < 0.2


def test_a_matrix_that_is_not_finite_or_zero_leaves_the_others_of_its_batch_alone() -> None:
    torch.manual_seed(0)
    x = [torch.randn(3, 5), torch.full((5, 3), math.nan), torch.zeros(3, 5)]
    first, bad, nothing = newton_schulz.orthogonalise(x, iteration())
    assert_close([first], [twin_direction(x[0].double()).float()], 1e-5)
    assert bad.isnan().all() and not nothing.any()


# -- torch's ---------------------------------------------------------------------------------------


def torchs(params: Sequence[Tensor], **said: Any) -> list[Any]:
    two_d = [param for param in params[:MATRICES] if param.ndim == 2]
    return [torch.optim.Muon(two_d, lr=2e-2, **said), torch.optim.AdamW(params[MATRICES:], lr=1e-2)]


def in_float32() -> AbstractContextManager[Any]:
    """Torch computes Newton-Schulz in bfloat16 whatever the parameter is; here in float32."""
    return mock.patch.object(Tensor, "bfloat16", Tensor.clone)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.5},
    ],
    ids=str,
)
def test_torchs_muon_and_adamw(said: dict[str, Any]) -> None:
    """Also where some gradients are missing, or all."""
    ours, theirs = parameters(), parameters()
    a, b = make(ours, **said), torchs(theirs, **said)
    for step in range(20):
        missing = [i for i in range(len(ours)) if (step + i) % 3 == 0 and step > 10]
        missing = {12: list(range(MATRICES)), 13: list(range(len(ours)))}.get(step, missing)
        with in_float32():
            for one, params in ((a, ours), (b, theirs)):
                run(one, params, range(step, step + 1), without=[STACK, *missing])
    assert_close(ours, theirs, 2e-5)
    assert a.state[ours[STACK]] == {}


def test_in_bfloat16_as_near_to_the_twin_as_torchs() -> None:
    ours, theirs = parameters(), parameters()
    expected = twin(0, ours[0].detach().clone(), 10)
    run(make(ours, ns_dtype=BF16), ours, range(10))
    run(torchs(theirs), theirs, range(10))
    off, torchs_off = ((p[0].detach().double() - expected).norm() for p in (ours, theirs))
    assert 1e-4 < off < 1.5 * torchs_off < 0.1


def test_states_of_torchs_two_optimizers_load_and_go_back() -> None:
    """A run that torch began, hdet goes on with, and torch ends."""
    params, others = parameters(), parameters()
    two_d = [*range(STACK), 4]
    ours = FusedMuon(
        [
            {"params": [params[i] for i in two_d], "use_muon": True},
            {"params": params[MATRICES:], "use_muon": False},
        ],
        ns_dtype=torch.float32,
    )
    began, back = torchs(params), torchs(params)
    with in_float32():
        run(torchs(others), others, range(6), without=[STACK])
        run(began, params, range(2), without=[STACK])
    muon, adamw = (copy.deepcopy(optimizer.state_dict()) for optimizer in began)
    muon["state"] |= {4 + i: values for i, values in adamw["state"].items()}
    adamw["param_groups"][0]["params"] = [4, 5, 6]
    ours.load_state_dict(
        {"state": muon["state"], "param_groups": muon["param_groups"] + adamw["param_groups"]}
    )
    assert [group["name"] for group in ours.param_groups] == ["muon", "adamw"]
    assert ours.param_groups[0]["lr"] == 2e-2
    run(ours, params, range(2, 4), without=[STACK])
    saved = ours.state_dict()
    for optimizer, group, first in zip(back, saved["param_groups"], (0, 4), strict=True):
        state = {i - first: values for i, values in saved["state"].items() if i in group["params"]}
        optimizer.load_state_dict(
            {"state": state, "param_groups": [{**group, "params": list(state)}]}
        )
    with in_float32():
        run(back, params, range(4, 6), without=[STACK])
    assert_close(params, others, 1e-5)


# -- matrices of other shapes ---------------------------------------------------------------------


def flat(tensor: Tensor) -> list[Tensor]:
    return [tensor.flatten(1)]


OF_SEVERAL: dict[str, tuple[tuple[int, ...], dict[str, Any], Any]] = {
    "a fused qkv": ((6, 4), {"splits": {"w": (2, 2, 2)}}, lambda x: x.split(2)),
    "of groups of heads": ((8, 4), {"splits": {"a.w": (6, 1, 1)}}, lambda x: x.split([6, 1, 1])),
    "columns": ((4, 6), {"splits": (3, 3)}, lambda x: x.split(3, dim=1)),
    "transposed": ((7, 4), {}, lambda x: [x]),
    "transposed columns": ((4, 7), {"splits": (2, 5)}, lambda x: x.split([2, 5], dim=1)),
    "gates of experts": (
        (3, 6, 4),
        {"higher_dims": "stack", "splits": (2, 4)},
        lambda x: x.split([2, 4], dim=1),
    ),
    "a convolution": ((5, 3, 2, 2), {"higher_dims": "flatten"}, flat),
    "channels_last": ((5, 3, 2, 2), {"higher_dims": "flatten"}, flat),
    "heads of a convolution": (
        (6, 2, 3),
        {"higher_dims": "flatten", "splits": (3, 3)},
        lambda x: x.flatten(1).split(3),
    ),
}


@pytest.mark.parametrize("case", OF_SEVERAL)
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.float16])
def test_what_holds_several_matrices_is_stepped_as_these(
    case: str, adjust: str, ns_dtype: torch.dtype
) -> None:
    """In two replicas, where a gradient is missing, and after a state of an optimizer that read it
    otherwise."""
    shape, said, cut = OF_SEVERAL[case]
    generator = torch.Generator().manual_seed(0)
    options = {"lr": 2e-2, "adjust_lr_fn": adjust, "ns_dtype": ns_dtype}
    values = torch.randn(2, *shape, generator=generator)
    whole = [Parameter(value.clone()) for value in values]
    if case.startswith("transposed"):  # in memory
        whole[0] = Parameter(values[0].mT.contiguous().mT)
    if case == "channels_last":
        whole = [Parameter(value.to(memory_format=torch.channels_last)) for value in values]
    names = [("a.w", whole[0]), ("b.a.w", whole[1])]
    ours = FusedMuon([{"params": names, "use_muon": True, **said}], **options)
    blocks = [[Parameter(part.clone()) for part in cut(value)] for value in values]
    stacked = {"use_muon": True, "higher_dims": "stack"}
    theirs = FusedMuon([{"params": [*blocks[0], *blocks[1]], **stacked}], **options)
    for optimizer in (ours, theirs):
        optimizer.set_replicas(2, copies(2))
        optimizer.multipliers = [[1.0], [1.5]]
    for step in range(4):
        for i, (param, parts) in enumerate(zip(whole, blocks, strict=True)):
            gradient = torch.randn(shape, generator=generator)
            missing = step == 2 and i == 0
            param.grad = None if missing else torch.empty_like(param).copy_(gradient)
            for part, given in zip(parts, cut(gradient), strict=True):
                part.grad = None if missing else given.contiguous()
        ours.step()
        theirs.step()
        state = copy.deepcopy(ours.state_dict())
        state["param_groups"][0] |= dict.fromkeys(said)
        ours.load_state_dict(state)
    for k in range(2):
        found = [part for param in ours.replica_parameters(k) for part in cut(param)]
        assert_close(found, theirs.replica_parameters(k), 1e-6 if ns_dtype.itemsize > 2 else 1e-3)


def test_what_is_read_as_which_matrices_may_change_between_steps() -> None:
    """In place, too."""
    found = []
    for changes in (False, True):
        param = Parameter(torch.arange(24.0).view(6, 4).sin())
        said: dict[str, tuple[int, ...]] = {} if changes else {"w": (2, 4)}
        options: dict[str, Any] = {"momentum": 0.0, "nesterov": False, "ns_dtype": torch.float32}
        optimizer = FusedMuon(
            [{"params": [("a.w", param)], "use_muon": True}], splits=said, **options
        )
        for step in range(2):
            param.grad = torch.arange(24.0).view(6, 4).cos()
            optimizer.param_groups[0]["lr"] = float(step)
            if step == 1:
                said["w"] = (2, 4)
            optimizer.step()
        found.append(param.detach())
    assert_equal(*[[one] for one in found])


def test_splits_are_by_the_names_that_the_program_gave() -> None:
    """Whatever a loaded state calls them; of two ends of a name the longer is meant."""
    said = {"w": (3, 3), "b.w": (2, 4)}
    params = [("a.w", Parameter(torch.ones(6, 4))), ("b.w", Parameter(torch.ones(6, 4)))]
    optimizer = FusedMuon([{"params": params, "use_muon": True}], splits=said)
    state = optimizer.state_dict()
    state["param_groups"][0]["param_names"] = ["0", "1"]
    optimizer.load_state_dict(state)
    found = readings_of(optimizer.param_groups[0], "the group")
    assert [one.sizes for one in found] == [(3, 3), (2, 4)]


def test_a_wrong_name_in_an_added_group() -> None:
    optimizer = FusedMuon([("w", Parameter(torch.ones(6, 4)))], use_muon=lambda *_: True)
    added = ("v", Parameter(torch.ones(6, 4)))
    optimizer.add_param_group({"params": [added], "use_muon": True, "splits": {"vv": (3, 3)}})
    added[1].grad = torch.ones(6, 4)
    with pytest.raises(ValueError, match="splits names 'vv'"):
        optimizer.step()
    assert (added[1] == 1).all()


# -- replicas and masters --------------------------------------------------------------------------


def test_stochastic_rounding() -> None:
    """bfloat16 throughout: the mean of many seeds is where float32 masters are."""
    begun = parameters(BF16)[0].detach().double()
    wide, sums = parameters(BF16), torch.zeros(6, 4, dtype=torch.float64)
    other = make(wide, lr=1e-3, master_weights="fp32")
    run(other, wide, range(1))
    for seed in range(64):
        params = parameters(BF16)
        options: dict[str, Any] = {"stochastic_rounding": True, "moment_dtype": BF16, "seed": seed}
        optimizer = make(params, lr=1e-3, **options)
        run(optimizer, params, range(1))
        assert optimizer.state[params[0]]["momentum_buffer"].dtype == BF16
        sums += params[0].detach().double()
    moved = other.state[wide[0]]["master_param"].double() - begun
    found = sums / 64 - begun
    assert (found * moved).sum() / (moved * moved).sum() == pytest.approx(1.0, abs=0.5)


def test_two_rates_are_explored_over_coresident_replicas() -> None:
    net = model()

    def muon(params: Any, lr: float, weight_decay: float) -> FusedMuon:
        return FusedMuon(net.named_parameters(), lr=0.02, adamw_lr=0.003)

    knobs = [hdet.LearningRate(0.3, groups=["muon", "adamw"])]
    settings: dict[str, Any] = {"scheduler": None, "knobs": knobs, "every": 3}
    softmax = hdet.SoftmaxController(0.01, decay=None)
    run = Run(net=net, together=4, optimizer=muon, controller=softmax, **settings)
    losses = [run.step()]
    of_muon, of_adamw = zip(*run.optimizer.multipliers, strict=True)
    losses += [run.step() for _ in range(11)]
    assert losses[-1] < 0.9 * losses[0] and of_muon != of_adamw
    assert sorted(of_muon) == sorted(of_adamw) == pytest.approx([0.7, 0.7, 1.3, 1.3])
    rates = [group["lr"] for group in run.optimizer.param_groups]
    assert rates[0] != 0.02 and rates[1] != 0.003


def test_knobs_take_the_groups_that_have_the_key() -> None:
    optimizer = make(parameters())
    names = lambda knob: [bound.name for bound in knob.bind(optimizer)]
    assert names(hdet.LearningRate(groups="each")) == ["lr/muon", "lr/adamw"]
    assert names(hdet.Betas(groups="each")) == ["beta1/adamw", "beta2/adamw"]
    assert names(hdet.GroupValue("momentum")) == ["momentum"]
    with pytest.raises(ValueError, match="groups names 'muon', which has no beta1"):
        names(hdet.Betas(groups=["muon"]))
    with pytest.raises(ValueError, match="have no 'dampening'"):
        names(hdet.GroupValue("dampening"))


# -- what else a step does -------------------------------------------------------------------------


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
        {"stochastic_rounding": True, "ns_dtype": BF16},
        {"max_grad_norm": 1.0, "cautious_decay": True, "by": "AdamW"},
        {"ema": (0.9, hdet.WeightAverage(None, every=2))},
        {"ema": (0.9, hdet.WeightAverage(None, every=2)), "by": "AdamW"},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_is_what_a_graph_captures(options: dict[str, Any], count: int) -> None:
    """All that kernels read lies where it lay, and none of it is written by the host: neither
    gradients' addresses nor rates, which write_hyperparameters() brings before."""
    options = dict(options)
    by_adamw = options.pop("by", None) is not None
    can_write = by_adamw or "max_grad_norm" not in options
    dtype = BF16 if "master_weights" in options else torch.float32
    both = parameters(dtype), parameters(dtype)
    halves = lambda params: [{"params": params[:MATRICES]}, {"params": params[MATRICES:]}]
    captured, plain = (
        hdet.FusedAdamW(halves(params), **options) if by_adamw else make(params, **options)
        for params in both
    )
    for params, optimizer in zip(both, (captured, plain), strict=True):
        optimizer.set_replicas(count, copies(count))
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        run(optimizer, params, range(2))
        optimizer.param_groups[0].update(lr=0.5, momentum=0.5, weight_decay=0.3)
        optimizer.param_groups[1].update(lr=0.1, betas=(0.5, 0.6))
        optimizer.multipliers[-1][0] = 1.5
        if not can_write:
            run(optimizer, params, range(2, 3))  # brings them, as they cannot be written then
        for param, gradient in zip(params, gradients(1), strict=True):
            param.grad.copy_(gradient)  # type: ignore[union-attr]
    if can_write:
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
    if "ema" in options:
        for ours, theirs in zip(captured.state.values(), plain.state.values(), strict=True):
            assert torch.equal(ours["ema_1"], theirs["ema_1"]) and ours["ema_step"] == 3


@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.float16])
def test_more_matrices_of_a_shape_are_no_more_calls(ns_dtype: torch.dtype) -> None:
    """Calls for many tensors are a launch or a few on a GPU. What lies and what stands goes
    through Newton-Schulz together, and so do replicas."""
    counted = []
    for count, replicas in ((2, 1), (7, 1), (2, 3)):
        shapes = [*[(6, 4)] * count, *[(4, 6)] * count, (3, 5, 4)]
        params = [Parameter(torch.randn(shape)) for shape in shapes]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = FusedMuon(
            [{"params": params, "use_muon": True, "higher_dims": "stack"}], ns_dtype=ns_dtype
        )
        optimizer.set_replicas(replicas, copies(replicas))
        optimizer.step()
        with Calls() as calls:
            optimizer.step()
        counted.append(calls.count)
    assert counted[0] == counted[1] == counted[2] < 70


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


def test_the_default_rule() -> None:
    named = [(name, Parameter(torch.zeros(shape))) for name, (shape, _) in RULE.items()]
    assert all(hidden_matrix(name, param) == RULE[name][1] for name, param in named)
    optimizer = FusedMuon(named)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        [n for n, (_, u) in RULE.items() if u is x] for x in (True, False)
    ]
    assert optimizer.param_groups[0]["higher_dims"] == "stack"
    several = FusedMuon(
        [{"params": named[:1], "name": "a", "lr": 0.5}, {"params": named[1:3], "name": "b"}]
    )
    found = [(group["name"], group["lr"]) for group in several.param_groups]
    assert found == [("a", 0.5), ("b/muon", 1e-3), ("b/adamw", 1e-3)]


class Named(nn.Module):
    """A language model whose names say nothing.

    ``tied``: its output layer has the embedding's weight.
    """

    def __init__(self, tied: bool, words: int = 11, width: int = 4) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(words, width), Parameter(torch.zeros(7, width))
        self.attention = nn.MultiheadAttention(width, 2)
        self.mix = nn.ModuleList([nn.Linear(width, 3 * width), nn.Linear(3 * width, width)])
        self.to_logits = nn.Linear(width, words, bias=False)
        # its last layer is that of a second task
        self.aside = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))
        if tied:
            self.to_logits.weight = self.tok.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_rule_that_knows_the_modules(tied: bool) -> None:
    net = Named(tied)
    optimizer = FusedMuon(net.named_parameters(), use_muon=hidden_matrices(net))
    muon, adamw = (group["param_names"] for group in optimizer.param_groups)
    attention = ["attention.in_proj_weight", "attention.out_proj.weight"]
    assert muon == [*attention, "mix.0.weight", "mix.1.weight", "aside.0.weight"]
    assert len(adamw) == len(list(net.parameters())) - 5


@pytest.mark.parametrize(
    "settings",
    [  # those of torch's own tests
        {},
        {"lr": 0.01},
        {"lr": torch.tensor(0.001)},
        {"weight_decay": 0.2},
        {"momentum": 0.8},
        {"ns_steps": 6},
        {"ns_coefficients": (3.4, -4.7, 2.0)},
    ],
    ids=str,
)
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

    ours = trained(FusedMuon, ns_dtype=BF16)
    for one, other in zip(ours, trained(torch.optim.Muon), strict=True):
        # updates are sums of directions, about 1 / sqrt(10) times the rate, computed in bfloat16
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0.05 * 4 * 2**-8)


@pytest.mark.parametrize("shapes", [[(0, 8)], [(8, 0)], [(0, 0)], [(0, 8), (8, 3), (8, 0)]])
def test_empty_matrices_are_stepped_as_torchs(shapes: list[tuple[int, int]]) -> None:
    """As on a rank that has no expert."""
    params = [Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = FusedMuon(params, max_grad_norm=1.0)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all(optimizer.state[param]["step"] == 1 and (param < 1).all() for param in params)


def test_names_that_do_not_tell_an_output_layer_are_warned_of() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with pytest.warns(UserWarning, match=r"Muon steps '2.weight' too: .*hdet.hidden_matrices"):
        FusedMuon(net.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = FusedMuon(net.named_parameters(), use_muon=hidden_matrices(net))
        for last in ("head.weight", "2.weight"):  # a name that tells, and a choice of matrices
            FusedMuon([("0.weight", net[0].weight), (last, net[2].weight)])
    assert optimizer.param_groups[0]["param_names"] == ["0.weight"]


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
    net = nn.Linear(4, 4, bias=False)
    optimizer = FusedMuon([{"params": net.parameters(), "use_muon": True}])
    optimizer.add_param_group({"params": iter([Parameter(torch.zeros(2, 3))]), "use_muon": True})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


# -- what is kept from step to step ----------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1], ids=["the first", "the second"])
@pytest.mark.parametrize("adamw_too", [False, True])
def test_a_first_step_that_fails_half_way_is_kept(
    number: int, adamw_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of matrices finds no memory. AdamW has been stepped by then, and so have the batches
    before: these have their states, the others are as before a first step."""
    params, before = parameters(), parameters()
    optimizer = make(params)
    real, calls = matrices.of_stacks, iter(range(10))

    def fails(*given: Any, **named: Any) -> Any:
        if next(calls) == number:
            raise torch.OutOfMemoryError("no memory")
        return real(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(matrices, "of_stacks", fails)
        with pytest.raises(torch.OutOfMemoryError):
            run(optimizer, params, range(1), without=() if adamw_too else range(MATRICES, 8))
    moved = [i for i, old in enumerate(before) if not torch.equal(params[i], old)]
    assert (number > 0) == any(i < MATRICES for i in moved) and moved[:MATRICES] != [*range(5)]
    assert adamw_too == any(i >= MATRICES for i in moved)
    for i, state in enumerate(states(optimizer, params)):
        stepped = state.get("step", 0) == 1
        assert stepped == (i in moved)
        if stepped and i < MATRICES:
            assert state["momentum_buffer"].any()
    run(optimizer, params, range(1, 2))
    assert [float(state["step"]) for state in states(optimizer, params)] == [
        1.0 + (i in moved) for i in range(len(params))
    ]


# -- what is kept from step to step ----------------------------------------------------------------


def test_nothing_is_made_or_checked_again_while_nothing_changes() -> None:
    """A matrix that had no gradient at first is planned for once."""
    params = parameters()
    optimizer = make(params, max_grad_norm=1.0)
    run(optimizer, params, range(2), without=[0])
    run(optimizer, params, range(2, 4))
    with (
        mock.patch.object(optimizer, "_plan", side_effect=AssertionError),
        mock.patch.object(lists, "check_gradients", side_effect=AssertionError),
        mock.patch.object(matrices, "Batch", side_effect=AssertionError),
    ):
        optimizer.param_groups[0]["lr"] = 0.5
        run(optimizer, params, range(4, 6))
        run(optimizer, params, range(6, 7), without=[0])
    assert optimizer.state[params[0]]["step"] == 4
