"""The one recommended controller of learning rates: trials beside the run, and a `TrialRule` that decides."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from ..core.controller import Learning, RuledController
from ..core.evidence import Evidence, Run
from ..core.rules.trial_rule import TRIALS, TrialRule
from ..measure.trials import Judge, Trials

__all__ = ["AutoLR"]

_LOG = logging.getLogger("hdet")


class AutoLR(RuledController):
    """Finds out by annealed trials beside the run whether another peak of the learning rate is better for a run of this length, and leaves it
    alone unless it clearly is. Any torch scheduler of known length, any layout with one replica a process::

        ensemble = hdet.Ensemble(optimizer, scheduler, total_steps=n, controller=hdet.AutoLR(model))
        ...
        ensemble.step(loss, closure=lambda: losses_of(model, batch))  # (examples,), with a graph

    Args:
        model: whose losses the closure computes, as the loop calls it (with its DistributedDataParallel, where it has one).
        budget: the part of the run's compute that trials may take; see `TrialRule`.
        judge: ``(loss_fn, batches)``: held-out mini-batches and ``loss_fn(model, batch)`` -> scalar tensor. Then arms are scored by them. Give it
            where examples are seen many times: new weights always look good on what they were trained on.
        before_step: called between an arm's backward pass and its step, for what the loop does there, such as clipping.
        place: "device" or "host": where the arms live, each a copy of all that is trained (of the parameters, masters, moments and buffers).
        freeze_after: see `Controller`.

    The rates of all groups move together; other knobs stay. Where nothing is changed the run is bit for bit the one without it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: float = 0.03,
        judge: Judge | None = None,
        before_step: Callable[[], object] | None = None,
        place: str = "device",
        freeze_after: float | None = None,
    ) -> None:
        trials = Trials(model, judge, before_step, place)
        rule = TrialRule(budget, trials.snapshots, judged=0 if judge is None else len(judge[1]), freeze_after=freeze_after)
        super().__init__(rule, {TRIALS: trials})
        self.rule: TrialRule = rule
        self.judges_held_out = True  # it moves rates alone, of which losses of fresh batches are an honest judge
        self._told = False

    def report(self) -> str:
        """In a sentence: before the run what it is going to do, and when; then what it has found. It goes to the logger "hdet", too; a run
        that is too short for trials as a warning."""
        return self.rule.report()

    def start(self, run: Run) -> None:
        super().start(run)
        # Whoever logs no INFO would wait for trials that never come.
        _LOG.log(logging.INFO if self.rule.rounds else logging.WARNING, "AutoLR: %s", self.report())
        self._told = not self.rule.rounds

    def learn(self, evidence: Evidence) -> Learning:
        learned = super().learn(evidence)
        if self.idle and not self._told:
            _LOG.info("AutoLR: %s", self.report())
            self._told = True
        return learned
