"""What changes between two steps: settings, groups, states, and memory that queues of processes,
offloading and whoever prunes or grows a model move. The next step is that of a copy that has kept
nothing from the steps before, or it names what it cannot use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from hdet.kernels import native
from hdet.testing.rules import (
    STORED,
    assert_equal,
    copies,
    parameters,
    run,
    set_gradients,
    state_of,
)

from .common import (
    BY_NAME,
    FREE,
    MUON,
    MUON_SETTINGS,
    OURS,
    RULES,
    Pair,
    Rule,
    each_backend,
    everything,
    groups,
    names,
    plans_made,
    replicated,
)

pytestmark = pytest.mark.usefixtures("small_tensors_have_codes")
ADAMW = BY_NAME["adamw"]


def trained(rule: Rule, count: int, options: dict[str, Any]) -> tuple[list[Parameter], Any]:
    """After two steps."""
    params, optimizer, _ = replicated(count, rule, **options)
    go(optimizer, 0)
    go(optimizer, 1)
    return params, optimizer


def go(optimizer: Any, step: int, without: Sequence[int] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for i, param in enumerate(params):
        gradient = torch.randn(param.shape, generator=generator)
        param.grad = None if i in without else torch.empty_like(param).copy_(gradient)
    optimizer.step()


def as_a_copy_that_has_kept_nothing(optimizer: Any, steps: range) -> None:
    fresh = copy.deepcopy(optimizer)
    both = (optimizer, fresh)
    for step in steps:
        for one in both:
            go(one, step)
        assert_equal(everything(optimizer), everything(fresh))
        for k in range(optimizer.num_replicas):
            assert_equal(optimizer.replica_parameters(k), fresh.replica_parameters(k))
        assert_equal(*([p.grad for g in o.param_groups for p in g["params"]] for o in both))


Change = Callable[[Any, list[Parameter]], Any]


def of_state(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Of the first parameter and of one that is not the first of its group."""
    return lambda o, p: [change(o.state[param]) for param in (p[0], p[-1])]


def of_moment(change: Callable[[Tensor], Tensor]) -> Change:
    def changed(o: Any, p: list[Parameter]) -> None:
        state = o.state[p[0]]
        name = next(key for key in ("momentum_buffer", "exp_avg", "exp_avg_sq") if key in state)
        state[name] = change(state[name])

    return changed


def said(**settings: Any) -> Change:
    return lambda o, p: o.param_groups[0].update(settings)


def _new_object(o: Optimizer, p: list[Parameter]) -> None:
    """Of the same memory, which begins anew."""
    o.state.pop(p[0])
    p[0] = o.param_groups[0]["params"][0] = Parameter(p[0].data)


def _state_replaced(o: Any, p: list[Parameter]) -> None:
    o.state = copy.copy(o.state)
    for param in p:
        o.state[param] = copy.deepcopy(o.state[param])


def _loaded(o: Any, p: list[Parameter]) -> None:
    saved = copy.deepcopy(o.state_dict())
    saved["state"][0]["step"] += 70
    o.load_state_dict(saved)


def _added(*sizes: int) -> Change:
    def added(o: Any, p: list[Parameter]) -> None:
        kind = {"use_muon": False} if "use_muon" in o.param_groups[0] else {}
        params = [Parameter(torch.ones(size)) for size in sizes]
        o.add_param_group({**kind, "params": params, "lr": 0.1})

    return added


def _regrouped(o: Any, p: list[Parameter]) -> None:
    one, other = o.param_groups[:2]
    other["params"].extend(one["params"])
    one["params"].clear()


def _divided(o: Any, p: list[Parameter]) -> None:
    """A parameter goes to a group with other settings."""
    first = o.param_groups[-1]
    second = {**first, "lr": 0.5, "name": "another", "params": first["params"][1:]}
    first["params"] = first["params"][:1]
    o.param_groups.insert(1, second)
    o.multipliers = [[1.0] * 4 for _ in o.multipliers]


def _of_other_types(o: Any, p: list[Parameter]) -> None:
    """Through others, so that it may lie where it lay."""
    p[0].grad = None
    for dtype in (torch.half, torch.bfloat16):
        p[0].data = p[0].data.to(dtype)


def _written(o: Any, p: list[Parameter]) -> None:
    with torch.no_grad():
        p[0].mul_(2)


