"""csrc/tensors.h: how a native step finds its gradients, and notices in each step what has become
of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import hdet
from hdet import _C, kernels
from hdet.kernels import StepSettings, native
from hdet.kernels.native import interface
from hdet.kernels.step import NoReader
from hdet.optim import lists

from .cases import BACKENDS, device_of, of_sgd

SHAPES = [(3, 4), (), (0, 5), (1, 7, 1), (6,)]
SETTINGS = [StepSettings(0.1, (1.0,))]


def some(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def test_what_has_not_changed_is_not_looked_at_again() -> None:
    gradients, first = _C.GradientReader(native.torch_interface, some()), some(1)
    assert gradients.read(first) == gradients.MOVED | gradients.RETYPED
    assert gradients.read(list(first)) == 0
    written = torch.zeros(len(first), dtype=torch.int64)
    gradients.write_addresses(written.data_ptr())
    assert written.tolist() == [g.data_ptr() or NoReader.EMPTY for g in first]
    assert gradients.read([None, *first[1:]]) == gradients.MOVED
    assert gradients.read([first[0].half(), *first[1:]]) == gradients.MOVED | gradients.RETYPED
    assert gradients.types == [3, 1, 1, 1, 1]
    assert gradients.EMPTY == NoReader.EMPTY
    assert (
        gradients.read([torch.nn.Parameter(first[0]), *first[1:]])
        == gradients.RETYPED | gradients.MOVED
    )
    assert gradients.read(first[1:]) == gradients.UNUSUAL == NoReader.UNUSUAL
    assert gradients.read(first) == gradients.MOVED | gradients.RETYPED


def seen_by(transform: Any) -> Tensor:
    """What a function that is transformed gets."""
    kept: list[Tensor] = []
    transform(lambda x: (kept.append(x), x.sum())[1])(torch.ones(2, 3, 4))
    return kept[0]


BASE = torch.ones(3, 4)
UNUSUAL: dict[str, Callable[[], object]] = {
    "another shape": lambda: torch.ones(4, 3),
    "other strides": lambda: torch.ones(4, 3).t(),
    "another dtype": BASE.double,
    "sparse": BASE.to_sparse,
    "meta": lambda: BASE.to("meta"),
    "negated": lambda: torch._neg_view(BASE),
    "imaginary part of a conjugate": lambda: torch.ones(3, 4, dtype=torch.cfloat).conj().imag,
    "zeros without memory": lambda: torch._efficientzerotensor((3, 4)),
    "wrapper subclass": lambda: TwoTensor(BASE, BASE),
    "fake": lambda: FakeTensorMode().from_tensor(BASE),
    "of vmap": lambda: seen_by(torch.func.vmap),
    "of functionalize": lambda: seen_by(torch.func.functionalize),
    "jagged": lambda: torch.nested.nested_tensor([BASE, BASE], layout=torch.jagged),
    "oneDNN's": BASE.to_mkldnn,
    "of inference": torch.inference_mode()(lambda: torch.ones(3, 4)),
    "no tensor": lambda: 0.5,
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_is_unusual_is_left_to_python(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    usual, odd = [torch.ones(3, 4), BASE], UNUSUAL[kind]()
    gradients = _C.GradientReader(native.torch_interface, [torch.zeros(3, 4)] * 2)
    for _ in range(2):
        assert gradients.read(usual) == gradients.MOVED | gradients.RETYPED
        assert gradients.read(usual) == 0
        assert gradients.read([usual[0], odd]) == gradients.UNUSUAL
    assert "Exception" not in capfd.readouterr().err  # torch was not asked for what is not there


def test_gradients_are_held_without_objects_in_python() -> None:
    params: list[Any] = [torch.nn.Parameter(torch.ones(3)), torch.zeros(2), torch.ones(1)]
    params[0].grad, params[2].grad = torch.ones(3), torch.ones(1)
    reader = _C.GradientReader(native.torch_interface, params)
    of, address = weakref.ref(params[0].grad), params[0].grad.data_ptr()
    count, held = params[0].grad._use_count(), lists.gradients(params)
    assert not isinstance(held, list) and held[0] is params[0].grad and held[1] is None
    assert lists.absent(held) == [1] and lists.chosen(held, [2, 0])[1] is params[0].grad
    assert params[0].grad._use_count() == count + 1
    params[0].grad = None
    assert held[0] is of() and lists.chosen(held, [1, 0])[1] is of()
    assert reader.read(held) == reader.MOVED | reader.RETYPED
    written = torch.zeros(3, dtype=torch.int64)
    reader.write_addresses(written.data_ptr())
    assert written[:2].tolist() == [address, 0]
    del held
    assert of() is None
    odd = TwoTensor(BASE, BASE).requires_grad_()
    odd.grad = TwoTensor(BASE, BASE)
    found = lists.gradients([params[0], odd])
    assert isinstance(found, list) and found[1] is odd.grad and lists.absent(found) == [0]


def test_a_torch_that_keeps_tensors_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():  # whoever imports hdet there
        assert interface.find_interface() == interface.find_interface()
    monkeypatch.setattr(interface, "_CPU", 0x01FF01)
    with pytest.raises(ValueError, match="another way"):
        interface.find_interface()
    monkeypatch.setattr(interface, "_FUNCTIONS", {"no_such_function": None})
    with pytest.raises(AttributeError):
        interface.find_interface()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_negated_view_is_refused(backend: str) -> None:
    """Its memory holds the opposite of what it stands for."""
    p = torch.zeros(3, device=device_of(backend))
    g = torch.ones_like(p)
    plan = kernels.step_plan(of_sgd([p]), backend)
    for steps in range(2):
        with pytest.raises(
            ValueError, match=r"gradient of parameter 0 is a negated view.*resolve_neg"
        ):
            plan.step([torch._neg_view(g)], SETTINGS)
        assert p.tolist() == [pytest.approx(0.1 * steps)] * 3
        plan.step([torch._neg_view(g).resolve_neg()], SETTINGS)


@pytest.mark.parametrize("uses", [(False, False), (True, False), (True, True)])
def test_a_gradient_of_two_parameters_is_not_zeroed_before_the_second(uses: Any) -> None:
    params = [torch.nn.Parameter(torch.ones(2, 2)) for _ in uses]
    groups = [{"params": [p], "use_muon": use} for p, use in zip(params, uses, strict=True)]
    optimizer = hdet.FusedMuon(groups)
    for p in params:
        p.grad = params[0].grad if p is not params[0] else torch.ones(2, 2)
    optimizer.step()  # without zeroing both take it
    assert all((p != 1).all() for p in params)
    optimizer.zero_gradients, before = True, [p.detach().clone() for p in params]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"gradient of parameter 0 .* parameter 1 overlap"):
            optimizer.step()
    assert all(map(torch.equal, params, before))
    params[1].grad = torch.ones(2, 2)
    optimizer.step()
    assert not any(p.grad.any() for p in params)  # type: ignore[union-attr]


@pytest.mark.parametrize("asks", ["torch", "Python"])
def test_a_plan_follows_gradients_that_move_and_change_type(
    asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asks == "Python":  # no native module, or a torch of another interface
        monkeypatch.setattr(native, "torch_interface", None)
    params = some(0)
    plan = kernels.step_plan(of_sgd(params), "cpu")
    expected = [p.clone() for p in params]

    def step(gradients: list[Tensor]) -> None:
        plan.step(gradients, SETTINGS)
        for p, e, g in zip(params, expected, gradients, strict=True):
            e -= torch.tensor(0.1) * g.float()
            torch.testing.assert_close(p, e, rtol=1e-6, atol=1e-7)

    first = some(1)
    step(first)
    first[3].data = first[3].clone()  # the same object elsewhere
    for g in first:
        g.mul_(2)
    step(first)
    step(tuple(some(2)))  # type: ignore[arg-type]
    spaced = torch.randn(1, 7, 1).as_strided((1, 7, 1), (99, 1, 13))  # strides that do not matter
    step([torch.randn(5, 4)[1:4], first[1], torch.empty(5, 0).t(), spaced, torch.randn(7)[1:]])
    with pytest.raises((TypeError, ValueError), match="gradient of parameter 0"):
        step([torch.randn(4, 3), *first[1:]])
    step([first[0], *some(3)[1:]])
    step([g.bfloat16() for g in first])
    step([first[0].half(), torch.nn.Parameter(first[1]).detach(), *first[2:]])
    with torch.no_grad():
        step([torch.nn.Parameter(g) for g in first])
