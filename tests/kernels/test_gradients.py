"""csrc/gradients.h: how a native step finds its gradients, and notices in each step what has become of them."""

from __future__ import annotations

import datetime
import weakref

import pytest
import torch
from torch import Tensor

from hdet import _C, kernels
from hdet.kernels import StepSettings, StepTensors

from .cases import BACKENDS, device_of

SHAPES = [(3, 4), (), (0, 5), (1, 7, 1), (6,)]
MOVED, RETYPED, UNUSUAL = _C.Gradients.MOVED, _C.Gradients.RETYPED, _C.Gradients.UNUSUAL
EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)
SETTINGS = [StepSettings(0.1, (1.0,))]

with_exchange = pytest.mark.skipif(
    EXCHANGE is None, reason="this torch has no DLPack exchange interface: Python looks at every gradient anew"
)


def some(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def reader() -> _C.Gradients:
    return _C.Gradients(Tensor, EXCHANGE, [torch.nn.Parameter(t) for t in some()])


def addresses(gradients: _C.Gradients) -> list[int]:
    table = torch.zeros(len(SHAPES), dtype=torch.int64)
    gradients.write_addresses(table.data_ptr())
    return table.tolist()


@with_exchange
def test_says_what_has_changed() -> None:
    gradients, first = reader(), some(1)
    assert gradients.read(first) == MOVED | RETYPED
    assert gradients.read(list(first)) == 0
    assert addresses(gradients) == [g.data_ptr() for g in first]
    assert gradients.types == [1] * len(SHAPES)
    first[3].data = first[3].clone()  # the same object elsewhere
    assert gradients.read(first) == MOVED
    assert addresses(gradients) == [g.data_ptr() for g in first]
    first[0], first[4] = first[0].bfloat16(), first[4].half()
    assert gradients.read(first) == MOVED | RETYPED
    assert gradients.types == [2, 1, 1, 1, 3]


@with_exchange
def test_takes_views_with_offsets_and_strides_that_do_not_matter() -> None:
    gradients = some(1)
    gradients[0] = torch.randn(5, 4)[1:4]
    gradients[2] = torch.empty(5, 0).t()
    gradients[3] = torch.randn(1, 7, 1).as_strided((1, 7, 1), (99, 1, 13))
    gradients[4] = torch.randn(7)[1:]
    assert all(g.is_contiguous() for g in gradients)
    found = reader()
    assert found.read(gradients) == MOVED | RETYPED
    assert addresses(found) == [g.data_ptr() for g in gradients]


UNUSUAL_ONES = {
    "none": None,
    "not a tensor": 1.0,
    "other shape": torch.randn(4, 3),
    "fewer dimensions": torch.randn(12),
    "strided": torch.randn(4, 3).t(),
    "double": torch.randn(3, 4, dtype=torch.float64),
    "complex": torch.randn(3, 4, dtype=torch.complex64),
    "integers": torch.ones(3, 4, dtype=torch.int32),
    "sparse": torch.randn(3, 4).to_sparse(),
    "meta": torch.randn(3, 4, device="meta"),
    "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj().imag,
    "a subclass": torch.nn.Parameter(torch.randn(3, 4)),
}


@with_exchange
@pytest.mark.parametrize("name", UNUSUAL_ONES)
def test_leaves_the_unusual_to_python_and_then_starts_anew(name: str) -> None:
    gradients, usual = reader(), some(1)
    gradients.read(usual)
    assert gradients.read([UNUSUAL_ONES[name], *usual[1:]]) == UNUSUAL
    assert gradients.read(usual) == MOVED | RETYPED
    gradients.forget()
    assert gradients.read(usual) == MOVED | RETYPED
    assert gradients.read(usual[:-1]) == UNUSUAL


@with_exchange
def test_keeps_no_gradient_alive() -> None:
    gradients, list_of_them = reader(), some(1)
    gradients.read(list_of_them)
    alive = weakref.ref(list_of_them[0])
    del list_of_them
    assert alive() is None


@pytest.mark.parametrize("exchange", [None, 3, datetime.datetime_CAPI], ids=["none", "not a capsule", "another capsule"])  # type: ignore[attr-defined]
def test_without_the_interface_or_with_another_one_python_looks(exchange: object) -> None:
    gradients = _C.Gradients(Tensor, exchange, some())
    assert gradients.read(some(1)) == UNUSUAL


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_negated_view_is_refused(backend: str) -> None:
    """Its memory holds the opposite of what it stands for, and DLPack does not tell."""
    p = torch.zeros(3, device=device_of(backend))
    g = torch.ones_like(p)
    plan = kernels.step_plan(StepTensors("sgd", [[p]], [0], [torch.zeros((), device=p.device)]), backend)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"gradient of parameter 0 is a negated view.*resolve_neg"):
            plan.step([torch._neg_view(g)], SETTINGS)
        assert p.tolist() == [0.0] * 3
    plan.step([torch._neg_view(g).resolve_neg()], SETTINGS)
    assert p.tolist() == [pytest.approx(0.1)] * 3


@pytest.mark.parametrize("exchange", [True, False])
def test_a_plan_follows_gradients_that_move_and_change_type(exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:  # a torch without the interface
        monkeypatch.setattr(kernels.native.step, "Tensor", type("Tensor", (), {}))
    params = some(0)
    plan = kernels.step_plan(StepTensors("sgd", [params], [0] * len(SHAPES), [torch.zeros(()) for _ in SHAPES]), "cpu")
    expected = [p.clone() for p in params]

    def step(gradients: list[Tensor]) -> None:
        plan.step(gradients, SETTINGS)
        for p, e, g in zip(params, expected, gradients, strict=True):
            e -= torch.tensor(0.1) * g.float()
            torch.testing.assert_close(p, e, rtol=1e-6, atol=1e-7)

    first = some(1)
    step(first)
    for g in first:
        g.mul_(2)
    step(first)
    step(tuple(some(2)))  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match="gradient of parameter 0"):
        step([torch.randn(4, 3), *first[1:]])
    step([first[0], *some(3)[1:]])
    step([g.bfloat16() for g in first])
    step([first[0].half(), torch.nn.Parameter(first[1]).detach(), *first[2:]])
    with torch.no_grad():
        step([torch.nn.Parameter(g) for g in first])
