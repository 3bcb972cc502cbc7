"""What the update rule of a fused optimizer promises."""

from __future__ import annotations

import copy
import io
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .. import kernels
from ..kernels.ema import WeightAverage
from ..kernels.numbers import value_of
from ..optim import FusedOptimizer, moment_storage
from ..optim.masters import BESIDE_KEYS, WEIGHT_KEYS, kept_beside, kept_masters
from ..rules import COUPLED, RULES

__all__ = ["RuleContract"]

SHAPES = [(33, 17), (17,), (0,), (5, 3, 2), (), (64,)]
BF16 = torch.bfloat16
STORED: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": BF16},
    "float32 masters": {"dtype": BF16, "master_weights": "fp32"},
    "24 bits, 8 bits": {"dtype": BF16, "master_weights": "split24", "moment_dtype": "8bit"},
    "split masters": {"dtype": BF16, "master_weights": "split"},
    "bfloat16 moments": {"moment_dtype": BF16},
    "8 bits": {"moment_dtype": "8bit"},
    "split, 8 bits": {"dtype": BF16, "master_weights": "split", "moment_dtype": "8bit"},
    "stochastic": {"dtype": BF16, "stochastic_rounding": True},
    "clipped": {"max_grad_norm": 1.0, "zero_gradients": True},
    "averages": {"ema": (0.5, WeightAverage(decay=None, every=2))},
    "split, averages": {"dtype": BF16, "master_weights": "split", "ema": 0.75},
}
"""ways to keep parameters and moments"""
RHOS = (0.5, 1.0, 1.75, 0.75)
"""multipliers of replicas"""
BACKENDS = [
    name
    for name, state in kernels.available().items()
    if state == kernels.USABLE and (name in ("cpu", "torch") or torch.cuda.is_available())
]
Update = Callable[..., None]
"""(group, number of the step, parameter, gradient, \\*moments), which it changes in place"""


