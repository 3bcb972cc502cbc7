"""How long the adversary tries, and the small things that all machines need.

In CI the examples are few, always the same, and not shrunk. ``HDET_ADVERSARY=50`` tries 50 times as
many, at random, and shrinks what fails; ``HDET_ADVERSARY=1`` shrinks what fails in CI. A failure
prints the rules that led to it and a blob for ``@reproduce_failure``. Trials outlast pytest's
limit: ``pytest --timeout 0 tests/adversary``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from torch.distributed.tensor import DTensor

LONGER = int(os.environ.get("HDET_ADVERSARY", "1"))
SHRINKS = (Phase.shrink,) if "HDET_ADVERSARY" in os.environ else ()


class Boom(Exception):
    """What the user's own code raises."""


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings are not what this is about (one replica that nothing can be compared with; states
    from the middle of a cycle)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trial(examples: int, steps: int = 20) -> settings:
    """``examples`` in CI, of at most ``steps`` rules each where the test is a state machine."""
    return settings(
        max_examples=examples * LONGER, stateful_step_count=steps, derandomize=LONGER == 1,
        database=None, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, *SHRINKS),
    )  # fmt: skip


def bits(value: Any) -> Any:
    """Something that is equal only where every tensor within is, bit for bit (a NaN equals itself);
    of a DTensor this rank's part."""
    if isinstance(value, torch.Tensor):
        own = value.to_local() if isinstance(value, DTensor) else value
        flat = own.detach().cpu().contiguous().view(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return repr(value) if isinstance(value, float) else value


def tree(path: Path) -> Any:
    """All that is there: contents by name, of links where they lead."""
    if path.is_symlink():
        return ("link", os.readlink(path))
    if path.is_dir():
        return {entry.name: tree(entry) for entry in sorted(path.iterdir())}
    return path.read_bytes() if path.exists() else None
