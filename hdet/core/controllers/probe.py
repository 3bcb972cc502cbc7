"""Placeholder rule while the measured one is being worked out: the recipe of method.md section 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .protocol import Decision, Evidence, require_keys

__all__ = ["ProbeRule"]


class ProbeRule:
    def __init__(self, step: float = 0.25, freeze_after: float = 0.7) -> None:
        self.step, self.freeze_after = step, freeze_after

    def update(self, evidence: Evidence) -> list[Decision]:
        assert evidence.probes is not None
        usable = [r for r, row in enumerate(evidence.probes) if row is not None]
        out = []
        for rho in evidence.multipliers:
            x = [math.log(rho[r]) for r in usable]
            mean = sum(x) / max(1, len(x))
            x = [v - mean for v in x]
            xx = sum(v * v for v in x)
            if len(usable) < 2 or xx == 0:
                out.append(Decision(note="no move"))
                continue
            rows = [evidence.probes[r] for r in usable]
            slopes = [sum(v * row[c] for v, row in zip(x, rows)) / xx for c in range(len(rows[0]))]  # type: ignore[index,arg-type]
            n = len(slopes)
            slope = sum(slopes) / n
            error = math.sqrt(sum((s - slope) ** 2 for s in slopes) / (n - 1) / n)
            t = slope / error if error else 0.0
            frozen = evidence.progress is not None and evidence.progress > self.freeze_after
            out.append(Decision(factor=1.0 if frozen else math.exp(-self.step * math.tanh(t / 2)), slope=slope, error=error, t=t))
        return out

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(state, (), "ProbeRule's")