class RuleContract:
    """The promises of a fused optimizer on each backend that runs here, on six tensors in three
    parameter groups.

    Attributes:
        optimizer: its class.
        groups: settings of each group.
        update: ``update(group, t, p, g, *moments)`` changes a parameter and its moments in place as
            the t-th step does (from 1) after decoupled decay, in float64. None: not compared.
        tolerance: of parameters of scale 1 after 30 steps.
        stored: of `STORED`, how parameters and moments are kept.
        backends: those that run here.

    Example::

        import hdet.testing

        class TestLion(hdet.testing.RuleContract):
            optimizer = hdet.FusedLion
            groups = ({}, {"betas": (0.8, 0.9)}, {"weight_decay": 0.1})

            @staticmethod
            def update(group, t, p, g, m):
                beta1, beta2 = group["betas"]
                p.add_(m.lerp(g, 1 - beta1).sign(), alpha=-group["lr"])
                m.lerp_(g, 1 - beta2)
    """

    optimizer: Any
    groups: Sequence[dict[str, Any]] = ({}, {}, {})
    update: Update | None = None
    tolerance = 1e-6
    stored: Iterable[str] = STORED
    backends: Sequence[Any] = BACKENDS

    @pytest.fixture(autouse=True)
    def _let_small_tensors_have_codes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(moment_storage, "SMALLEST", 500)  # as the matrix has

    def pytest_generate_tests(self, metafunc: Any) -> None:
        for name, values in (("backend", self.backends), ("stored", self.stored)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    def split(self, params: Sequence[Parameter]) -> list[Sequence[Parameter]]:
        """The parameters of each group."""
        return [params[:2], params[2:4], params[4:]]

    def reference(self, groups: list[dict[str, Any]]) -> Optimizer | None:
        """An optimizer of float64 parameters that ``update`` is; or another one."""
        return (
            None
            if self.update is None
            else ReferenceOptimizer(groups, self.optimizer.rule, self.update)
        )

    def test_each_backend_takes_the_steps_of_the_reference_in_float64(self, backend: str) -> None:
        ours = parameters(device=device_of(backend))
        theirs = [Parameter(param.detach().double()) for param in ours]
        reference = self.reference(self._groups(theirs, lr=1e-2))
        if reference is None:
            pytest.skip("no reference is given")
        optimizer = self.optimizer(self._groups(ours), lr=1e-2, backend=backend)
        for step in range(30):
            run(optimizer, ours, range(step, step + 1))
            for one, other in zip(ours, theirs, strict=True):
                other.grad = one.grad.double()  # type: ignore[union-attr]
            reference.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                one.detach().double(), other.detach(), rtol=self.tolerance, atol=self.tolerance
            )
            for name in RULES[self.optimizer.rule].moments:
                kept = optimizer.state[one].get(name)
                if kept is not None:
                    expected = reference.state[other][name]
                    torch.testing.assert_close(kept.double(), expected, rtol=1e-5, atol=1e-6)

    def test_replicas_step_as_separate_runs_would(self, stored: str, backend: str) -> None:
        """Bitwise, also where a parameter begins later, in the modes of schedule-free, and after a
        copy and a state."""
        params: Any
        params, together, _ = self._replicas(3, stored, backend)
        alone = [self._replicas(1, stored, backend)[:2] for _ in range(3)]
        for k, (_, one) in enumerate(alone):
            one.multipliers, one.first_replica = [[RHOS[k]] * 3], k
        for step in range(5):
            for own, optimizer in ((params, together), *alone):
                skip = lambda step, i: (step, i) == (0, 2)
                run(optimizer, own, range(step, step + 1), skip=skip)
            for change in ("eval", "train") if hasattr(together, "eval") and step else ("",):
                for k, (_, one) in enumerate(alone):
                    if change:
                        getattr(one, change)()
                        if k == 0:
                            getattr(together, change)()
                    assert_equal(together.replica_parameters(k), one.replica_parameters(0))
                    assert_equal(values(together, k), values(one))
                    assert_equal(_shared(together), _shared(one))
            if step == 3:
                params, together = copy.deepcopy((params, together))
                together.load_state_dict(copy.deepcopy(together.state_dict()))
        if stored == "clipped":
            assert not any(p.grad.any() for p in params)
            norms = [list(of.gradient_norms().values()) for of in (together, one)]
            assert_equal(*norms)

    @pytest.mark.parametrize("kept", ["fp32", "split"])
    @pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
    def test_masters_step_as_float32_parameters_would(
        self, kept: str, dtype: torch.dtype, backend: str
    ) -> None:
        ours = parameters(dtype=dtype, device=device_of(backend))
        theirs = [Parameter(param.detach().float()) for param in ours]
        a = self.optimizer(self._groups(ours), lr=1e-2, backend=backend, master_weights=kept)
        b = self.optimizer(self._groups(theirs), lr=1e-2, backend=backend)
        for step in range(5):
            step_both(a, ours, b, theirs, step)
        assert_equal(values(a), values(b))
        is_split = kept == "split" and dtype == BF16
        name = "remainder" if is_split else "master_param"
        assert all(state.keys() & {"remainder", "master_param"} == {name} for state in state_of(a))
        if not is_split:
            assert_equal(ours, [param.to(dtype) for param in theirs])

    @pytest.mark.parametrize(("count", "model_first"), [(1, False), (3, True), (3, False)])
    def test_a_state_resumes_bitwise(self, stored: str, count: int, model_first: bool) -> None:
        """Of several replicas in the middle of a cycle, through a file.

        Moments stay what they are, which torch's load_state_dict would cast to the parameter's
        dtype; what is saved of 8 bits are float32 values.
        """
        backend = BACKENDS[0]
        (ours, a, _), (theirs, b, sets) = (self._replicas(count, stored, backend) for _ in range(2))
        run(a, ours, range(3), skip=lambda step, i: (step, i) == (1, 2))
        saved = through_a_file({"model": [p.detach() for p in ours], "optimizer": a.state_dict()})
        kept = saved["optimizer"]["state"].values()
        assert not any(key.endswith("_scale") for state in kept for key in state)
        run(b, theirs, range(7, 9))  # it has gone elsewhere
        if not model_first:
            b.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for param, value in zip(theirs, saved["model"], strict=True):
                param.copy_(value)  # as Module.load_state_dict
        if model_first:
            b.load_state_dict(saved["optimizer"])
        for k in range(count):
            assert all(map(operator.is_, b.replica_parameters(k), sets[k])), "in place"
        for optimizer, params in ((a, ours), (b, theirs)):
            run(optimizer, params, range(3, 5))
            optimizer.average_replicas([1.0, 2.0, 3.0][:count])
            run(optimizer, params, range(5, 6))
        for k in range(count):
            assert_equal(a.replica_parameters(k), b.replica_parameters(k))
        narrow = {BF16} if stored == "bfloat16 moments" else set()
        narrow = {torch.uint8} if stored.endswith("8 bits") else narrow
        for one, other in zip(state_of(a), state_of(b), strict=True):
            moments = RULES[self.optimizer.rule].moments[:1]
            assert {one[name].dtype for name in moments if name in one} <= narrow | {torch.float32}
            torch.testing.assert_close(one, other, rtol=0, atol=0)

    def _groups(self, params: Sequence[Parameter], **settings: Any) -> list[dict[str, Any]]:
        cuts = zip(self.split(params), self.groups, strict=True)
        return [{"params": list(cut), **settings, **of} for cut, of in cuts]

    def _replicas(self, count: int, stored: str, backend: str) -> Any:
        options = {**STORED[stored], "backend": backend}
        params = parameters(dtype=options.pop("dtype", torch.float32), device=device_of(backend))
        return replicate(self.optimizer, self._groups(params), count, **options)


