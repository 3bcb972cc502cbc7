"""How long the adversary tries, and the small things that all machines need.

In CI the examples are few, always the same, and not shrunk. ``HDET_ADVERSARY=50`` tries 50 times as many, at random, and shrinks what
fails; ``HDET_ADVERSARY=1`` shrinks what fails in CI. A failure prints the rules that led to it and a blob for ``@reproduce_failure``.
Trials outlast pytest's limit: ``pytest --timeout 0 tests/adversary``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings

LONGER = int(os.environ.get("HDET_ADVERSARY", "1"))
SHRINKS = (Phase.shrink,) if "HDET_ADVERSARY" in os.environ else ()


class Boom(Exception):
    """What the user's own code raises."""


def trial(examples: int, steps: int = 20) -> settings:
    """``examples`` in CI, of at most ``steps`` rules each where the test is a state machine."""
    return settings(
        max_examples=examples * LONGER,
        stateful_step_count=steps,
        derandomize=LONGER == 1,
        database=None,
        deadline=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate, *SHRINKS),
        suppress_health_check=list(HealthCheck),
    )


def bits(value: Any) -> Any:
    """Something that is equal only where every tensor within is, bit for bit (a NaN equals itself)."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return repr(value) if isinstance(value, float) else value
