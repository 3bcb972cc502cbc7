"""hdet beside an Accelerator of accelerate."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..ensemble import Ensemble
from ..logging import scalars
from .common import converge, losses_anew, require, states, step, wants_trial

__all__ = ["Prepared", "prepare"]

accelerate = require("accelerate")


def prepare(
    accelerator: Any, ensemble: Ensemble, model: nn.Module | None = None, losses: Callable[[nn.Module, Any], torch.Tensor] | None = None
) -> Prepared:
    """The Ensemble for a loop with an Accelerator::

        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        ensemble = hdet.Ensemble(optimizer.optimizer, scheduler, total_steps=n, controller=hdet.AutoLR(model))
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
        ensemble: of the optimizer inside the prepared one. Its scheduler may be a prepared one, which steps as often as accelerate lets it, or
            torch's, which steps once; with a prepared one pass ``total_steps``, the optimizer's.
        model: the prepared one; for the trial of an `AutoLR`, as is ``losses``.
        losses: ``losses(model, batch)`` -> the losses of a batch anew, with a graph, shape (examples,) or one number.

    Raises:
        TypeError: no Ensemble; or ``losses`` without a ``model``.
        ValueError: the Accelerator has not prepared the Ensemble's optimizer; float16 with local gradients and a prepared scheduler.
    """
    if not isinstance(ensemble, Ensemble):
        raise TypeError(f"ensemble must be an hdet.Ensemble, got {type(ensemble).__name__}")
    own = [prepared for prepared in accelerator._optimizers if torch_optimizer(prepared) is ensemble.optimizer]
    if not own:
        raise ValueError(
            "the Accelerator has not prepared the Ensemble's optimizer: call accelerator.prepare before, and make the Ensemble then"
        )
    if losses is not None and model is None:
        raise TypeError("losses computes the losses of a model: pass prepare(accelerator, ensemble, model, losses)")
    if wants_trial(ensemble.engine.controller):
        search = ensemble.engine.controller.search  # type: ignore[union-attr]
        search.scaler = search.scaler or accelerator.scaler
        search.before_step = search.before_step and partial(unscaled, accelerator, search.before_step)
    look_again(own[0])
    return Prepared(accelerator, ensemble, model, losses)


class Prepared:
    """An Ensemble that knows its Accelerator; made by `prepare`. What is not here is the Ensemble's own.

    ``accelerator.save_state`` averages the replicas and saves the Ensemble, ``load_state`` loads it. Cycles and notes go to the Accelerator's
    trackers and to accelerate's log.
    """

    def __init__(self, accelerator: Any, ensemble: Ensemble, model: Any, losses: Callable[[Any, Any], torch.Tensor] | None) -> None:
        self.accelerator, self.ensemble, self.model, self.losses = accelerator, ensemble, model, losses
        self._batches: list[Any] = []
        self._local = ensemble.sync.gradients == "local" and ensemble.replicas.count > 1
        if (
            self._local
            and accelerator.scaler is not None
            and isinstance(ensemble.schedule.scheduler, accelerate.scheduler.AcceleratedScheduler)
        ):
            raise ValueError(
                "the scheduler is a prepared one, which stands still where the GradScaler skips a step, and gradients are 'local', so that it skips "
                "them replica by replica: schedules would drift apart. Give the Ensemble torch's scheduler, which accelerator.prepare has not had"
            )
        self._user_log = ensemble.log
        ensemble.tell = partial(accelerate.logging.get_logger("accelerate.hdet").info, main_process_only=True)
        ensemble.log = self._log
        accelerator.register_for_checkpointing(self)
        accelerator.register_save_state_pre_hook(self._before_save)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["ensemble"], name)

    def step(self, loss: torch.Tensor | float, batch: Any = None, weight: torch.Tensor | float = 1.0) -> None:
        """After ``optimizer.step()``, for each micro-batch: its loss as it is, undivided. A step is counted where the optimizer has made one.

        Raises:
            TypeError: no ``batch``, where ``losses`` was given.
            Also what `Ensemble.step` raises.
        """
        if self.losses is not None and batch is None:
            raise TypeError("losses was given, and has to know of what: call step(loss, batch)")
        self.ensemble.observe(loss.detach() if isinstance(loss, torch.Tensor) else loss, weight)
        self._batches.append(batch)
        if self.accelerator.sync_gradients:
            batches, self._batches = self._batches, []
            # Of local replicas a scaler may skip one's step alone: they stay in step only if each counts each.
            if self._local or not self.accelerator.optimizer_step_was_skipped:
                step(self.ensemble, closure=None if self.losses is None else partial(self._anew, batches))

    def converge(self) -> None:
        """See `Ensemble.converge`; nothing where replicas are known to be equal."""
        converge([self.ensemble])

    def state_dict(self) -> dict[str, Any]:
        """See `Ensemble.state_dict`; and on how many processes it was saved."""
        [state] = states([self.ensemble])
        return {**state, "processes": self.accelerator.num_processes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Ensemble.load_state_dict`. Warns where a prepared scheduler has counted the steps of another number of processes."""
        self._batches = []
        self.ensemble.load_state_dict(state)
        before, now, scheduler = state.get("processes"), self.accelerator.num_processes, self.ensemble.schedule.scheduler
        if before not in (None, now) and isinstance(scheduler, accelerate.scheduler.AcceleratedScheduler) and not scheduler.split_batches:
            warnings.warn(
                f"the checkpoint was saved on {before} processes, and this run has {now}: accelerate steps a prepared scheduler once for each process, "
                f"so its schedule stands at {before} times the steps done, and ends at another step than planned. Give the Ensemble torch's "
                "scheduler, which accelerator.prepare has not had, in both runs: it counts steps of the optimizer",
                stacklevel=2,
            )

    def _anew(self, batches: list[Any]) -> torch.Tensor | None:
        accelerator, model, losses = self.accelerator, self.model, self.losses
        assert losses is not None
        return losses_anew(
            batches,
            lambda batch: losses(model, batch).mean() / accelerator.gradient_accumulation_steps,
            backward=lambda loss: (loss if accelerator.scaler is None else accelerator.scaler.scale(loss)).backward(),
            no_sync=lambda: accelerator.no_sync(model),
        )

    def _before_save(self, models: Any, weights: Any, folder: str) -> None:
        """The weights are there already, and are the parameters themselves, which this averages; but for FSDP, of which a copy is written."""
        if self.accelerator.distributed_type == accelerate.DistributedType.FSDP and not self.ensemble.in_sync:
            raise ValueError(
                "under FSDP weights are written before hdet is asked: call ensemble.converge() before accelerator.save_state()"
            )
        self.converge()

    def _log(self, record: dict[str, Any], step: int) -> None:
        if self.accelerator.trackers:
            self.accelerator.log(scalars(record), step=step)
        if self._user_log is not None:
            self._user_log(record, step)


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The one inside accelerate's wrappers."""
    while isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    found: torch.optim.Optimizer = optimizer
    return found


def unscaled(accelerator: Any, call: Callable[[], object]) -> None:
    """``call()``, which may clip gradients that the GradScaler scales no more, as those of an arm: accelerate's clipping would unscale them."""
    accelerator.unscale_gradients = lambda optimizer=None: None
    try:
        call()
    finally:
        del accelerator.unscale_gradients


def look_again(prepared: Any) -> None:
    """With a GradScaler a prepared optimizer keeps the ``step`` that it has found when it was made, which is not the Ensemble's. It looks again
    where it is unpickled."""
    if getattr(prepared, "scaler", None) is not None:
        prepared.__setstate__(prepared.__getstate__())