class ReferenceOptimizer(Optimizer):
    """One tensor after the other, with decoupled decay; ``update``: `Update`."""

    def __init__(self, params: Any, rule: str, update: Update, **settings: Any) -> None:
        self.rule, self.update = RULES[rule], update
        super().__init__(params, {**self.rule.settings, "maximize": False, **settings})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group = {**group, "lr": float(group["lr"])}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", torch.zeros(())) + 1
                zeros = torch.zeros_like(param)
                moments = [state.setdefault(name, zeros.clone()) for name in self.rule.moments]
                g = -param.grad if group["maximize"] else param.grad
                if not self.rule.coupled and state["step"] >= self.rule.first_step:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                self.update(group, state["step"].item(), param, g, *moments)


def device_of(backend: str) -> str:
    return "cpu" if backend in ("cpu", "torch") else "cuda"


def parameters(
    seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [Parameter(tensor.to(device, dtype)) for tensor in made]


def set_gradients(
    params: Sequence[Parameter],
    step: int,
    skip: Callable[[int, int], bool] = lambda step, i: False,
    dtype: torch.dtype | None = None,
) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for i, param in enumerate(params):
        gradient = torch.randn(param.shape, generator=generator)
        gradient = gradient.to(param.device, dtype or param.dtype)
        param.grad = None if skip(step, i) else gradient


def run(optimizer: Any, params: Sequence[Parameter], steps: range, **options: Any) -> None:
    for step in steps:
        set_gradients(params, step, **options)
        optimizer.step()


def step_both(a: Any, ours: list[Parameter], b: Any, theirs: list[Parameter], step: int) -> None:
    """`theirs` in float32 gets the very gradients of `ours`."""
    set_gradients(ours, step)
    for one, other in zip(ours, theirs, strict=True):
        other.grad = one.grad.float()  # type: ignore[union-attr]
    a.step()
    b.step()


def copies(count: int) -> Callable[[Tensor], list[Tensor]]:
    """For set_replicas."""
    return lambda param: [param, *(param.detach().clone() for _ in range(count - 1))]


def replicate(
    optimizer: type[FusedOptimizer],
    groups: list[dict[str, Any]],
    count: int,
    transposed: bool = True,
    **options: Any,
) -> tuple[list[Parameter], FusedOptimizer, list[list[Tensor]]]:
    """Parameters, their optimizer, and K sets that begin equal and have multipliers of their own.
    Decay is not coupled, which replicas cannot share. `transposed`: in memory."""
    for param in [param for group in groups for param in group["params"]]:
        if transposed and param.dim() > 1:
            param.data = param.data.mT.contiguous().mT
    if RULES[optimizer.rule].weights:  # an average itself
        options.pop("ema", None)
    made = optimizer(groups, lr=1e-2, **options)
    if made.rule in COUPLED:
        for group in made.param_groups:
            group["weight_decay"] = 0.0
    made.set_replicas(count, copies(count))
    made.multipliers = [[rho] * len(groups) for rho in RHOS[:count]]
    sets: Any = [made.replica_parameters(k) for k in range(count)]
    return sets[0], made, sets


def state_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of each parameter that has one, in the order of the groups."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [optimizer.state[param] for param in params if param in optimizer.state]


def values(optimizer: FusedOptimizer, k: int = 0) -> list[Tensor]:
    """Copies of the float32 values of replica k, as the state has them, and of weights
    beside them."""
    found = []
    first, own = optimizer.replica_parameters(0), optimizer.replica_parameters(k)
    for param, tensor in zip(first, own, strict=True):
        state = optimizer.state.get(param, {})
        masters = kept_masters(state)
        found.append(value_of(tensor.detach(), masters[k] if masters else None).clone())
        for key in BESIDE_KEYS:
            found += [one.clone() for one in kept_beside(state, key)[k : k + 1]]
    return found


def _shared(optimizer: Any) -> list[Tensor]:
    """What all replicas have one of."""
    own = {*BESIDE_KEYS, *WEIGHT_KEYS} - {"ema_step"}
    return [state[k] for state in state_of(optimizer) for k in sorted(state) if k not in own]


def assert_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if (one.dtype, one.device) != (other.dtype, other.device) or not torch.equal(one, other):
            # which takes ten times as long, and knows of NaN
            torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0, equal_nan=True)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
