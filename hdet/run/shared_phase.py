"""Until `Sync.begin` DistributedDataParallel averages the gradients, and from there on nobody."""

from __future__ import annotations

import torch.distributed as dist

from .mistakes import ddp_models
from .setup import Setup

__all__ = ["SharedPhase"]


class SharedPhase:
    """Turns the all-reduce of the run's DistributedDataParallel off, and on again.

    Its `no_sync` does the same, and puts back what it has found, so that a loop or a framework may
    use it to accumulate gradients.
    """

    def __init__(self, run: Setup) -> None:
        self._trained, self._ranks = run.trained, [ranks[0] for ranks in run.replicas.ranks]
        self._is_used, self._is_on = run.replicas.count > 1, True
        self._is_checked = False

    def turn(self, on: bool) -> None:
        """From the next backward pass on."""
        if self._is_used and on != self._is_on:
            self._is_on, self._is_checked = on, False
            for model in ddp_models(self._trained):
                model.require_backward_grad_sync = on

    def check(self) -> None:
        """Before the first step, and the first after a change. Raises ValueError if nothing
        averages the gradients, or goes on with it."""
        if not self._is_used or self._is_checked:
            return
        self._is_checked = True
        models, own = ddp_models(self._trained), {id(p) for p in self._trained}
        groups = [dist.get_process_group_ranks(model.process_group) for model in models]
        held = {id(p) for model in models for p in model.parameters()}
        if not own <= held or any(sorted(ranks) != sorted(self._ranks) for ranks in groups):
            raise ValueError(
                "Sync(begin=...) needs a DistributedDataParallel that averages the gradients of "
                "all parameters over all replicas until then: wrap the model in it"
            )
        if any(model.require_backward_grad_sync != self._is_on for model in models):
            raise ValueError(
                "Sync(begin=...) turns the all-reduce of the model's DistributedDataParallel on "
                f"and off itself, and finds it turned {'off' if self._is_on else 'on'} by others: "
                "call optimizer.step() and ensemble.step() outside of `with model.no_sync():`, "
                "and wrap the model before a state is loaded"
            )

    def end(self) -> None:
        """As it was."""
        self.turn(True)
