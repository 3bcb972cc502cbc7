"""The weight line: losses of the training batch at multipliers that no replica has, from which a `LineRule` decides."""

from __future__ import annotations

import torch
from torch import nn

from ..core.controller import Learning, RuledController, learning_of
from ..core.evidence import Evidence, Run
from ..core.plan import Decision, Learned, SnapshotOf
from ..core.rules import LINE, LineRule
from ..measure.line_losses import LineLosses

__all__ = ["LineController"]


class LineController(RuledController):
    """Sweeps the rate upwards once until training breaks, restores the beginning, goes on at the rate that follows, and searches the line twice
    more. No probe data, no spread, any layout, one replica included.

    Losses at multipliers that no replica has come from the weight line through the interval's beginning (`LineLosses`). There is no spread
    meanwhile. Unless another controller follows it needs shared gradients, and learning rates as the only knobs, which are swept together.

    **The first 5 to 9 % of the run are a search** (at most 160 steps), after which weights, the model's buffers and the moments are restored.

    Args:
        model, place: see `LineLosses`; ``place`` is also that of the snapshot of the beginning.
        rule: turns losses into decisions; see `LineRule` for its settings, and for the intervals.
        dtype: of snapshot and mean; None: float32, or the parameters' own if that is wider. torch.bfloat16 halves them, but rounds the
            weights that are restored, and needs a copy of the weights while points are scored.
        freeze_after: see `Controller`; a sweep that is under way then ends without a result. Of a rule of your own it is the rule's.
        late: search the line twice more after the sweep? Say False where another controller follows, as in
            ``SequentialController(LineController(model, late=False), ProbeController(...))``, which need not start from a rate that is far off.

    The mean of the closure's losses is what ``step`` is given. The closure is called 20 to 30 times in a run, once in the first step: 0.7 to
    1.8 % of 600 to 1 000 steps, less of longer ones. Memory: two copies of the parameters until the last search.

    Needs the run's length, cycles of at most 10 % of it and ``warmup_steps=0``. A checkpoint holds what has been learned; a sweep or an
    interval that was under way begins anew at the resumed step. docs/choosing.md has the measurements.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        rule: LineRule | None = None,
        place: str = "device",
        dtype: torch.dtype | None = None,
        freeze_after: float | None = None,
        late: bool = True,
    ) -> None:
        if rule is not None and not isinstance(rule, LineRule):
            raise TypeError(f"rule must be a LineRule, got {type(rule).__name__}")
        if rule is not None and freeze_after is not None:
            raise ValueError(f"freeze_after is {freeze_after!r}, but a rule is given: pass it to the rule, LineRule(freeze_after=...)")
        if rule is not None and not late:
            raise ValueError("late is False, but a rule is given: pass it to the rule, LineRule(late=False)")
        self.losses = LineLosses(model, place, dtype)
        rule = LineRule(freeze_after=freeze_after, late=late) if rule is None else rule
        rule.snapshot = SnapshotOf(place=place, dtype=None if dtype is None else str(dtype).removeprefix("torch."))
        super().__init__(rule, {LINE: self.losses})
        self.judges_held_out = True  # it moves rates alone, of which training losses are an honest judge
        self._rates: list[int] = []

    def start(self, run: Run) -> None:
        super().start(run)
        self._rates = [k for k, knob in enumerate(run.knobs) if knob.rate]

    def learn(self, evidence: Evidence) -> Learning:
        """Of the rule, which knows of rates alone."""
        learned = yield from learning_of(self.rule, evidence.only(self._rates))
        decisions = [Decision() for _ in evidence.knobs]
        for k, decision in zip(self._rates, learned.decisions, strict=True):
            decisions[k] = decision
        return Learned(decisions, learned.end)