ANY: dict[str, Change] = {
    "parameter moved": lambda o, p: setattr(p[0], "data", 2 * p[0].data),
    "parameter written to": _written,
    "another parameter": _new_object,
    "moment replaced": of_moment(lambda moment: torch.ones_like(moment)),
    "moment written to": of_moment(lambda moment: moment.mul_(2)),
    "counter replaced": of_state(lambda state: state.update(step=torch.tensor(70.0))),
    "counter is a number": of_state(lambda state: state.update(step=7.0)),
    "counter written to": of_state(lambda state: state["step"].fill_(1000.0)),
    "state of one removed": lambda o, p: o.state.pop(p[1]),
    "state of one emptied": of_state(dict.clear),
    "state cleared": lambda o, p: o.state.clear(),
    "state replaced": _state_replaced,
    "state loaded": _loaded,
    "two groups are one": _regrouped,
    "group divided": _divided,
    "groups in another order": lambda o, p: o.param_groups.reverse(),
    "group added": _added(9),
    "group without parameters": _added(),
    "multipliers": lambda o, p: o.multipliers[-1].__setitem__(0, 3.0),
    "max_grad_norm": lambda o, p: setattr(o, "max_grad_norm", 0.1),
    "zero_gradients": lambda o, p: setattr(o, "zero_gradients", True),
    "without some gradients": lambda o, p: go(o, 7, without=(0, 3)),
    "lr": said(lr=0.5),
    "weight_decay": said(weight_decay=0.3),
    "maximize": said(maximize=True),
    "replicas": lambda o, p: o.set_replicas(2, copies(2)),
}
OF_RULES: dict[str, dict[str, Change]] = {
    "adamw": {"betas, eps": said(betas=(0.7, 0.8), eps=1e-3)},
    "sgd": {"no momentum": said(momentum=0.0), "dampening": said(dampening=0.9)},
    "muon": {
        **{str(settings): said(**settings) for settings in MUON_SETTINGS},
        "by AdamW": said(use_muon=False, betas=(0.9, 0.99)),
    },
    "schedule-free": {"warmup_steps": said(warmup_steps=9)},
}
OF_MASTERS: dict[str, Change] = {
    "master replaced": lambda o, p: o.state[p[0]].update(
        master_param=2 * o.state[p[0]]["master_param"]
    ),
    "of other types": _of_other_types,
}
CASES = [
    pytest.param(rule, count, options, change, id=f"{rule.name}, {count}, {stored}: {name}")
    for rule, count, stored in [
        *((rule, 1, "float32") for rule in (ADAMW, BY_NAME["sgd"], MUON, FREE)),
        *((rule, 1, "float32 masters") for rule in (ADAMW, MUON)),
        (ADAMW, 1, "8 bits"),
        (ADAMW, 3, "split masters"),
    ]
    for options in [STORED[stored]]
    for name, change in (
        ANY | OF_RULES.get(rule.name, {}) | (OF_MASTERS if stored == "float32 masters" else {})
    ).items()
    if count == 1 or name not in ("another parameter", "group added", "replicas")
]


@pytest.mark.parametrize(("rule", "count", "options", "change"), CASES)
def test_a_step_after_a_change_is_that_of_a_copy_that_has_kept_nothing(
    rule: Rule, count: int, options: dict[str, Any], change: Change
) -> None:
    params, optimizer = trained(rule, count, options)
    change(optimizer, params)
    as_a_copy_that_has_kept_nothing(optimizer, range(2, 4))


# -- memory ----------------------------------------------------------------------------------------


