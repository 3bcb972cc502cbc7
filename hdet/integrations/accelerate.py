"""hdet beside an Accelerator of accelerate."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..ensemble import Ensemble
from ..logging import scalars
from .common import Adapter, require, wants_trial

__all__ = ["Prepared", "prepare"]

accelerate = require("accelerate")
_Losses = Callable[[nn.Module, Any], torch.Tensor]


def prepare(
    accelerator: Any,
    ensemble: Ensemble,
    model: nn.Module | None = None,
    losses: _Losses | None = None,
) -> Prepared:
    """Give the Ensemble for a loop with an Accelerator::

        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        ensemble = hdet.Ensemble(
            optimizer.optimizer, scheduler, total_steps=n, controller=hdet.AutoLR(model)
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
        model: the prepared one; for the trial of an `AutoLR`, as is ``losses``.
        losses: ``losses(model, batch)`` -> the losses of a batch, computed again with a graph,
            shape (examples,) or one number.

    Raises:
        TypeError: no Ensemble; or ``losses`` without a ``model``.
        ValueError: the Accelerator has not prepared the Ensemble's optimizer; float16 with local
            gradients and a prepared scheduler.
    """
    if not isinstance(ensemble, Ensemble):
        raise TypeError(f"ensemble must be an hdet.Ensemble, got {type(ensemble).__name__}")
    # accelerate has no public list of what it has prepared.
    prepared = [of for of in accelerator._optimizers if torch_optimizer(of) is ensemble.optimizer]
    if not prepared:
        raise ValueError(
            "the Accelerator has not prepared the Ensemble's optimizer: call accelerator.prepare "
            "before, and make the Ensemble then"
        )
    if losses is not None and model is None:
        raise TypeError(
            "losses computes the losses of a model: pass prepare(accelerator, ensemble, model, "
            "losses)"
        )
    if wants_trial(ensemble.engine.controller):
        search: Any = ensemble.engine.controller.search  # type: ignore[union-attr]
        search.scaler = search.scaler or accelerator.scaler
        own = search.before_step
        search.before_step = own and partial(call_unscaled, accelerator, own)
    refresh_step(prepared[0])
    return Prepared(accelerator, ensemble, model, losses)


class Prepared(Adapter):
    """An Ensemble that knows its Accelerator; made by `prepare`. What is not here is the
    Ensemble's own.

    ``accelerator.save_state`` averages the replicas and saves the Ensemble, ``load_state`` loads
    it. Cycles and notes go to the Accelerator's trackers and to accelerate's log.
    """

    def __init__(
        self, accelerator: Any, ensemble: Ensemble, model: Any, losses: _Losses | None
    ) -> None:
        super().__init__()
        self.accelerator, self.model, self.losses = accelerator, model, losses
        self._batches: list[Any] = []
        self._is_local = ensemble.sync.gradients == "local" and ensemble.replicas.count > 1
        if (
            self._is_local
            and accelerator.scaler is not None
            and _is_prepared(ensemble.schedule.scheduler)
        ):
            raise ValueError(
                "the scheduler is a prepared one, which stands still where the GradScaler skips a "
                "step, and gradients are 'local', so that it skips them replica by replica: "
                "schedules would drift apart. Give the Ensemble torch's scheduler, which "
                "accelerator.prepare has not had"
            )
        self.ensembles = [ensemble]
        self._user_log = ensemble.log
        self._log = accelerate.logging.get_logger("accelerate.hdet")
        ensemble.tell, ensemble.log = self.tell, self._log_record
        accelerator.register_for_checkpointing(self)
        accelerator.register_save_state_pre_hook(self._before_save)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["ensembles"][0], name)

    def step(
        self,
        loss: torch.Tensor | float,
        batch: Any = None,
        weight: torch.Tensor | float = 1.0,
    ) -> None:
        """Follow ``optimizer.step()``, for each micro-batch: with its loss as it is, undivided. A
        step is counted where the optimizer has made one.

        Raises:
            TypeError: no ``batch``, where ``losses`` was given.
            Also what `Ensemble.step` raises.
        """
        if self.losses is not None and batch is None:
            raise TypeError("losses was given, and has to know of what: call step(loss, batch)")
        self.observe(loss.detach() if isinstance(loss, torch.Tensor) else loss, weight)
        self._batches.append(batch)
        if self.accelerator.sync_gradients:
            batches, self._batches = self._batches, []
            # A scaler may skip the step of one local replica alone: they stay in step only if each
            # counts each.
            if self._is_local or not self.accelerator.optimizer_step_was_skipped:
                can_compute = self.losses is not None
                self.end_step(partial(self.compute_again, batches) if can_compute else None)

    # -- what accelerate does ----------------------------------------------------------------------

    def tell(self, line: str) -> None:
        self._log.info(line, main_process_only=True)

    def compute_loss(self, part: Any) -> torch.Tensor:
        assert self.losses is not None
        steps = self.accelerator.gradient_accumulation_steps
        return self.losses(self.model, part).mean() / steps

    def backward(self, loss: torch.Tensor) -> None:
        scaler = self.accelerator.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def without_sync(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.accelerator.no_sync(self.model)
        return context

    # -- where others look -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See `Ensemble.state_dict`; and on how many processes it was saved."""
        [state] = self.save_states()
        return {**state, "processes": self.accelerator.num_processes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Ensemble.load_state_dict`. Warns where a prepared scheduler has counted the steps
        of another number of processes."""
        self._batches = []
        [ensemble] = self.ensembles
        ensemble.load_state_dict(state)
        before, now = state.get("processes"), self.accelerator.num_processes
        scheduler: Any = ensemble.schedule.scheduler
        if before not in (None, now) and _is_prepared(scheduler) and not scheduler.split_batches:
            warnings.warn(
                f"the checkpoint was saved on {before} processes, and this run has {now}: "
                "accelerate steps a prepared scheduler once for each process, so its schedule "
                f"stands at {before} times the steps done, and ends at another step than planned. "
                "Give the Ensemble torch's scheduler, which accelerator.prepare has not had, in "
                "both runs: it counts steps of the optimizer",
                stacklevel=2,
            )

    def _before_save(self, models: Any, weights: Any, folder: str) -> None:
        # The weights are there already, and are the parameters themselves, which this averages;
        # but for FSDP, of which a copy is written.
        is_fsdp = self.accelerator.distributed_type == accelerate.DistributedType.FSDP
        if is_fsdp and not self.ensembles[0].in_sync:
            raise ValueError(
                "under FSDP weights are written before hdet is asked: call ensemble.converge() "
                "before accelerator.save_state()"
            )
        self.converge()

    def _log_record(self, record: dict[str, Any], step: int) -> None:
        if self.accelerator.trackers:
            self.accelerator.log(scalars(record), step=step)
        if self._user_log is not None:
            self._user_log(record, step)


def _is_prepared(scheduler: object) -> bool:
    return isinstance(scheduler, accelerate.scheduler.AcceleratedScheduler)


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Give the one inside accelerate's wrappers."""
    while isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer = optimizer
    return inner


def call_unscaled(accelerator: Any, call: Callable[[], object]) -> None:
    """Call what may clip gradients that the GradScaler scales no more, as those of an arm:
    accelerate's clipping would unscale them, and has no setting against it."""
    accelerator.unscale_gradients = lambda optimizer=None: None
    try:
        call()
    finally:
        del accelerator.unscale_gradients


def refresh_step(prepared: Any) -> None:
    """Let a prepared optimizer look its ``step`` up again. With a GradScaler it keeps the one that
    it found when it was made, which is not the Ensemble's; it looks again where it is unpickled."""
    if getattr(prepared, "scaler", None) is not None:
        prepared.__setstate__(prepared.__getstate__())
