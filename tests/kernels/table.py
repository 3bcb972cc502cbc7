"""The one table of cases that every backend must pass, as data: `CASES`, checked by problem.check.

`COVERING`: the factors of a step and their values are listed in `FACTORS`, and combinations are
picked until every two values of any two factors have met in one case, unless `allowed` says that
they cannot. Cases with a name of their own: `NATIVE`, formats that native kernels are compiled for;
`VALUES`, numbers that decide branches of the arithmetic; and `OTHERS`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hdet.kernels import StepSettings
from hdet.kernels.ema import WeightAverage
from hdet.rules import COUPLED, DECOUPLED
from hdet.rules import RULES as ALL_RULES

from .cases import CHUNK, SIZES

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
I16, I8 = torch.int16, torch.int8
U8 = torch.uint8
"""of moments: codes of 8 bits"""


@dataclass(frozen=True)
class Format:
    """How one tensor's streams are stored; None where there is none. exp_avg: every moment with a
    sign; exp_avg_sq: those without."""

    param: torch.dtype = F32
    master: torch.dtype | None = None
    gradient: torch.dtype = F32
    exp_avg: torch.dtype | None = F32
    exp_avg_sq: torch.dtype | None = F32

    def moment(self, signed: bool) -> torch.dtype | None:
        return self.exp_avg if signed else self.exp_avg_sq


SPECIAL_VALUES = (0.5, math.inf, -1.0, -math.inf, math.nan, 1e38, -0.0, -1e20, 1e-30)
"""squares overflow from 1e20 on, sums of moments at 1e38, and float16 holds neither"""
COMBINATIONS = len(SPECIAL_VALUES) ** 2

SETTINGS = StepSettings(  # multipliers are filled in
    0.02, (), 0.9, 0.95, 1e-8, 0.1, momentum=0.9, beta3=0.98, alpha=3.0, average=0.3, gamma=0.2
)


@dataclass(frozen=True)
class Case:
    """Steps on one set of tensors.

    Tensor i has formats[i % len] and group i % groups; a sequence of a step goes on with its last
    entry.
    """

    name: str
    rule: str = "adamw"
    sizes: tuple[int, ...] = (37,)
    formats: tuple[Format, ...] = (Format(),)
    replicas: int = 1
    groups: int = 1
    shifts: tuple[int, ...] = (
        0,
    )  # elements past a 64-byte boundary: gradient, moments, then sets in turn
    settings: StepSettings = SETTINGS
    max_norm: float = 0.0
    grad_scale: float | None = None
    found_inf: tuple[float, ...] | None = None  # of each step
    zero_gradients: bool = False
    stochastic: int | None = None
    spoiled: tuple[int, ...] = ()  # steps with a gradient that holds NaN
    special: tuple[
        str, ...
    ] = ()  # "param", "gradient": what begins with every combination of SPECIAL_VALUES
    changing: bool = False  # gradients have other dtypes and other addresses in each step
    coming: bool = False  # gradients come and go: in each step other tensors have none
    averages: tuple[WeightAverage, ...] = ()
    steps: int = 2

    def format(self, i: int) -> Format:
        return self.formats[i % len(self.formats)]


NO_DECAY = SETTINGS._replace(weight_decay=0.0)


def _variants(name: str) -> dict[str, StepSettings]:
    """Settings of a rule, by what it has."""
    rule, found = ALL_RULES[name], {name: SETTINGS}
    if rule.kept_if is not None:
        found[f"{name}, plain"] = SETTINGS._replace(**{rule.kept_if: 0.0})
    if "dampening" in rule.keys:
        found[f"{name}, dampened"] = SETTINGS._replace(dampening=0.3, maximize=True)
    if "nesterov" in repr(rule.trace):
        found[f"{name}, nesterov"] = SETTINGS._replace(nesterov=True)
    if "t_beta3" in rule.keys:
        found[f"{name}, warming"] = SETTINGS._replace(t_alpha=11, t_beta3=2, maximize=True)
    if name == DECOUPLED[0]:  # the step decays, not the rule
        found[f"{name}, cautious"] = SETTINGS._replace(cautious_decay=True)
        found[f"{name}, at base"] = SETTINGS._replace(decay_at_base=True, maximize=True)
    return found


RULES: dict[str, dict[str, Any]] = {
    name: {"rule": rule, "settings": settings}
    for rule in ALL_RULES
    for name, settings in _variants(rule).items()
}


def keeps_moments(name: str) -> bool:
    """Of a row of RULES."""
    return ALL_RULES[RULES[name]["rule"]].keeps_moments(RULES[name]["settings"]._asdict())


def _kind(name: str) -> tuple[object, ...]:
    """What a step has to know of a rule: all but its arithmetic."""
    rule, settings = ALL_RULES[RULES[name]["rule"]], RULES[name]["settings"]
    return (
        rule.signed, rule.coupled,
        rule.gives_parameter, keeps_moments(name), rule.kept_if, settings.cautious_decay,
        rule.first_step, len(rule.trace.sums),
    )  # fmt: skip


STORAGE: dict[str, tuple[tuple[torch.dtype, torch.dtype | None], ...]] = {
    "f32": ((F32, None),),
    "bf16": ((BF16, None),),
    "bf16+f32": ((BF16, F32),),
    "split": ((BF16, I16),),
    "split24": ((BF16, I8),),
    "f16": ((F16, None),),
    "f16+f32": ((F16, F32),),
    "mixed": ((F32, None), (BF16, I16), (F16, F32), (BF16, None), (BF16, F32), (BF16, I8)),
}
GRADIENTS: dict[str, tuple[torch.dtype, ...]] = {
    "f32": (F32,),
    "bf16": (BF16,),
    "f16": (F16,),
    "mixed": (BF16, F32, F16),
    "changing": (F32, BF16),
    "coming": (F32, BF16),
}
MOMENTS: dict[str, tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]] = {
    "f32": ((F32,), (F32,)),
    "bf16": ((BF16,), (BF16,)),
    "bf16 second": ((F32,), (BF16,)),
    "mixed": ((BF16, F32), (F32, F32, BF16)),
    "8 bits": ((U8,), (U8,)),
    "some 8 bits": ((U8, F32), (U8, BF16)),
}
AVERAGES = {
    "none": (),
    "one": (WeightAverage(0.9, warm_up=False),),
    "several": (
        WeightAverage(0.3),
        WeightAverage(decay=None, every=2),
        WeightAverage(decay=None, power=6.94, begin=2),
    ),
}
"""over time"""
LATE_AVERAGES = (WeightAverage(0.9, warm_up=False), WeightAverage(0.95, warm_up=False))
"""whose weights soon are below a half"""
# One row for each kind. Those of one kind differ in arithmetic alone, which meets every special
# value below; what a step does around it meets every format, size and option with one of each kind.
KINDS: dict[str, dict[str, Any]] = {}
for _name, _row in RULES.items():
    if _kind(_name) not in map(_kind, KINDS):
        KINDS[_name] = _row
FACTORS: dict[str, tuple[Any, ...]] = {
    "rule": tuple(KINDS),
    "storage": tuple(STORAGE),
    "gradient": tuple(GRADIENTS),
    "moments": tuple(MOMENTS),
    "replicas": (1, 2, 3, 8, 9),
    "norm": (0.0, 1.0, math.inf, "with NaN"),
    "scale": (None, 1024.0),
    "found_inf": (None, (0.0,), (1.0, 0.0), (0.0, 1.0)),
    "zero": (False, True),
    "stochastic": (None, 2**63 + 12345),
    "groups": (1, 2),
    "averages": tuple(AVERAGES),
    "sizes": (
        "one",
        "vector edges",
        "block edges",
        "chunk edges",
        "empty first",
        "empty last",
        "empty between",
    ),
    "shifts": ((0,), (1,), (0, 1, 2, 3, 4, 5)),
}


Pair = frozenset[tuple[str, Any]]


def allowed(choice: dict[str, Any]) -> bool:
    """What cannot meet: it would be the same case twice."""
    return not (
        choice.get("sizes") == "one" and (choice.get("groups", 1) > 1 or "mixed" in choice.values())
    )


def covering() -> list[dict[str, Any]]:
    """Combinations of the factors in which all allowed pairs of values meet: around pairs that are
    missing, of some the one with most of them."""
    rng, chosen = random.Random(0), []
    values = ([(name, value) for value in FACTORS[name]] for name in FACTORS)
    products = itertools.starmap(itertools.product, itertools.combinations(values, 2))
    pairs = itertools.chain(*products)
    missing = {frozenset(pair): None for pair in pairs if allowed(dict(pair))}

    def completed(pair: Pair) -> dict[str, Any]:
        choice = dict(pair)
        for name in rng.sample(list(FACTORS), len(FACTORS)):
            options = [{name: x, **choice} for x in FACTORS[name] if allowed({name: x, **choice})]
            gains = [sum(new in missing for new in met(option, [name])) for option in options]
            choice = options[max(range(len(options)), key=lambda i: (gains[i], rng.random()))]
        return choice

    while missing:
        tried = [completed(rng.choice(list(missing))) for _ in range(10)]
        chosen.append(max(tried, key=lambda choice: len(missing.keys() & met(choice))))
        for pair in met(chosen[-1]):
            missing.pop(pair, None)
    return chosen


def met(choice: dict[str, Any], names: Iterable[str] = FACTORS) -> set[Pair]:
    """The pairs of a combination with those factors in them."""
    return {
        frozenset([(name, choice[name]), item])
        for name in names
        for item in choice.items()
        if item[0] != name
    }


def _formats(choice: dict[str, Any]) -> tuple[Format, ...]:
    first, second = MOMENTS[choice["moments"]]
    columns = [STORAGE[choice["storage"]], GRADIENTS[choice["gradient"]], first, second]
    formats = []
    for (param, master), gradient, m, v in itertools.islice(
        zip(*map(itertools.cycle, columns), strict=False), 12
    ):
        formats.append(
            Format(param, master, gradient, m if keeps_moments(choice["rule"]) else None, v)
        )
    return tuple(formats)


def _case(number: int, choice: dict[str, Any]) -> Case:
    alone = ALL_RULES[RULES[choice["rule"]]["rule"]].gives_parameter
    replicas = 1 if alone else choice["replicas"]
    words = [str(choice[name]) for name in ("rule", "storage", "gradient", "replicas", "sizes")]
    case = Case(
        name=f"{number}: {' '.join(words)}",
        sizes=tuple(SIZES[choice["sizes"]]),
        formats=_formats(choice),
        replicas=replicas,
        groups=choice["groups"],
        shifts=choice["shifts"],
        max_norm=1.0 if choice["norm"] == "with NaN" else choice["norm"],
        grad_scale=choice["scale"],
        found_inf=choice["found_inf"],
        averages=AVERAGES[choice["averages"]],
        zero_gradients=choice["zero"],
        stochastic=choice["stochastic"],
        spoiled=(1,) if choice["norm"] == "with NaN" else (),
        changing=choice["gradient"] == "changing",
        coming=choice["gradient"] == "coming",
        steps=3,
    )
    return replace(case, **without_decay(RULES[choice["rule"]], replicas))


def without_decay(row: dict[str, Any], replicas: int) -> dict[str, Any]:
    """A row of RULES; several replicas share moments, of which decay must not be part."""
    coupled = row["rule"] in COUPLED and replicas > 1
    return {**row, "settings": row["settings"]._replace(weight_decay=0.0)} if coupled else row


BOTH = ("param", "gradient")
_LOW = Format(BF16, None, BF16, BF16, BF16)
_CODED = Format(exp_avg=U8, exp_avg_sq=U8)
_UNUSUAL: dict[str, dict[str, Any]] = {
    "lr 0": {"lr": 0.0},
    "beta1 0": {"beta1": 0.0},
    "beta2 0": {"beta1": 0.6, "beta2": 0.0},
    "beta1 small": {"beta1": 0.2},
    "eps large": {"eps": 0.5},
    "no decay": {"weight_decay": 0.0},
}
# Those of one replica have a loop of their own on a CPU, those of several are stepped in batches;
# bare rules have momentum in some tensors alone.
NATIVE = [
    *(
        Case(f"all float {name}", sizes=(CHUNK + 2055, 3), steps=3, **choice)
        for name, choice in RULES.items()
    ),
    *(
        Case(
            f"all float {name}, {count} averages",
            sizes=(CHUNK + 2055, 3), averages=LATE_AVERAGES[:count], steps=3, **choice,
        )
        for name, choice in RULES.items()
        for count in (1, 2)
    ),
    *(
        Case(
            f"all float {rule}, {k} replicas",
            sizes=(2049, 37), replicas=k, rule=rule, settings=NO_DECAY,
        )
        for rule in ALL_RULES
        for k in ((2, 4, 8, 11) if rule == "adamw" else (4,))
    ),
    *(
        Case(
            f"{storage}, {name}, {k} replicas",
            sizes=(4097, 37),
            formats=tuple(
                Format(*STORAGE[storage][0], BF16, m)
                for m in ((F32,) if keeps_moments(name) else (F32, None))
            ),
            replicas=k,
            shifts=(0, 1, 4),
            stochastic=9 if k == 1 else None,
            **without_decay(choice, k),
        )
        for storage in ("bf16+f32", "split")
        for name, choice in KINDS.items()
        for k in (1, 5)
    ),
    *(
        Case(
            f"bfloat16 throughout, {name}",
            sizes=(4097, 37), formats=(_LOW,), stochastic=5, **choice,
        )
        for name, choice in KINDS.items()
        if keeps_moments(name)
    ),
    *(
        Case(
            f"8 bits {name}, {storage}",
            sizes=(513, 7),
            formats=(Format(*STORAGE[storage][0], BF16, U8, U8),), shifts=(0, 4), **choice,
        )
        for name, choice in KINDS.items()
        for storage in ("bf16+f32", "split", "split24", "f16")
        if keeps_moments(name)
    ),
]  # fmt: skip
VALUES = [
    *(
        Case(f"{rule} {name}", rule=rule, settings=SETTINGS._replace(**change))
        for rule in DECOUPLED
        for name, change in _UNUSUAL.items()
    ),
    *(
        Case(f"special {name}", sizes=(COMBINATIONS, 5), special=BOTH, steps=3, **choice)
        for name, choice in RULES.items()
    ),
    *(
        Case(
            f"special {rule}, no decay, averaged",
            rule, (COMBINATIONS, 5), special=BOTH, settings=NO_DECAY, steps=3,
            averages=AVERAGES["several"],
        )
        for rule in ALL_RULES
    ),
    *(
        Case(
            f"special {name}, 8 bits",
            sizes=(COMBINATIONS, 600), formats=(_CODED,), special=BOTH, steps=3, **choice,
        )
        for name, choice in KINDS.items()
        if keeps_moments(name)
    ),
    *(
        Case(
            f"special {name}, {k} replicas, mixed",
            sizes=(COMBINATIONS,) * 5,
            formats=tuple(
                Format(*kinds, F32, BF16 if keeps_moments(name) else None, BF16)
                for kinds in STORAGE["mixed"]
            ),
            special=BOTH,
            replicas=k,
            stochastic=3,
            steps=3,
            **without_decay(choice, 2),
        )
        for name, choice in KINDS.items()
        # the first of three is stepped as one alone
        for k in ((1,) if ALL_RULES[choice["rule"]].gives_parameter else (3,))
    ),
    *(
        Case(f"special parameters {name}, clipped", sizes=(50, 60), special=("param",),
             max_norm=1.0, rule=name, settings=NO_DECAY)
        for name in ALL_RULES
    ),
]  # fmt: skip
OTHERS = [
    Case("only empty", sizes=(0, 0), max_norm=1.0, zero_gradients=True, found_inf=(0.0,)),
    Case("only empty, mixed", sizes=(0, 0, 0), formats=(Format(), _LOW), groups=2, stochastic=1),
    # more than a block of the derive phase has threads
    Case(
        "2 000 tiny, mixed",
        sizes=tuple(1 + i % 5 for i in range(2_000)),
        formats=(Format(), _LOW, Format(F16, F32, F16)),
        groups=3, max_norm=2.0, steps=1,
    ),
    Case("an empty group", sizes=(5, 0, 9, 0, 3, 0), groups=2),
    Case(
        "three groups at different counts", sizes=(5, 6, 7, CHUNK + 1, 9, 10, 11), groups=3, steps=3
    ),
    Case("stochastic", "adamw", (3, CHUNK + 7, 5), (_LOW,), shifts=(0, 1), stochastic=7, steps=3),
    Case(
        "stochastic, large seed, 3 replicas",
        "adamw", (3, 1001), (_LOW,), replicas=3, stochastic=2**64 - 1, steps=3,
    ),
    Case("gradients that come and go", sizes=(50, 0, CHUNK + 60, 7, 8), coming=True, steps=4),
    *(
        Case(
            f"8 bits {name}, {k} replicas",
            sizes=(1, 255, 256, 257, 1024, CHUNK + 300, 0, 513),
            formats=(_CODED,), replicas=k, shifts=(0, 4), **without_decay(choice, k),
        )
        for name, choice in KINDS.items()
        for k in (1, 3)
        if keeps_moments(name)
    ),
    Case("clipped by little", sizes=(50, 60), max_norm=10.6),
    Case("not clipped", sizes=(50, 60), max_norm=1e4),
    Case("skipped from the first step", sizes=(50, 60), spoiled=(0,), max_norm=math.inf),
]  # fmt: skip
COVERING = [_case(i, choice) for i, choice in enumerate(covering())]
NATIVE, OTHERS = (
    [case for case in of if case.replicas == 1 or not ALL_RULES[case.rule].gives_parameter]
    for of in (NATIVE, OTHERS)
)
CASES = [*COVERING, *NATIVE, *VALUES, *OTHERS]
