"""Prints the update rules of hdet/rules in C++ and in Triton, and the classes of their optimizers.

python csrc/generate.py        writes triton_kernels/rules.py, hdet/optim/classes.py and its lines
                               of hdet/__init__.pyi, which are committed;
                               tests/kernels/test_rules.py prints them again and compares
python csrc/generate.py --cpp  prints rules.h, which each build makes for itself
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # of a checkout, and of a source distribution

from hdet.rules import COUPLED, DIGEST, RULES, SCALARS, Rule, StepSettings
from hdet.rules.trace import Scalar, Tensor, parts, walk

MODULE = ROOT / "triton_kernels/rules.py"
CLASSES, STUB = ROOT / "hdet/optim/classes.py", ROOT / "hdet/__init__.pyi"
NOTE = "Printed by csrc/generate.py from hdet/rules: change that, and print again."
FIELDS = [name for name in StepSettings._fields if name != "multipliers"]
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
MOST_MOMENTS = max(len(rule.moments) for rule in RULES.values())
MOST_SUMS = max(len(rule.trace.sums) for rule in RULES.values())


def bare(text: str) -> str:
    """Without the parentheses around all of it."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1] if text.startswith("(") else text


class Language:
    """Expressions; those of operators are in parentheses."""

    scalar_calls: ClassVar[dict[str, str]]
    tensor_calls: ClassVar[dict[str, str]]
    row_format: ClassVar[str]
    """of a scalar that elements meet, by its number"""
    longest = 1000
    """characters of an expression"""

    def __init__(self) -> None:
        self.named: dict[Scalar, str] = {}
        """scalars that have been printed, or are found before"""

    def number(self, x: float) -> str:
        raise NotImplementedError

    def chosen(self, condition: str, a: str, b: str) -> str:
        raise NotImplementedError

    def scalar(self, s: Scalar) -> str:
        """In double."""
        if s.op == "number":
            return self.number(float(s.args[0]))  # type: ignore[arg-type]
        if s.op in ("setting", "step", "rate"):
            return f"h.{s.args[0]}" if s.args else s.op
        if s.op == "elements":
            return "whole.elements"
        if s in self.named:
            return self.named[s]
        args = [self.scalar(arg) for arg in s.args]  # type: ignore[arg-type]
        if s.op == "where":
            compares = isinstance(s.args[0], Scalar) and s.args[0].op == "le"
            return self.chosen(bare(args[0]) if compares else f"{args[0]} != 0", *args[1:])
        if s.op == "le":
            return f"({args[0]} <= {args[1]})"
        if s.op == "power":
            args.append("step")
        return _operation(s.op, args, self.scalar_calls)

    def scalars(self, rule: Rule) -> tuple[dict[str, str], list[str]]:
        """What is long, by its name; and what elements meet."""
        lines: dict[str, str] = {}
        for i, one in enumerate(rule.trace.sums):
            self.named[Scalar("sum", (one,))] = f"whole.sums[{i}]"
        for node in (part for s in rule.trace.scalars for part in parts(s)):
            is_mean = node.args[1:] == (Scalar("elements"),)
            if (node.op in ("exp", "log") or is_mean) and node not in self.named:
                name = f"e{len(lines)}"
                lines[name] = bare(self.scalar(node))
                self.named[node] = name
        return lines, [bare(self.scalar(s)) for s in rule.trace.scalars]

    def statements(self, rule: Rule, results: Sequence[Tensor]) -> tuple[dict[str, str], list[str]]:
        """What is used more than once, or long, by its name; and the results, which have names
        unless they are used once."""
        traced = rule.trace
        nodes = {node for result in results for node in walk(result)}
        used = Counter([*results, *(arg for node in nodes for arg in node.args)])
        names: dict[Tensor, str] = {}
        lines: dict[str, str] = {}

        def text(node: Tensor | Scalar) -> str:
            if isinstance(node, Scalar):
                return self.row_format.format(traced.scalars.index(node))
            if node.op == "input":
                return str(node.args[0])
            if node in names:
                return names[node]
            args = [text(arg) for arg in node.args]  # type: ignore[arg-type]
            if node.op == "where":
                made = self.chosen(f"{args[0]} != 0", *args[1:])
            else:
                made = _operation(node.op, args, self.tensor_calls)
            if used[node] == 1 and len(made) <= self.longest:
                return made
            names[node] = f"t{len(names)}"
            lines[names[node]] = bare(made)
            return names[node]

        return lines, [bare(text(node)) for node in results]


def _operation(op: str, args: list[str], calls: dict[str, str]) -> str:
    if op in INFIX and op not in calls:
        return f"({args[0]} {INFIX[op]} {args[1]})"
    return f"{calls.get(op, op)}({', '.join(map(bare, args))})"


class Cpp(Language):
    scalar_calls: ClassVar = {"sqrt": "square_root", "exp": "exponential", "log": "logarithm"}
    tensor_calls = scalar_calls
    row_format = "s{}"
    of_group = "[[maybe_unused]] const GroupSettings& h, [[maybe_unused]] uint32_t step"
    of_tensor = "[[maybe_unused]] double rate, [[maybe_unused]] const Whole& whole"
    """parameters of what is derived"""

    def number(self, x: float) -> str:
        return repr(x) if math.isfinite(x) else "__builtin_huge_val()"

    def chosen(self, condition: str, a: str, b: str) -> str:
        return f"({condition} ? {a} : {b})"

    def rule(self, rule: Rule) -> str:
        traced = rule.trace
        lines, (u, *moments) = self.statements(rule, (traced.direction, *traced.moments))
        named, scalars = self.scalars(rule)
        facts = {
            "kSquares": not all(rule.signed),
            "kCoupled": rule.coupled,
            "kMayLackMoments": rule.kept_if is not None,
            "kGivesParameter": rule.gives_parameter,
            "kGeneric": rule.generic,
        }
        signed = sum(one << j for j, one in enumerate(rule.signed))
        exact = sum((name in rule.exact) << j for j, name in enumerate(rule.moments))
        note = "  // no kernels of its own" if rule.generic else ""
        return f"""\
struct {_class(rule.name)} {{{note}
  static constexpr int kMoments = {len(moments)}, kSums = {len(traced.sums)};
  static constexpr bool {", ".join(f"{name} = {str(x).lower()}" for name, x in facts.items())};
  HDET_HD constexpr bool is_signed(int moment) {{ return ({signed} >> moment & 1) != 0; }}
  HDET_HD constexpr bool is_exact(int moment) {{ return ({exact} >> moment & 1) != 0; }}

  HDET_HD void derive({self.of_group}, {self.of_tensor}, float* s) {{
{_lines(f"    const double {name} = {text};" for name, text in named.items())}\
{_lines(f"    s[{i}] = static_cast<float>({text});" for i, text in enumerate(scalars))}  }}
  HDET_HD double divisor({self.of_group}) {{ return {bare(self.scalar(traced.divisor))}; }}

{self.elements(rule, "float direction", "", {**lines, "u": u})}\
{_lines(f"    moments[{j}] = {text};" for j, text in enumerate(moments))}\
    return u;
  }}
{self.terms(rule)}}};
"""

    def elements(self, rule: Rule, name: str, more: str, lines: dict[str, str]) -> str:
        """A function of one element, as far as the last of these lines."""
        g, param, *moments = rule.trace.inputs
        taken = f"[[maybe_unused]] float {g}, [[maybe_unused]] float {param}"
        loads = {f"s{i}": f"row.s[{i}]" for i in range(len(rule.trace.scalars))}
        loads |= {name: f"moments[{j}]" for j, name in enumerate(moments)}
        each = {**loads, **lines}.items()
        return f"""\
  template <class Moments>
  HDET_HD {name}(const HyperRow& row, {taken}, const Moments& moments{more}) {{
{_lines(f"    [[maybe_unused]] const float {name} = {text};" for name, text in each)}"""

    def terms(self, rule: Rule) -> str:
        if not rule.trace.sums:
            return ""
        lines, terms = self.statements(rule, rule.trace.sums)
        return f"""
{self.elements(rule, "void terms", ", float* terms", lines)}\
{_lines(f"    terms[{i}] = {text};" for i, text in enumerate(terms))}\
  }}
"""

    def file(self) -> str:
        late = [rule for rule in RULES.values() if rule.first_step > 1]
        numbers = ", ".join(f"{name} = {i}" for i, name in enumerate(RULES))
        scalars, divisor, each = (
            _lines(f"    case Rule::{name}: return {call(_class(name))};" for name in RULES)
            for call in (
                "{}::derive(h, step, rate, whole, s)".format,
                "{}::divisor(h, step)".format,
                "call({}{{}})".format,
            )
        )
        return f"""\
// Printed by csrc/generate.py from hdet/rules, for one build.
//
// Of each rule: how many moments it keeps, which have a sign, which are float32 in any case, and
// whether some, averages of squares, have no sign; whether decay is part of its gradient, whether
// moments may be missing, whether it gives the new parameter in the place of u, and whether it has
// no CUDA kernels of its own; what of the host's settings its elements meet (derive) and what the
// rate is divided by, in double; new moments and the direction u of one element; and of a rule that
// asks for sums over a tensor what is summed (terms). `g` is scaled (HyperRow::gradient_scale); `p`
// is 0 where several replicas share u.
#pragma once

namespace hdet {{

constexpr const char* kRulesDigest = "{DIGEST}";

enum class Rule : int32_t {{ {numbers} }};

// What the host says of a parameter group: StepSettings, which explains it.
struct GroupSettings {{
  double {", ".join(FIELDS)};
}};

// What all replicas of a tensor share, in loads of 16 bytes.
struct alignas(16) HyperRow {{
  float gradient_scale;  // sign, unscaling and clipping in one factor
  uint32_t step;         // from 1; part of the key of random numbers
  float s[{SCALARS}];  // what the rule's elements meet, as its derive() says
}};

// What a pass over a tensor has found before a step.
constexpr int kMostMoments = {MOST_MOMENTS}, kMostSums = {MOST_SUMS};
struct Whole {{
  double elements, sums[kMostSums];
}};

{chr(10).join(map(self.rule, RULES.values()))}
HDET_HD constexpr bool is_coupled(Rule rule) {{
  return {" || ".join(f"rule == Rule::{name}" for name in COUPLED)};
}}

// The first step that changes parameters.
HDET_HD constexpr uint32_t first_step(Rule rule) {{
  return {"".join(f"rule == Rule::{r.name} ? {r.first_step} : " for r in late)}1;
}}

// `rate`: of replica 0.
HDET_HD void derive_scalars(
    Rule rule, const GroupSettings& h, uint32_t step, double rate, const Whole& whole, float* s) {{
  switch (rule) {{
{scalars}  }}
  __builtin_unreachable();
}}

HDET_HD double derive_divisor(Rule rule, const GroupSettings& h, uint32_t step) {{
  switch (rule) {{
{divisor}  }}
  __builtin_unreachable();
}}

// call(a rule's struct)
HDET_HD_OF_CALL
template <class Call>
HDET_HD auto with_rule(Rule rule, const Call& call) {{
  switch (rule) {{
{each}  }}
  __builtin_unreachable();
}}

}}  // namespace hdet
"""


class Triton(Language):
    scalar_calls: ClassVar = {"sqrt": "tl.sqrt"}
    tensor_calls: ClassVar = {"sqrt": "tl.sqrt_rn", "div": "tl.div_rn"}
    row_format = "s[{}]"
    longest = 70

    def number(self, x: float) -> str:
        return f"f64({x!r})" if math.isfinite(x) else 'f64(float("inf"))'

    def chosen(self, condition: str, a: str, b: str) -> str:
        return f"tl.where({bare(condition)}, {bare(a)}, {bare(b)})"

    def rule(self, rule: Rule) -> str:
        named, scalars = self.scalars(rule)
        traced = rule.trace
        terms = f"\n{self.elements(f'{rule.name}_terms', rule, traced.sums)}" if traced.sums else ""
        return f"""\
@triton.jit
def {rule.name}_scalars(h, step, rate, whole, s, live):
{_lines(f"    {name} = {text}" for name, text in named.items())}\
{_lines(map(_put, range(len(scalars)), scalars))}
{self.elements(rule.name, rule, (traced.direction, *traced.moments))}{terms}"""

    def elements(self, name: str, rule: Rule, results: Sequence[Tensor]) -> str:
        """A function of elements."""
        lines, texts = self.statements(rule, results)
        result = f"({texts[0]},)" if len(texts) == 1 else ", ".join(texts)
        if len(result) > 89:
            lines["u"], texts[0] = texts[0], "u"
            result = ", ".join(texts)
        return f"""
@triton.jit
def {name}(row, {", ".join(rule.trace.inputs)}):
    s = row.s
{_lines(_broken(f"    {name} = {text}") for name, text in lines.items())}\
    return {result}
"""

    def branches(self, call: Callable[[Rule], str], rules: Iterable[Rule] = RULES.values()) -> str:
        names: dict[str, list[str]] = {}
        for name, rule in ((rule.name, rule) for rule in rules):
            names.setdefault(call(rule), []).append(f'RULE == "{name}"')

        def test(found: list[str]) -> str:
            line = " or ".join(found)
            return (
                line if len(line) < 88 else "(\n        " + "\n        or ".join(found) + "\n    )"
            )

        branches = (f"if {test(found)}:\n        {text}\n" for text, found in names.items())
        return f'    {"    el".join(branches)}    else:\n        tl.static_assert(False, "no rule")'

    def file(self) -> str:
        def step(rule: Rule, function: str = "") -> str:
            moments = ", ".join(f"moments[{j}]" for j in range(len(rule.moments)))
            return f"result = {rule.name}{function}(row, g, p, {moments})"

        summing = [rule for rule in RULES.values() if rule.trace.sums]

        loads = (f"        tl.load(source + {i}, mask=live, other=0)," for i in range(len(FIELDS)))
        return f'''\
"""The update rules on blocks of elements, with the operations of the C++ in their order.

{NOTE}
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .arithmetic import add_weighted, clip, exp, f64, lerp, log, power, sign

GROUP_SETTINGS = tl.constexpr({len(FIELDS)})
SCALARS = tl.constexpr({SCALARS})
HYPER_ROW = tl.constexpr({2 + SCALARS})
"""numbers of 4 bytes in a row"""


class Whole(NamedTuple):
    """What a pass over a tensor has found before a step, in float64."""

    elements: tl.tensor
    sums: tuple


@triton.jit
def put(x, place, live):
    tl.store(place, x.to(tl.float32), mask=live)


class Settings(NamedTuple):
    """What the host wrote for the groups of some tensors, in float64."""

{_lines(f"    {name}: tl.tensor" for name in FIELDS)}

@triton.jit
def load_settings(source, live):
    """`source`: where the settings of each tensor's group begin."""
    return Settings(
{_lines(loads)}    )


{(2 * chr(10)).join(map(self.rule, RULES.values()))}

@triton.jit
def store_scalars(h, step, rate, whole, s, live, RULE: tl.constexpr):
    """What of the settings a rule's elements meet."""
{self.branches(lambda rule: f"{rule.name}_scalars(h, step, rate, whole, s, live)")}


@triton.jit
def divisor(h, step, RULE: tl.constexpr):
    """What the rate is divided by."""
{self.branches(lambda rule: f"result = {bare(self.scalar(rule.trace.divisor))}")}
    return result


@triton.jit
def direction(row, g, p, moments, RULE: tl.constexpr):
    """u and the new moments. `g` is scaled; `p` is 0 where replicas share u."""
{self.branches(step)}
    return result


@triton.jit
def terms(row, g, p, moments, RULE: tl.constexpr):
    """What a rule asks the sums of."""
{self.branches(lambda rule: step(rule, "_terms"), summing)}
    return result
'''


def _put(place: int, text: str) -> str:
    """Stores a scalar, which has a line of its own if it is long."""
    line = f"    put({text}, s + {place}, live)"
    return line if len(line) <= 100 else f"{_broken(f'    x = {text}')}\n{_put(place, 'x')}"


def _broken(line: str) -> str:
    """As ruff format breaks a long call."""
    call, _, inside = line.partition("(")
    return line if len(line) <= 100 else f"{call}(\n        {inside[:-1]}\n    )"


class Optimizers:
    """The class of each rule: its documentation, and arguments that an editor knows."""

    def argument(self, name: str, default: object) -> str:
        kind = "float | Tensor"
        if isinstance(default, bool):
            kind = "bool"
        elif isinstance(default, int):
            kind = "int"
        elif isinstance(default, tuple):
            kind = f"tuple[{', '.join([kind] * len(default))}]"
        return f"        {name}: {kind} = {default!r},"

    def rule(self, rule: Rule) -> str:
        doc = inspect.cleandoc(rule.function.__doc__ or "")
        names = ", ".join(rule.settings)
        return f'''\
class {rule.optimizer}({rule.base}):
{textwrap.indent(f'"""{doc}', "    ")}
    """

    rule = "{rule.name}"

    def __init__(
        self,
        params: ParamsT,
{_lines(self.argument(*item) for item in rule.settings.items())}\
{"" if rule.coupled else _lines(["        *,", '        decay_at: str = "replica",'])}\
        **options: Unpack[{"Options" if rule.takes is None else "TorchOptions"}],
    ) -> None:
        settings = [{names}]
        super().__init__(params, settings, {"" if rule.coupled else "decay_at=decay_at, "}**options)
'''

    def file(self) -> str:
        alone = [rule for rule in RULES.values() if rule.optimizer]
        rules = sorted(alone, key=lambda rule: str(rule.optimizer))
        return f'''\
"""The fused optimizers that are a rule and nothing else."""

# {NOTE}

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .fused import FusedOptimizer, Options, TorchOptions
from .schedule_free import ScheduleFree

__all__ = [
{_lines(f'    "{rule.optimizer}",' for rule in rules)}]


{(2 * chr(10)).join(map(self.rule, rules))}'''


def _class(rule: str) -> str:
    return f"{rule[0].upper()}{rule[1:]}Rule"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _with_classes(stub: str) -> str:
    """The lines of hdet/__init__.pyi, those of `CLASSES` made anew."""
    line = "from .optim.classes import {0} as {0}\n"
    names = sorted((r.optimizer for r in RULES.values() if r.optimizer), key=str.lower)
    before, *_, after = re.split(r"(?m)^from \.optim\.classes import .*\n", stub)
    return before + "".join(map(line.format, names)) + after


def texts() -> dict[Path, str]:
    stub = _with_classes(STUB.read_text(encoding="utf-8"))
    return {MODULE: Triton().file(), CLASSES: Optimizers().file(), STUB: stub}


if __name__ == "__main__":
    if sys.argv[1:] == ["--cpp"]:
        print(Cpp().file(), end="")
    else:
        for path, text in texts().items():
            path.write_text(text, encoding="utf-8")