def away_and_back(tensor: Tensor) -> None:
    storage, size = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
    storage.resize_(0)
    storage.resize_(size)


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda tensor: setattr(tensor, "data", torch.empty_like(tensor)),
    "turned": lambda tensor: tensor.as_strided_(tensor.shape, tensor.t().contiguous().t().stride()),
    "set": lambda tensor: tensor.set_(torch.empty_like(tensor)),
    "swapped": lambda tensor: torch.utils.swap_tensors(tensor, torch.empty_like(tensor)),
    "shared": Tensor.share_memory_,
    "sent": ForkingPickler.dumps,  # what a queue of torch.multiprocessing does
    "storage away and back": away_and_back,
    "resized": lambda tensor: [tensor.resize_(9999).resize_(kept) for kept in (tensor.shape,)],
}
UNUSABLE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "emptied": (lambda tensor: tensor.untyped_storage().resize_(0), "has no memory"),
    "shrunk": (
        lambda tensor: tensor.untyped_storage().resize_(2),
        "storage was resized|overlap in memory",
    ),
    "smaller": (lambda tensor: tensor.resize_(2), "shape"),
}
each_kind = pytest.mark.parametrize(
    ("rule", "count", "stored"),
    [
        *((rule, 1, "float32") for rule in OURS),
        *((ADAMW, 1, stored) for stored in ("bfloat16 moments", "8 bits", "float32 masters")),
        (MUON, 3, "float32 masters"),
        *((rule, 3, "split masters") for rule in (ADAMW, FREE)),
        (ADAMW, 3, "clipped"),
        (ADAMW, 3, "split, averages"),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)


def places_of(optimizer: Any) -> list[str]:
    """The names of what the first state has, tensor by tensor."""
    first = sorted(state_of(optimizer)[0].items())
    return [key for key, x in first for _ in (x if isinstance(x, list) else [x])]


@each_backend
@pytest.mark.parametrize("way", WAYS)
@each_kind
def test_a_step_finds_what_has_moved(
    rule: Rule, count: int, stored: str, way: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "torch":  # and a torch of another interface
        monkeypatch.setattr(native, "torch_interface", None)
    params, optimizer, _ = replicated(
        count, rule, transposed=False, **STORED[stored], backend=backend
    )
    run(optimizer, params, range(2))
    for place, key in enumerate(places_of(optimizer)):
        if way == "turned" and (
            key == "replica_params" or stored in ("8 bits", "bfloat16 moments")
        ):
            continue  # replicas lie as their parameter does; blocks of codes follow the memory
        tensor = everything(optimizer)[place]
        kept = tensor.clone()
        WAYS[way](tensor)
        tensor.copy_(kept)
        as_a_copy_that_has_kept_nothing(optimizer, range(2 + place, 3 + place))


@pytest.mark.parametrize("way", UNUSABLE)
@each_kind
def test_memory_that_cannot_be_used_is_refused_by_name(
    rule: Rule, count: int, stored: str, way: str
) -> None:
    change, message = UNUSABLE[way]
    make = lambda: replicated(count, rule, transposed=False, **STORED[stored])[:2]
    params, optimizer = make()
    run(optimizer, params, range(2))
    for place in range(len(places_of(optimizer))):
        params, optimizer = make()
        run(optimizer, params, range(2))
        others = everything(optimizer)
        change(others.pop(place))
        before = copy.deepcopy(others)
        with pytest.raises(ValueError, match=f"(of|parameter).*{message}"):
            run(optimizer, params, range(2, 3))
        assert_equal(others, before)


# -- plans -----------------------------------------------------------------------------------------


@each_backend
def test_gradients_that_come_and_go_are_planned_for_once(backend: str) -> None:
    """One plan for each first gradient, whatever set of them a step has; and no state, nor anything
    else, without one. Rates and multipliers need no new one."""
    pair = Pair(backend=backend)
    schedulers = [ExponentialLR(optimizer, 0.9) for optimizer in (pair.a, pair.b)]
    with plans_made() as made:
        skip = lambda step, i: (
            (i == 4 and step < 5) or (i == 1 and step < 3) or (step > 5 and (step + i) % 3 == 0)
        )
        for step in pair.run(9, skip):
            known = {0, 2, 3, 5} | {i for i, first in ((1, 3), (4, 5)) if step >= first}
            assert set(pair.a.state_dict()["state"]) == set(pair.b.state_dict()["state"]) == known
            for scheduler in schedulers:
                scheduler.step()
    assert made.call_count == 3
    pair.check()
    pair.a.multipliers[0][0] = 1.5
    set_gradients(pair.ours, 9, skip=lambda _, i: i == 3)
    versions = [param._version for param in pair.ours]
    with plans_made() as made:
        pair.a.step()  # what a backward pass has saved of a parameter without a gradient is valid
    assert not made.called
    changed = [param._version > old for param, old in zip(pair.ours, versions, strict=True)]
    assert changed == [i != 3 for i in range(6)]


@each_backend
@pytest.mark.parametrize("rule", RULES, ids=names)
def test_parameters_of_several_dtypes(rule: Rule, backend: str) -> None:
    """One plan for all; each steps as it would alone."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16] * 2
    make = lambda: [Parameter(p.detach().to(d)) for p, d in zip(parameters(), dtypes, strict=True)]
    ours, alone = make(), make()
    a = rule.fused(groups(ours, rule), lr=1e-2, backend=backend)
    others = [
        rule.fused([{**group, "params": [param]}], lr=1e-2, backend=backend)
        for group in groups(alone, rule)
        for param in group["params"]
    ]
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(alone, step)
        with plans_made() as made:
            a.step()
        assert made.call_count == (step == 0)
        for other in others:
            other.step()
    assert_equal(ours, alone)
