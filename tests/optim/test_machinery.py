"""What only shows with other hardware, without the native module, or in the documentation."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import hdet
from hdet.kernels import native, numbers
from hdet.optim import fused
from hdet.optim import step_plans as plans
from hdet.testing.rules import set_gradients

from .common import RULES, TORCH_RULES, Pair, Rule, names, plans_made


@pytest.mark.parametrize("name", sorted({rule.fused.__name__ for rule in RULES}))
def test_the_examples_of_the_docstrings(name: str) -> None:
    torch.manual_seed(0)
    found = doctest.DocTestFinder().find(getattr(hdet, name), name)
    tests = [test for test in found if test.examples]
    assert len(tests) == 1
    for test in tests:
        test.globs = {"torch": torch, "hdet": hdet}
        assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("rule", TORCH_RULES, ids=names)
def test_an_optimizer_may_stand_in_torchs_place(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused._torchs_defaults.cache_clear()
    monkeypatch.setattr(torch.optim, rule.peer.__name__, rule.fused)
    pair = Pair(rule)
    pair.go(1)
    pair.check()


def test_a_module_that_is_named_in_the_docs_is_there_after_import_hdet() -> None:
    assert hdet.__getattr__("optim") is hdet.optim


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU under two names: parameters at even places lie on one, the others on the other."""

    def by_device(params: Any, members: Any) -> dict[torch.device, list[int]]:
        found = {
            torch.device("cpu"): [i for i in members if i % 2 == 0],
            torch.device("cpu", 0): [i for i in members if i % 2],
        }
        return {device: places for device, places in found.items() if places}

    monkeypatch.setattr(plans, "by_device", by_device)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("rule", RULES, ids=names)
def test_parameters_on_two_devices(rule: Rule) -> None:
    pair = Pair(rule)
    with plans_made() as made:
        pair.go(5)
    assert made.call_count == 2
    pair.go(range(5, 10), skip=lambda step, i: (step + i) % 3 == 0)
    pair.check()


@contextmanager
def defaults(of: str) -> Iterator[None]:
    """torch.set_default_device("cuda"), for which "meta" stands, or torch.set_default_dtype."""
    with torch.device("meta" if of == "meta" else "cpu"):
        torch.set_default_dtype(getattr(torch, of, torch.float32))
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("of", ["meta", "float64", "bfloat16"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("moment_dtype", [None, "8bit"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_tables_are_the_hosts_and_in_float32_whatever_torchs_defaults_are(
    kind: str, moment_dtype: str | None, backend: str, of: str
) -> None:
    """Native code would write to addresses of another device, or read other numbers."""
    found = []
    for default in ("float32", of):
        param = Parameter(torch.linspace(-1, 1, 5000).view(50, 100))
        options: dict[str, Any] = {"moment_dtype": moment_dtype, "backend": backend}
        make = hdet.FusedAdamW if kind == "adamw" else hdet.FusedMuon
        optimizer = make([param], lr=1e-2, max_grad_norm=1.0, **options)
        optimizer.set_replicas(2, lambda p: [p, p.detach().clone()])
        optimizer.multipliers = [[0.5], [1.5]]
        param.grad = torch.linspace(1, -2, 5000).view(50, 100)
        for cached in (numbers.codebook, numbers._tables, numbers.magnitudes, numbers.thresholds):
            cached.cache_clear()  # type: ignore[attr-defined]
        with defaults(default):
            for _ in range(2):
                optimizer.step()
            optimizer.average_replicas([1.0, 3.0])
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        assert optimizer.grad_norm is not None and optimizer.grad_norm.dtype == torch.float32
        found.append((param.detach(), optimizer.grad_norm))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.usefixtures("two_devices")
def test_on_two_devices_all_gradients_are_checked_before_one_is_stepped() -> None:
    pair = Pair()
    pair.go(1)
    set_gradients(pair.ours, 1)
    before = [param.detach().clone() for param in pair.ours]
    pair.ours[3].grad = pair.ours[3].grad.to_sparse()  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="the gradient of parameter 3 has the layout"):
        pair.a.step()
    set_gradients(pair.ours, 1)
    pair.a.max_grad_norm = 1.0
    message = "max_grad_norm needs all parameters on one device, they are on cpu, cpu:0"
    with pytest.raises(ValueError, match=message):
        pair.a.step()
    for param, value in zip(pair.ours, before, strict=True):
        assert torch.equal(param, value)


@pytest.mark.usefixtures("two_devices")
def test_an_average_over_two_devices() -> None:
    params = [Parameter(torch.full((3,), float(i))) for i in range(3)]
    optimizer = hdet.FusedAdamW(params)
    optimizer.set_replicas(2, lambda param: [param, param.detach() + 2])
    optimizer.average_replicas([0.5, 0.5])
    assert all(
        (tensor == i + 1).all()
        for k in range(2)
        for i, tensor in enumerate(optimizer.replica_parameters(k))
    )


def test_a_capture_without_a_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    set_gradients(pair.ours, 0)
    for name in ("is_available", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    message = "run one step with the same parameters before capturing"
    with pytest.raises(RuntimeError, match=message):
        pair.a.step()
    assert not pair.a.state


@pytest.fixture(params=["native", "python"])
def lists(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """hdet.optim.lists as it is here, and as it is where the native module is missing."""
    if request.param == "native":
        return importlib.import_module("hdet.optim.lists")
    monkeypatch.setattr(native, "missing", "not built")
    monkeypatch.setattr(native, "torch_interface", None)
    spec = importlib.util.find_spec("hdet.optim.lists")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_objects_are_the_same_in_the_same_memory(lists: Any) -> None:
    one, other, both = torch.ones(2), torch.ones(2), [torch.ones(3), torch.ones(1)]
    params, held = [one, other], {"x": {"a": one, "b": both}, "y": {}, one: 1.5}
    noted = lists.NotedObjects([params, held])
    same = lambda: noted.same([[one, other], held])
    assert same() and lists.same(params, [one, other]) and not lists.same(params, [one, one])
    for others in ([one, one], [one], [other, one], [one, other, one], []):
        assert not noted.same([others, held])
    assert not noted.same([params, dict(held)]) and not noted.same([params])
    for inner, key, value in [
        *((held, key, value) for key, value in (("x", {}), (one, 2.5), ("new", 1.5))),
        *((held["x"], key, value) for key, value in (("a", other), ("b", both[:1]), ("c", 1))),
        (held["y"], "new", 1),
    ]:
        before = dict(inner)
        inner[key] = value
        assert not same()
        inner.clear()
        inner.update(before)
        assert same()
    for tensor in (one, *both):
        kept = tensor.data
        for changed in (kept.clone(), kept[:0], kept.view(1, -1), kept.view(torch.int32)):
            tensor.data = changed
            assert not same()
        tensor.data = kept
        assert same()
    wide = torch.empty([2] * 6)
    noted = lists.NotedObjects([wide])
    assert noted.same([wide])
    assert not noted.same([wide.transpose_(4, 5)]) and noted.same([wide.transpose_(4, 5)])


def test_gradients_and_versions_are_those_of_torch(lists: Any) -> None:
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(2)), Parameter(torch.ones(1))]
    params[1].grad = torch.ones(2)
    found, versions = lists.gradients(params), [p._version for p in params]
    assert list(found) == [None, params[1].grad, None] and lists.absent(found) == [0, 2]
    assert list(lists.chosen(found, [2, 1])) == [None, params[1].grad]
    assert lists.chosen(found, [0, 1, 2]) is found
    lists.bump_versions(params[1:])
    assert [p._version for p in params] == [versions[0], versions[1] + 1, versions[2] + 1]
