"""One case of the table brought to life: tensors in guarded memory, steps on them, and the
comparison with float64.

Each step is compared from the state that the one before it left, so nothing accumulates: a number
stored in 16 bits must be the exact result rounded once, not something near it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hdet.kernels import StepOptions, StepPlan, StepSettings, StepTensors
from hdet.rules import RULES

from . import reference
from .cases import Guarded
from .reference import Bounded, exactly
from .table import F32, SPECIAL_VALUES, U8, Case, Format

MakePlan = Callable[[StepTensors], StepPlan]
State = dict[str, list[Tensor | None]]


def check(case: Case, make_plan: MakePlan, device: str = "cpu") -> None:
    """Runs the case's steps on a plan of that maker and compares everything that is written with
    float64, and that nothing else is."""
    problem = Problem(case, device)
    plan = make_plan(problem.tensors)
    for turn in range(case.steps):
        gradients, settings, options = problem.arguments(turn)
        before, seen = (
            problem.state(),
            [None if g is None else g.clone().cpu() for g in gradients.tensors],
        )
        plan.step(gradients.tensors, settings, options)
        _Comparison(problem, before, seen, turn).run(plan)
        gradients.assert_guards()
        for gradient, old in zip(gradients.given(), filter(torch.is_tensor, seen), strict=True):
            kept = torch.zeros_like(old) if case.zero_gradients else old
            assert torch.equal(_bits(gradient), _bits(kept)), "gradients"
    problem.assert_guards()


def final_tensors(case: Case, make_plan: MakePlan, device: str = "cpu") -> dict[str, Tensor]:
    """What all steps leave behind, guards included, as bytes on the CPU: for torch.equal between
    two backends."""
    problem = Problem(case, device)
    plan = make_plan(problem.tensors)
    left = {}
    for turn in range(case.steps):
        gradients, settings, options = problem.arguments(turn)
        plan.step(gradients.tensors, settings, options)
        left[f"gradients {turn}"] = gradients.buffer.cpu()
        left[f"norm {turn}"], left[f"skipped {turn}"] = _bits(plan.norm), _bits(plan.skipped)
    for guarded in problem.memory.values():
        for tensor in guarded.given():
            one_nan(tensor)
    return left | {name: guarded.buffer.cpu() for name, guarded in problem.memory.items()}


def special_values(like: Tensor, period: int, shift: int) -> Tensor:
    """SPECIAL_VALUES in turn, each `period` times: with other periods than another stream's, in
    every combination with its values."""
    places = torch.arange(like.numel()) // period + shift
    return torch.tensor(SPECIAL_VALUES)[places % len(SPECIAL_VALUES)].to(like.device)


def one_nan(x: Tensor) -> Tensor:
    """Writes one and the same NaN over every other: which of them an operation makes is up to the
    processor."""
    return x.masked_fill_(x.isnan(), math.nan) if x.is_floating_point() else x


def _bits(x: Tensor) -> Tensor:
    return x.detach().cpu().reshape(-1).view(torch.uint8).clone()


class Problem:
    """The tensors of a case."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        count = len(case.sizes)
        self.formats: list[Format] = [case.format(i) for i in range(count)]
        self.groups = [i % min(case.groups, count) for i in range(count)]
        self.memory: dict[str, Guarded] = {}
        rule = RULES[case.rule]
        exacts = [name in rule.exact for name in rule.moments]
        self.signed = {f"moment {j}": signed for j, signed in enumerate(rule.signed)}
        moments = [
            self._column(name, [F32 if exact else f.moment(signed) for f in self.formats], 1 + j)
            for j, ((name, signed), exact) in enumerate(
                zip(self.signed.items(), exacts, strict=True)
            )
        ]
        scales = [self._scales(f"scales {j}", column) for j, column in enumerate(moments)]
        sets: dict[str, list[Guarded]] = {"param": [], "master": []}
        for k in range(case.replicas):
            for j, (name, column) in enumerate(sets.items()):
                column.append(
                    self._column(
                        f"{name} {k}", [getattr(f, name) for f in self.formats], 3 + 2 * k + j
                    )
                )
            for param, master, like in zip(
                sets["param"][k].tensors,
                sets["master"][k].tensors,
                sets["param"][0].tensors,
                strict=True,
            ):
                if k == 1:
                    param.copy_(like)  # replicas that have not parted yet
                if "param" in case.special:
                    param.copy_(special_values(param, 1, k))
                    if master is not None:
                        master.copy_(param if master.dtype == F32 else torch.zeros_like(master))
                if master is not None and master.dtype == F32:
                    param.copy_(master)
        self.memory["steps"] = Guarded([1] * count, 0, 0, device)
        self.steps = [step.view(()) for step in self.memory["steps"].tensors]
        for i, group in enumerate(self.groups):
            taken = 9 * group + 3 * (
                i // len(set(self.groups)) % 2
            )  # tensors of one group have not all missed as many steps
            self.steps[i].fill_(taken)
            for moment in (column.tensors[i] for column in moments):
                if moment is not None and moment.dtype != U8:
                    moment.copy_(moment.square() * taken)  # zero before the first step
                elif moment is not None and taken == 0:
                    moment.zero_()
        emas = [
            [
                self._column(f"ema {j} of {k}", [F32] * count, 40 + 3 * j + k)
                for k in range(case.replicas)
            ]
            for j in range(len(case.averages))
        ]
        counts = [1] * (count if emas else 0)
        self.memory["ema_steps"] = Guarded(counts, 0, 0, device)
        self.ema_steps = [
            step.view(()).fill_(i % 5) for i, step in enumerate(self.memory["ema_steps"].tensors)
        ]
        self.tensors = StepTensors(
            rule=case.rule,
            params=[column.tensors for column in sets["param"]],
            groups=self.groups,
            steps=self.steps,
            moments=[column.tensors for column in moments],
            masters=[column.tensors for column in sets["master"]]
            if sets["master"][0].given()
            else None,
            ids=None if case.stochastic is None else [3 * i + 1 for i in range(count)],
            stochastic=case.stochastic,
            first_replica=0 if case.stochastic is None else 5,
            scales=[column.tensors for column in scales],
            averages=case.averages,
            emas=[[column.tensors for column in sets] for sets in emas],
            ema_steps=self.ema_steps,
        )

    def _column(self, name: str, dtypes: list[torch.dtype | None], place: int) -> Guarded:
        shift = self.case.shifts[place % len(self.case.shifts)]
        self.memory[name] = Guarded(
            self.case.sizes, shift, seed=place, device=self.device, dtypes=dtypes
        )
        return self.memory[name]

    def _scales(self, name: str, moments: Guarded) -> Guarded:
        """Of those moments that are codes."""
        coded = [moment is not None and moment.dtype == U8 for moment in moments.tensors]
        sizes, dtypes = (
            [-(-size // 256) for size in self.case.sizes],
            [F32 if one else None for one in coded],
        )
        self.memory[name] = Guarded(sizes, 0, seed=17, device=self.device, dtypes=dtypes)
        for scales in self.memory[name].given():
            scales.abs_()
        return self.memory[name]

    def arguments(self, turn: int) -> tuple[Guarded, list[StepSettings], StepOptions]:
        """Gradients at new addresses, and hyperparameters and options that change from step to
        step."""
        case = self.case
        dtypes: list[torch.dtype | None] = [f.gradient for f in self.formats]
        if case.changing:
            dtypes = dtypes[turn % len(dtypes) :] + dtypes[: turn % len(dtypes)]
        if case.coming:
            dtypes = [None if (i + turn) % 3 == 1 else dtype for i, dtype in enumerate(dtypes)]
        gradients = Guarded(
            case.sizes, case.shifts[0], seed=1000 + turn, device=self.device, dtypes=dtypes
        )
        if "gradient" in case.special:
            for gradient in gradients.given():
                gradient.copy_(special_values(gradient, len(SPECIAL_VALUES), turn))
        if case.grad_scale is not None:
            for gradient in gradients.given():
                gradient.mul_(case.grad_scale)
        if turn in case.spoiled and any(g.numel() for g in gradients.given()):
            next(g for g in gradients.given() if g.numel())[-1] = float("nan")
        options = StepOptions(
            grad_scale=None
            if case.grad_scale is None
            else torch.tensor([case.grad_scale], device=self.device),
            found_inf=None
            if case.found_inf is None
            else torch.tensor(self.of(case.found_inf, turn), device=self.device),
            max_norm=case.max_norm,
            zero_gradients=case.zero_gradients,
        )
        return gradients, [self.settings(row, turn) for row in range(1 + max(self.groups))], options

    @staticmethod
    def of(values: tuple[float, ...], turn: int) -> float:
        return values[min(turn, len(values) - 1)]

    def settings(self, group: int, turn: int) -> StepSettings:
        s, k = self.case.settings, self.case.replicas
        multipliers = [0.7 + 0.2 * j + 0.1 * group + 0.05 * turn for j in range(k)]
        multipliers[-1] *= k < 3  # one of many may stand still
        lr = s.lr * (1 + 0.5 * group) / (1 + 0.25 * turn)
        return s._replace(
            lr=torch.tensor([lr], device=self.device) if group == 1 else lr, multipliers=multipliers
        )

    def state(self) -> State:
        """Copies of everything a step may write, on the CPU; parameters also as the values they
        stand for."""
        copies: State = {
            name: [None if t is None else t.detach().cpu().clone() for t in guarded.tensors]
            for name, guarded in self.memory.items()
        }
        for k in range(self.case.replicas):
            copies[f"value {k}"] = [
                value_of(*pair)
                for pair in zip(copies[f"param {k}"], copies[f"master {k}"], strict=True)
            ]
        for j, (name, signed) in enumerate(self.signed.items()):
            pairs = zip(copies[name], copies[f"scales {j}"], strict=True)
            copies[f"value of {name}"] = [
                codes if scales is None else reference.decoded(codes, scales, signed)
                for codes, scales in pairs
            ]
        return copies

    @contextmanager
    def unchanged(self, *more: Guarded) -> Iterator[None]:
        """Nothing of it is written inside."""
        memory = [*self.memory.values(), *more]
        before = [guarded.buffer.clone() for guarded in memory]
        yield
        assert all(
            torch.equal(old, guarded.buffer) for old, guarded in zip(before, memory, strict=True)
        ), "something was written"

    def assert_guards(self) -> None:
        for guarded in self.memory.values():
            guarded.assert_guards()


def value_of(param: Tensor | None, master: Tensor | None) -> Tensor:
    """What a parameter and its master stand for, in float64 on the CPU."""
    assert param is not None
    if master is None:
        return param.cpu().double()
    return (master.cpu() if master.dtype == F32 else reference.join(param, master)).double()


def assert_kept(
    param: Tensor, master: Tensor | None, exact: Bounded, name: str, stochastic: bool = False
) -> None:
    """A parameter holds the exact value, rounded; or its master does, and the parameter is the
    master rounded."""
    if master is None:
        return reference.assert_stored(param, exact, name, stochastic)
    value = value_of(param, master)
    is_short = master.dtype == torch.int8
    reference.assert_stored(
        value.float(), exact, f"master of {name}", is_short and stochastic,
        torch.int8 if is_short else torch.float32,
    )  # fmt: skip
    if master.dtype == F32:
        rounded = master.to(param.dtype)
        assert bool(((param == rounded) | (param.isnan() & rounded.isnan())).all()), (
            f"{name} is not its master rounded"
        )
    else:  # ties away from zero, so within half a spacing of the exact value
        reference.assert_stored(param, exactly(value), f"{name}, upper half")


class _Comparison:
    """The state after one step against float64 from the state before it."""

    def __init__(
        self, problem: Problem, before: State, gradients: list[Tensor | None], turn: int
    ) -> None:
        self.problem, self.case, self.turn = problem, problem.case, turn
        self.before, self.after, self.gradients = before, problem.state(), gradients
        case = self.case
        given = [g for g in gradients if g is not None]
        finite = all(bool(g.isfinite().all()) for g in given)
        found = case.found_inf is not None and problem.of(case.found_inf, turn) != 0
        self.skip = found or (case.max_norm != 0 and not finite)
        self.factor = 1.0 / (case.grad_scale or 1.0)
        self.norm = 0.0
        if case.max_norm != 0 and finite:
            self.norm, clip = reference.clip_coefficient(
                given, case.grad_scale or 1.0, case.max_norm
            )
            self.factor *= clip

    def run(self, plan: StepPlan) -> None:
        assert plan.skipped.item() == float(self.skip), "skipped"
        if self.case.max_norm != 0:
            norm = plan.norm.item()
            assert abs(norm - self.norm) <= 1e-6 * self.norm or (self.skip and norm - norm != 0), (
                f"norm is {norm} instead of {self.norm}"
            )
        assert [float(s) for s in self.problem.steps] == [
            float(s) + self._steps(i) for i, s in enumerate(self.before["steps"])
        ], "step counters"  # type: ignore[arg-type]
        assert [float(s) for s in self.problem.ema_steps] == [
            float(s) + self._steps(i) for i, s in enumerate(self.before["ema_steps"])
        ], "counters of averages"  # type: ignore[arg-type]
        count = len(self.case.sizes)
        for i in range(0, count, 1 + count // 250):  # of very many, some
            if self.case.sizes[i] > 0:
                self._tensor(i)

    def _steps(self, i: int) -> bool:
        return not self.skip and self.gradients[i] is not None

    def _tensor(self, i: int) -> None:
        if not self._steps(i):
            return self._assert_same(
                i, *(name for name in self.before if not name.endswith("steps"))
            )
        stepped = self._exact(i, [self.before[f"value {j}"][i] for j in range(self.case.replicas)])
        self._moments(i, stepped)
        for j, exact in enumerate(stepped.params):
            self._parameter(i, j, exact)
        for n, average in enumerate(self.case.averages):
            t = int(self._before("ema_steps", i)) + 1
            for j in range(self.case.replicas):
                name = f"ema {n} of {j}"
                made = reference.averaged(
                    average, t, self._before(name, i).double(), self._after(f"value {j}", i)
                )
                reference.assert_stored(self._after(name, i), made, f"{name}, tensor {i}")

    def _exact(self, i: int, old: list[Tensor | None]) -> reference.Stepped:
        s = self.problem.settings(self.problem.groups[i], self.turn)
        t = int(self._before("steps", i)) + 1
        gradient = self.gradients[i].double()  # type: ignore[union-attr]
        kept = (self.before[f"value of {name}"][i] for name in self.problem.signed)
        moments = [torch.zeros_like(gradient) if m is None else m.double() for m in kept]
        return reference.step(self.case.rule, s, t, gradient, self.factor, old, moments)

    def _before(self, name: str, i: int) -> Tensor:
        tensor = self.before[name][i]
        assert tensor is not None
        return tensor

    def _after(self, name: str, i: int) -> Tensor:
        tensor = self.after[name][i]
        assert tensor is not None
        return tensor

    def _assert_same(self, i: int, *names: str) -> None:
        for name in names:
            if self.before[name][i] is not None:
                assert torch.equal(_bits(self._before(name, i)), _bits(self._after(name, i))), (
                    f"{name}, tensor {i} has changed"
                )

    def _moments(self, i: int, stepped: reference.Stepped) -> None:
        signs = self.problem.signed.items()
        for j, ((name, signed), exact) in enumerate(zip(signs, stepped.moments, strict=True)):
            if self.after[name][i] is not None:
                moment, scales = self._after(name, i), self.after[f"scales {j}"][i]
                if scales is not None:
                    reference.assert_coded(moment, scales, exact, f"{name} {i}", signed)
                    continue
                stochastic = not signed and self._stochastic(moment)
                reference.assert_stored(moment, exact, f"{name} {i}", stochastic)

    def _parameter(self, i: int, j: int, exact: Bounded) -> None:
        name = f"tensor {i} of replica {j}"
        param, master = self._after(f"param {j}", i), self.after[f"master {j}"][i]
        assert_kept(param, master, exact, name, self._stochastic(param))

    def _stochastic(self, x: Tensor) -> bool:
        return self.case.stochastic is not None and x.dtype == torch.bfloat16
