"""hdet beside an Accelerator of accelerate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from ..ensemble import Ensemble
from ..logging import CycleRecord, scalars
from .common import Adapter, StandIn, require

__all__ = ["Prepared", "prepare"]

accelerate = require("accelerate")
_Losses = Callable[[nn.Module, Any], torch.Tensor]


def prepare(
    accelerator: Any,
    ensemble: Ensemble,
    model: nn.Module | None = None,
    losses_of: _Losses | None = None,
) -> Prepared:
    """Give the Ensemble for a loop with an Accelerator::

        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        ensemble = hdet.Ensemble(
            optimizer.optimizer, scheduler, total_steps=n, search=hdet.AutoLR(model)
        )
        ensemble = hdet.integrations.accelerate.prepare(accelerator, ensemble, model, losses_of)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = losses_of(model, batch).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                ensemble.step(loss, batch)  # in the place of scheduler.step()

    Args:
        accelerator: which has prepared model and optimizer.
        ensemble: of the optimizer inside the prepared one. Its scheduler may be a prepared one,
            which steps as often as accelerate lets it, or torch's, which steps once; with a
            prepared one pass ``total_steps``, the optimizer's.
        model: the prepared one; for the trial of an `AutoLR`, as is ``losses_of``.
        losses_of: ``losses_of(model, batch)`` -> a batch's losses, computed again with a graph,
            shape (examples,) or one number.

    Raises:
        ValueError: the Accelerator has not prepared the Ensemble's optimizer.
    """
    # accelerate has no public list of what it has prepared.
    prepared = [of for of in accelerator._optimizers if torch_optimizer(of) is ensemble.optimizer]
    if not prepared:
        raise ValueError(
            "the Accelerator has not prepared the Ensemble's optimizer: call accelerator.prepare "
            "before, and make the Ensemble then"
        )
    refresh_step(prepared[0])
    return Prepared(accelerator, ensemble, model, losses_of)


class Prepared(Adapter, StandIn):
    """An Ensemble that knows its Accelerator; made by `prepare`. What is not here is the
    Ensemble's own.

    ``accelerator.save_state`` averages the replicas and saves the Ensemble, ``load_state`` loads
    it. Cycles and notes go to the Accelerator's trackers and to accelerate's log.
    """

    def __init__(
        self, accelerator: Any, ensemble: Ensemble, model: Any, losses_of: _Losses | None
    ) -> None:
        log = accelerate.logging.get_logger("accelerate.hdet")
        super().__init__(partial(log.info, main_process_only=True))
        self.accelerator, self.model, self.losses_of = accelerator, model, losses_of
        self.ensembles, self.inner, self.scaler = [ensemble], ensemble, accelerator.scaler
        self.without_sync = partial(accelerator.no_sync, model)
        self._is_local = ensemble.sync.gradients == "local" and ensemble.replicas.count > 1
        if ensemble.search is not None:
            ensemble.search.framework = self
        self._user_log = ensemble.report_to(self.tell, self._log_record)
        accelerator.register_for_checkpointing(self)
        accelerator.register_save_state_pre_hook(self._before_save)

    def step(
        self,
        loss: torch.Tensor | float,
        batch: Any = None,
        weight: torch.Tensor | float = 1.0,
    ) -> None:
        """Follow ``optimizer.step()``, for each micro-batch: with its loss as it is, undivided. A
        step is counted where the optimizer has made one.

        Raises:
            TypeError: no ``batch``, where ``losses_of`` was given.
            Also what `Ensemble.step` raises.
        """
        if self.losses_of is not None:
            if batch is None:
                raise TypeError(
                    "losses_of was given, and has to know of what: call step(loss, batch)"
                )
            self.parts.append(batch)
        self.observe(loss.detach() if isinstance(loss, torch.Tensor) else loss, weight)
        if not self.accelerator.sync_gradients:
            return
        # A scaler may skip the step of one local replica alone: they stay in step only if each
        # counts each.
        if self._is_local or not self.accelerator.optimizer_step_was_skipped:
            self.end_step()
        self.parts = []

    def compute_loss(self, part: Any) -> torch.Tensor:
        assert self.losses_of is not None
        return (
            self.losses_of(self.model, part).mean() / self.accelerator.gradient_accumulation_steps
        )

    def prepare_step(self, own: Callable[[], object] | None) -> None:
        with leave_scaled(self.accelerator):
            super().prepare_step(own)

    # -- where others look -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See `Ensemble.state_dict`."""
        return self.save_states()[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Ensemble.load_state_dict`."""
        self.parts = []
        self.load_states([state])

    def _before_save(self, models: Any, weights: Any, folder: str) -> None:
        # The weights are there already, and are the parameters themselves, which this averages;
        # but for FSDP, of which a copy is written.
        is_fsdp = self.accelerator.distributed_type == accelerate.DistributedType.FSDP
        if is_fsdp and not self.inner.in_sync:
            raise ValueError(
                "under FSDP weights are written before hdet is asked: call ensemble.converge() "
                "before accelerator.save_state()"
            )
        self.converge()

    def _log_record(self, record: CycleRecord, step: int) -> None:
        if self.accelerator.trackers:
            self.accelerator.log(scalars(record), step=step)
        if self._user_log is not None:
            self._user_log(record, step)


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Give the one inside accelerate's wrappers."""
    while isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer = optimizer
    return inner


def leave_scaled(accelerator: Any) -> AbstractContextManager[Any]:
    """Around what may clip gradients that the GradScaler scales no more, as those of an arm:
    accelerate's clipping would unscale them, and has no setting against it."""
    return mock.patch.object(accelerator, "unscale_gradients")


def refresh_step(prepared: Any) -> None:
    """Let a prepared optimizer look its ``step`` up again. With a GradScaler it keeps the one that
    it found when it was made, which is not the Ensemble's; it looks again where it is unpickled."""
    if getattr(prepared, "scaler", None) is not None:
        prepared.__setstate__(prepared.__getstate__())
