"""The one recommended controller of learning rates: trials beside the run, and a `TrialRule` that decides."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..core.controller import RuledController
from ..core.rules.trial.protocol import HELD_OUT, REPEATS, TRIALS
from ..core.rules.trial.rule import TrialRule
from ..measure.held_out import HeldOut
from ..measure.repeats import Repeats
from ..measure.scoring import Judge
from ..measure.seen import Seen
from ..measure.trials import Trials
from ..measure.weight_line import check_room

__all__ = ["AutoLR"]


class AutoLR(RuledController):
    """Finds out by annealed trials beside the run whether another peak of the learning rate is better for a run of this length, and leaves it
    alone unless it clearly is. Any torch scheduler of known length, any layout with one replica a process::

        ensemble = hdet.Ensemble(optimizer, scheduler, total_steps=n, controller=hdet.AutoLR(model))
        ...
        ensemble.step(loss, closure=lambda: losses_of(model, batch))  # (examples,), with a graph

    Args:
        model: whose losses the closure computes, as the loop calls it (with its DistributedDataParallel, where it has one).
        budget: the part of the run's compute that trials may take; see `TrialRule`.
        judge: ``(loss_fn, batches)``: held-out mini-batches and ``loss_fn(model, batch)`` -> losses, whose mean counts. Then arms are scored by them, and
            so is the run, up to 50 times: where its examples have come again and it overfits, it goes back to its best weights, at a quarter of the rate
            (not with local gradients). Give it where examples are seen many times: new weights always look good on what they were trained on.
        before_step: called between an arm's backward pass and its step, for what the loop does there, such as clipping.
        falls_to: the part of its peak to which the schedule falls in the end: 0 for a cosine to zero, 1 for a constant. None: the scheduler is asked.
            To be given for one that is not torch's, or that is written by hand.
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
        falls_to: float | None = None,
        place: str = "device",
        freeze_after: float | None = None,
    ) -> None:
        check_room(place, None)
        seen = Seen()
        trials = Trials(model, judge, before_step, seen)
        rule = TrialRule(budget, 0 if judge is None else len(judge[1]), freeze_after, falls_to, place)
        super().__init__(rule, {TRIALS: trials, REPEATS: Repeats(trials.modules[0], seen), HELD_OUT: HeldOut(trials)})
        self.rule: TrialRule = rule
        self.judges_held_out = True  # it moves rates alone, of which losses of fresh batches are an honest judge
