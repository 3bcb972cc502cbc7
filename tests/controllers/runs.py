"""The run on which every controller is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import hdet
from tests.harness import Run, one_cycle, taught


def run(
    make: Callable[[nn.Module], hdet.Controller | None],
    *,
    together: int = 4,
    constant: bool = False,
    **settings: Any,
) -> Run:
    """Under the controller that ``make(model)`` gives; None: without one."""
    schedule = None if constant else one_cycle(settings.get("lr", 1e-3), settings.get("total", 200))
    defaults = {
        "total": 200, "every": 10, "lr": 1e-3, "optimizer": hdet.FusedAdamW, "data": taught,
        "scheduler": schedule, "closure": True,
    }  # fmt: skip
    return Run(together=together, controller=make, **{**defaults, **settings})
