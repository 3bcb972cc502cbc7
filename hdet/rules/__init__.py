"""All update rules: a file each, with one function, found by its place here.

A rule turns the gradient into a direction u, which all replicas share, and new moments. Replica k
then steps, in all rules alike, by its rate r = lr * multipliers[k] (Eq. 2)::

    p = p * (1 - r * weight_decay) - r * u      a rule that does not read p: decoupled decay
    p = p - r * u                               a rule that does: its decay is part of the gradient

After a change: python csrc/generate.py, which prints triton_kernels/rules.py and
hdet/optim/classes.py, and build again, which prints the C++ (rules.h).
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil

from .decorator import RULES, Facts, Kind, Rule, StepSettings, is_signed

__all__ = [
    "COUPLED",
    "DECOUPLED",
    "DIGEST",
    "RULES",
    "SCALARS",
    "WEIGHTS",
    "Facts",
    "Kind",
    "Rule",
    "StepSettings",
    "is_signed",
]

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f".{_file.name}", __name__)

COUPLED = tuple(name for name, rule in RULES.items() if rule.coupled)
DECOUPLED = tuple(name for name, rule in RULES.items() if not rule.coupled)
WEIGHTS = tuple(dict.fromkeys(name for rule in RULES.values() for name in rule.weights))
"""float32 weights that rules keep beside the parameters, as which they begin"""
SCALARS = max(len(rule.trace.scalars) for rule in RULES.values())
SCALARS += -(2 + SCALARS) % 4
"""how many numbers the elements of any rule may meet, so that a row is a multiple of 16 bytes"""
_PRINTED = [
    (
        *(rule.name, rule.kept_if, rule.signed, rule.exact, rule.gives_parameter),
        *(rule.first_step, rule.generic, rule.trace),
    )
    for rule in RULES.values()
]
DIGEST = hashlib.sha256(repr((StepSettings._fields, _PRINTED)).encode()).hexdigest()[:16]
"""of all that is printed for kernels, for a module to say of which rules it was made"""
