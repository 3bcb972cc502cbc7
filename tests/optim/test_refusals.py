"""What is refused by name, with a remedy, before anything is changed: settings, groups, steps and
states that are loaded."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, NAdam, RAdam

import hdet
from hdet.optim import (
    POLAR_EXPRESS,
    FusedAdam,
    FusedAdamW,
    FusedADOPT,
    FusedLion,
    FusedMuon,
    FusedNAdamW,
    FusedScheduleFreeAdamW,
    FusedSGD,
    hidden_matrix,
)
from hdet.testing.rules import assert_equal, copies, parameters, run, set_gradients

from .common import BACKENDS, BY_NAME, FREE, MUON, Rule, everything, groups

pytestmark = pytest.mark.filterwarnings("ignore:no parameter's name says")

NAN = math.nan
MATRIX, VECTOR = Parameter(torch.zeros(3, 2)), Parameter(torch.zeros(3))
PAIR: Any = [("a", MATRIX), ("b", VECTOR)]
DOUBLE: Any = [("a", Parameter(torch.zeros(2, 2, dtype=torch.float64)))]
EXPERTS_AND_OTHERS = [
    (name, Parameter(torch.zeros(1, 3, 5))) for name in ("experts.w", "conv.weight")
]
NO_VECTORS = {"use_muon": lambda _, param: param.ndim >= 2}
ALIKE = "of group 0 would be that of Muon and of AdamW alike"
SETTINGS: dict[Any, list[tuple[Any, ...]]] = {
    FusedAdamW: [
        ("lr=-1.0 of the defaults must be finite and not negative", {"lr": -1.0}),
        ("lr of the defaults must be a number or a one-element tensor", {"lr": torch.ones(2)}),
        ("eps=nan", {"eps": NAN}),
        ("weight_decay=-0.1", {"weight_decay": -0.1}),
        (r"beta1=1.0 of the defaults must be in \[0, 1\)", {"betas": (1.0, 0.9)}),
        ("backend='metal' is unknown", {"backend": "metal"}),
        ("master_weights='fp64' is unknown", {"master_weights": "fp64"}),
        ("moment_dtype=torch.float16 is not supported", {"moment_dtype": torch.float16}),
        ("moment_dtype='4bit' is not supported; choose .*'8bit'", {"moment_dtype": "4bit"}),
        ("seed=-1", {"seed": -1}),
        ("decay_at='here' is unknown", {"decay_at": "here"}),
        ("max_grad_norm=0 must be positive", {"max_grad_norm": 0}),
        ("max_grad_norm=nan must be positive", {"max_grad_norm": NAN}),
    ],
    FusedLion: [
        ("beta2=nan", {"betas": (0.9, NAN)}),
        (r"betas=\(0.9,\) of the defaults must be 2 numbers", {"betas": (0.9,)}),
        ("lr=inf", {"lr": math.inf}),
    ],
    FusedSGD: [
        ("momentum=-0.1", {"momentum": -0.1}),
        ("dampening=nan", {"dampening": NAN}),
        ("nesterov=True of the defaults needs momentum > 0", {"nesterov": True}),
        ("and dampening 0, got 0.9 and 0.1", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
        ("FusedSGD takes no cautious_decay", {"cautious_decay": True}),
    ],
    FusedAdam: [("FusedAdam takes no cautious_decay", {"cautious_decay": True})],
    FusedScheduleFreeAdamW: [
        ("beta1=0.0 of .* above 0", {"betas": (0.0, 0.9)}),
        ("warmup_steps=-1", {"warmup_steps": -1}),
        ("r=nan", {"r": NAN}),
        ("lr=-1", {"lr": -1}),
        ("on meta, and the average's", {"lr": torch.ones((), device="meta")}),
        ("takes no cautious_decay", {"cautious_decay": True}),
        ("unexpected keyword", {"amsgrad": True}),
    ],
    FusedMuon: [
        (r"use_muon is not given, and parameter 0 .*\(3, 2\) has no name", {}, [MATRIX, VECTOR]),
        (f"lr {ALIKE}", {}, [{"params": PAIR, "lr": 0.1}]),
        (f"eps {ALIKE}", {"use_muon": hidden_matrix}, [{"params": PAIR, "eps": 0.1}]),
        (r"has the shape \(3,\), and use_muon=True is for", {"use_muon": lambda *_: True}, PAIR),
        ("2, 5.*say higher_dims", NO_VECTORS, [*nn.Conv1d(2, 3, 5).named_parameters()]),
        ("2, 5, 5.*say higher_dims", NO_VECTORS, [*nn.Conv2d(2, 3, 5).named_parameters()]),
        ("higher_dims='conv' of .* choose", {"higher_dims": "conv"}, PAIR),
        ("1, 3, 5.*say higher_dims", {**NO_VECTORS, "higher_dims": "flatten"}, EXPERTS_AND_OTHERS),
        ("splits=2 of parameter 0 of .* its 3 rows or 2 columns", {"splits": 2}, [MATRIX]),
        ("splits=tensor.*a list of wh", {"splits": torch.tensor([1, 2])}, [MATRIX]),
        (r"splits=\(3, 3\) .* its 3 rows or 2 columns", {"splits": (3, 3)}, [MATRIX]),
        ("splits names 'qkv', which is no matrix", {"splits": {"qkv": (1, 2)}}, [("w", MATRIX)]),
        ("splits names 'w', .* has none with a name", {"splits": {"w": (1, 2)}}, [MATRIX]),
        ("iterable of Tensors", {}, MATRIX),
        (r"momentum=1.0 of .* must be in \[0, 1\)", {"momentum": 1.0}, PAIR),
        ("ns_steps=100 of", {"ns_steps": 100}, PAIR),
        ("ns_coefficients=.* three finite", {"ns_coefficients": (1.0, NAN, 0.0)}, PAIR),
        ("or 4 times three", {"ns_coefficients": POLAR_EXPRESS, "ns_steps": 4}, PAIR),
        ("adjust_lr_fn='rms' of .* choose \"original\"", {"adjust_lr_fn": "rms"}, PAIR),
        ("ns_dtype=torch.float64", {"ns_dtype": torch.float64}, PAIR),
        ("lr=-1.0 of the defaults", {"lr": -1.0}, PAIR),
        ("beta1=", {"adamw_betas": (1.0, 0.5)}, PAIR),
        ("amsgrad", {}, [{"params": [VECTOR], "use_muon": False, "amsgrad": True}]),
        ("dtype torch.float64", {}, DOUBLE),
        ("unexpected keyword", {"betas": (0.9, 0.99)}, PAIR),
        ("empty parameter list", {}, []),
    ],
}


@pytest.mark.parametrize(
    ("made", "row"), [(made, row) for made, rows in SETTINGS.items() for row in rows]
)
def test_settings(made: Any, row: tuple[Any, ...]) -> None:
    message, options, params = row if len(row) == 3 else (*row, [VECTOR])
    with pytest.raises((ValueError, TypeError), match=message):
        made(params, **options)


def test_groups_leave_the_optimizer_as_it_was() -> None:
    params = parameters()
    optimizer = FusedAdamW(params[:1])
    for group, error in [
        ({"params": params[1:2], "lr": NAN}, ValueError),
        ({"params": params[1:2], "amsgrad": True}, ValueError),
        ({"params": [Parameter(torch.ones(2).double())]}, TypeError),
        ({"params": params[:1]}, ValueError),  # torch: appears in more than one group
    ]:
        with pytest.raises(error), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == len(optimizer.multipliers[0]) == 1
    with pytest.raises(ValueError, match="use_muon of parameter group 2 is None"):
        FusedMuon(PAIR).add_param_group({"params": [Parameter(torch.zeros(2))]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FusedMuon(PAIR), "needs a step before"),
        (lambda: FusedScheduleFreeAdamW(parameters()), "CUDA graph cannot replay"),
    ],
)
def test_hyperparameters_of_no_step(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        make().write_hyperparameters()


def test_moments_in_8_bits_are_not_averaged() -> None:
    optimizer = FusedAdamW(parameters(), moment_dtype="8bit", decay_at="base")
    with pytest.raises(ValueError, match="moments is 'average', but the optimizer keeps them in 8"):
        hdet.Ensemble(optimizer, sync=hdet.Sync(1, gradients="local", moments="average"))


# -- steps -----------------------------------------------------------------------------------------

Change = Callable[[Any, list[Any]], Any]


def said(group: int, **settings: Any) -> Change:
    return lambda o, p: o.param_groups[group].update(settings)


def lies(place: int, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda o, p: setattr(p[place], "data", change(p[place].data))


def _sparse(place: int, norm: float | None = None) -> Change:
    def changed(o: Any, p: list[Any]) -> None:
        o.max_grad_norm = norm
        p[place].grad = p[place].grad.to_sparse()

    return changed


def _double(o: Any, p: list[Any]) -> None:
    p[0].grad = None
    p[0].data = p[0].data.double()
    p[0].grad = torch.ones(33, 17).double()
    p[0].grad.data = torch.ones(33, 17)


STACK = 3
STEPS: dict[str, Change] = {
    "lr=nan of (parameter )?group 1": said(1, lr=NAN),
    "beta2=1.0": said(2, betas=(0.9, 1.0)),
    "multipliers of": lambda o, p: o.multipliers[0].__setitem__(0, NAN),
    r"multipliers\[0\] has 4 entries for 3 parameter groups": lambda o, p: o.multipliers[0].append(
        1.0
    ),
    "multipliers has 2 lists for 1 replicas": lambda o, p: o.multipliers.append([1.0] * 3),
    "the gradient of parameter 0 has the layout": _sparse(0),
    "the gradient of parameter . has the layout": _sparse(5, 1.0),
    "shape": lies(0, lambda data: data.mT),
    "parameter 0 of shape .* is not contiguous": lies(0, lambda _: torch.zeros(33, 34)[:, ::2]),
    "dtype torch.float64": _double,
    "overlap": lambda o, p: setattr(p[1], "data", p[5].data[:17]),
    "parameter . and parameter 0 overlap in memory": lambda o, p: setattr(
        p[5], "data", p[0].data.view(-1)[:64]
    ),
}
OF_MATRICES: dict[str, Change] = {
    "momentum=2.0 of parameter group 0": said(0, momentum=2.0),
    "ns_steps=0 of parameter group 0": said(0, ns_steps=0),
    "parameter 1 of shape .* is not contiguous": lies(
        STACK, lambda data: data.transpose(0, 1).contiguous().transpose(0, 1)
    ),
    r"momentum_buffer of parameter 0 has the shape \(4, 6\)": lambda o, p: o.state[p[0]].update(
        momentum_buffer=torch.zeros(4, 6)
    ),
}


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize(
    ("rule", "backend", "message"),
    [
        *((BY_NAME["adamw"], backend, row) for backend in ("cpu", "torch") for row in STEPS),
        *((MUON, "auto", message) for message in {**STEPS, **OF_MATRICES}),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_refused_steps_change_nothing(rule: Rule, backend: str, message: str, first: bool) -> None:
    params = parameters()
    optimizer: Any = rule.fused(groups(params, rule), backend=backend)
    set_gradients(params, 0)
    if not first:
        optimizer.step()
    {**STEPS, **OF_MATRICES}[message](optimizer, params)
    before = copy.deepcopy(everything(optimizer))
    for _ in range(2):  # asked twice, it is refused twice
        with pytest.raises((ValueError, TypeError), match=message):
            optimizer.step()
    assert_equal(everything(optimizer), before)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("make", [*(partial(FusedAdamW, backend=b) for b in BACKENDS), FusedMuon])
@pytest.mark.parametrize(
    ("message", "is_sparse"),
    [
        ("the gradient of parameter 3 has the layout", True),
        (" of parameter 3 has the shape", False),
    ],
)
def test_numbers_are_among_all_parameters(
    make: Any, message: str, is_sparse: bool, released: bool
) -> None:
    """Plans are of those that have had a gradient; of released ones each has its own."""
    params = [Parameter(torch.ones(4, 4)) for _ in range(4)]
    cuts = (params[:2], False), (params[2:], True)
    optimizer = make([{"params": cut, "use_muon": use} for cut, use in cuts])
    if released:
        optimizer.release_gradients()

    def step(is_sparse: bool = False) -> None:
        row = nn.functional.embedding(torch.tensor(1), params[3], sparse=is_sparse)
        (params[1].sum() + params[2].sum() + row.sum()).backward()
        optimizer.step()

    if not is_sparse:
        step()
        state = optimizer.state[params[3]]
        state.update({key: torch.ones(3) for key in state if key != "step"})
    with pytest.raises((TypeError, ValueError), match=message):
        step(is_sparse)


@pytest.mark.filterwarnings("ignore:tensors on meta")
def test_a_device_without_memory() -> None:
    param = Parameter(torch.ones(2, device="meta"))
    param.grad = torch.ones(2, device="meta")
    optimizer = FusedAdamW([param])
    with pytest.raises(ValueError, match="no memory .meta or fake tensor"):
        optimizer.step()
    assert not optimizer.state


def test_copies_that_are_not_alike() -> None:
    params = parameters()
    optimizer = FusedAdamW(params)
    for given, message in [
        (lambda p: [p], "copies must give 2 tensors"),
        (lambda p: [p.detach().clone(), p], "the parameter itself first"),
        (lambda p: [p, p.detach().double()], "replicas are alike"),
        (lambda p: [p, torch.zeros(3)], "replicas are alike"),
        (
            lambda p: [p, torch.empty(17, 33).t() if p.dim() == 2 else p.detach().clone()],
            r"copy 1 of .* strides \(1, 33\), the parameter \(17, 1\): .*clone",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.set_replicas(2, given)
    assert optimizer.num_replicas == 1 and optimizer.multipliers == [[1.0]] and not optimizer.state
    for k in (-1, 1, 2):
        with pytest.raises(ValueError, match=f"replica {k} does not exist"):
            optimizer.replica_parameters(k)
    optimizer.set_replicas(2, lambda p: [p, p.detach()])
    set_gradients(params, 0)
    with pytest.raises(ValueError, match="overlap in memory"):
        optimizer.step()
    free = FREE.fused(params)
    free.set_replicas(2, copies(2))
    free.step()
    free.state[params[0]]["replica_z"] = [free.state[params[0]]["z"]]
    with pytest.raises(ValueError, match="z of parameter 0 and z of parameter 0 overlap"):
        free.step()


# -- states ----------------------------------------------------------------------------------------

STATES: dict[str, dict[str, Callable[[Any, Any], Any]]] = {
    "adamw": {
        r"exp_avg_sq of parameter 1 has the shape \(18,\), the parameter \(17,\)": (
            lambda state, groups: state[1].update(exp_avg_sq=torch.zeros(18))
        ),
        "parameter 1 lacks exp_avg_sq": lambda state, groups: state[1].pop("exp_avg_sq"),
        "parameter 1 lacks step": lambda state, groups: state[1].pop("step"),
        "exp_avg of parameter 1 is a float, not a tensor": (
            lambda state, groups: state[1].update(exp_avg=0.5)
        ),
        r"exp_avg of parameter 1 is torch.uint8, codes .* save its state_dict\(\)": (
            lambda state, groups: state[1].update(exp_avg=torch.zeros(17).byte())
        ),
        "amsgrad=True of parameter group 0 of the loaded state is not supported": (
            lambda state, groups: groups[0].update(amsgrad=True)
        ),
        "lr=nan of parameter group 1 of the loaded state": (
            lambda state, groups: groups[1].update(lr=NAN)
        ),
        "parameter group 2 of the loaded state lacks betas: it is not that of a FusedAdamW": (
            lambda state, groups: groups[2].pop("betas")
        ),
        "different number of parameter groups": lambda state, groups: groups.pop(),
    },
    "muon": {
        "lacks momentum_buffer": lambda state, groups: state[0].pop("momentum_buffer"),
        "use_muon=False of parameter group 0": (
            lambda state, groups: groups[0].update(use_muon=False, betas=(0.9, 0.9))
        ),
        "lacks ns_steps": lambda state, groups: groups[0].pop("ns_steps"),
        "is not that of torch.optim.AdamW": lambda state, groups: groups[2].pop("betas"),
    },
}


@pytest.mark.parametrize(
    ("rule", "message"), [(rule, message) for rule, rows in STATES.items() for message in rows]
)
def test_damaged_states_leave_the_optimizer_as_it_was(rule: str, message: str) -> None:
    row, (ours, theirs) = {**BY_NAME, "muon": MUON}[rule], (parameters(), parameters())
    a, b = (row.fused(groups(params, row), lr=1e-2) for params in (ours, theirs))
    for optimizer, params in ((a, ours), (b, theirs)):
        run(optimizer, params, range(2))
    saved = copy.deepcopy(b.state_dict())
    run(a, ours, range(2, 3))
    STATES[rule][message](saved["state"], saved["param_groups"])
    before = copy.deepcopy((everything(a), a.state_dict()["param_groups"]))
    with pytest.raises(ValueError, match=message):
        a.load_state_dict(saved)
    assert_equal(everything(a), before[0])
    assert a.state_dict()["param_groups"] == before[1]
    assert not a._optimizer_load_state_dict_pre_hooks
    run(a, ours, range(3, 5))
    run(b, theirs, range(2, 5))
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    ("of", "into", "lacks"),
    [
        (SGD, FusedAdamW, "betas"),
        (AdamW, FusedSGD, "momentum"),
        (FusedLion, FusedAdam, "eps"),
        (NAdam, FusedNAdamW, "amsgrad"),
        (RAdam, FusedAdamW, "amsgrad"),
        (FusedAdamW, FusedScheduleFreeAdamW, ""),
        (FusedADOPT, FusedAdamW, "exp_avg"),  # a step of it would be 1e4 times too long
        (FusedAdamW, FusedADOPT, "exp_avg_normed"),
        (Adam, FusedLion, None),
    ],
)
def test_states_of_another_rule(of: Any, into: Any, lacks: str | None) -> None:
    theirs = parameters()
    other = of(theirs, lr=1e-2)
    run(other, theirs, range(1))
    ours = into(parameters(), lr=1e-2)
    if lacks is None:  # an Adam has all that a Lion needs
        ours.load_state_dict(other.state_dict())
        return
    with pytest.raises(ValueError, match=f"lacks .*{lacks}"):
        ours.load_state_dict(other.state_dict())


def test_an_adamw_state_is_not_adams() -> None:
    """The other way round it is, as in torch."""
    params = parameters()
    adam, adamw = FusedAdam(params), FusedAdamW(params)
    adamw.load_state_dict(torch.optim.Adam(params).state_dict())
    assert all(group["decoupled_weight_decay"] for group in adamw.param_groups)
    message = "decoupled_weight_decay=True of parameter group 0 of the loaded state is AdamW"
    with pytest.raises(ValueError, match=message):
        adam.load_state_dict(AdamW(params).state_dict())
