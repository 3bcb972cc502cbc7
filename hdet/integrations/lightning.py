"""hdet as a callback of Lightning's Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

from ..converge import average_tensors
from .common import Adapter, StandIn, complete_settings, require

__all__ = ["HdetCallback"]

try:  # the same framework under two names, whose classes are different ones
    pytorch: Any = require("lightning.pytorch")
except ImportError:
    pytorch = require("pytorch_lightning")
_Callback: Any = pytorch.Callback
_signatures: Any = require(f"{pytorch.__name__}.utilities.signature_utils")
_StochasticAverage: Any = pytorch.callbacks.StochasticWeightAveraging
_AVERAGING = (getattr(pytorch.callbacks, "WeightAveraging", _StochasticAverage), _StochasticAverage)
"""Callbacks that keep an average of the weights; the first is new in 2.6."""
_WRITING_RATES = (pytorch.callbacks.BaseFinetuning, _StochasticAverage)
"""Callbacks that write rates when an epoch starts."""


class HdetCallback(Adapter, _Callback):
    """hdet in the loop of Lightning's Trainer::

        trainer = Trainer(callbacks=[HdetCallback(search=hdet.AutoLR)])

    Automatic and manual optimization, one optimizer or several (an Ensemble for each), any
    schedulers, which Lightning goes on to step: a stand-in for each does so inside
    `hdet.Ensemble.rescheduling`. Replicas are averaged before a validation, before a checkpoint
    and when training ends, and so are the averages that callbacks such as EMAWeightAveraging keep.
    The state of the Ensembles is in Lightning's checkpoints. A parameter group that is added in
    mid-run, as by BackboneFinetuning, gets an Ensemble with it, which goes on where the old one
    was. The callback stands before all others, which see what it leaves.

    Args:
        losses_of: ``losses_of(module, batch)`` -> a batch's losses, computed again with a graph,
            shape (examples,) or one number, for an `AutoLR`. None: what ``training_step`` returns;
            its calls of ``log`` have no effect then. Needed under manual optimization, and where
            ``training_step`` changes what is no buffer (a torchmetrics object).
        settings: of the `hdet.Ensemble`, such as ``search``, ``sync``, ``knobs``. ``search``,
            ``controller`` and ``replicas`` may be functions of the module: ``hdet.AutoLR``,
            ``lambda module: hdet.Replicas.from_mesh(module.mesh)``. ``log`` is called on the first
            process only.

    Raises:
        TypeError: a setting that an Ensemble does not have.
        ValueError: when training begins: DeepSpeed or another strategy without replicas; with the
            trial of an AutoLR: several optimizers, manual optimization without ``losses_of``.
    """

    def __init__(
        self, *, losses_of: Callable[[Any, Any], torch.Tensor] | None = None, **settings: Any
    ) -> None:
        super().__init__(pytorch.utilities.rank_zero_info)
        self.losses_of, self.settings = losses_of, complete_settings(settings)
        self._context = ""
        """The name of what is entered: `Adapter.enter`."""
        self._entered, self._taken_over = ExitStack(), ExitStack()
        """That, and what stands in the place of something else."""

    # -- begin and end -----------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stand first: callbacks that average see weights after ours, and copy their average into
        the module when training ends, by which time it is the replicas' mean."""
        others = [callback for callback in trainer.callbacks if callback is not self]
        trainer.callbacks = [self, *others]
        if stage == "fit":
            self.ensembles = []  # of an earlier fit, which would average in the sanity check

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trainer, self.module = trainer, pl_module
        self.owner, self.scaler = pl_module, getattr(trainer.precision_plugin, "scaler", None)
        self.without_sync = getattr(trainer.strategy, "block_backward_sync", nullcontext)
        steps, several = _count_steps(trainer), len(trainer.optimizers)
        if several > 1 and trainer.max_steps > 0:  # Lightning counts the steps of each
            steps = min(steps, -(-trainer.max_steps // several))
        length = {"total_steps": int(steps)} if 0 < steps < float("inf") else {}
        settings = [{**length, **self.settings}] * several
        self.begin(trainer.optimizers, settings, pl_module, logs=trainer.is_global_zero)
        self.parts, self._steps = [], trainer.global_step
        self._take_over()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.converge()
        self._release()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        self._switch("")
        self._taken_over.close()

    # -- in the place of others --------------------------------------------------------------------

    def _take_over(self) -> None:
        # No hook of a callback comes before the weights of a checkpoint are read, and none at all
        # where weights alone are saved.
        self._replace(self.trainer, "save_checkpoint", self._save_converged)
        for callback in self.trainer.callbacks:
            if isinstance(callback, _WRITING_RATES):
                self._replace(callback, "on_train_epoch_start", self._call_rescheduling)
        self._follow_optimizers()

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        replaced = partial(method, getattr(owner, name))
        self._taken_over.enter_context(mock.patch.object(owner, name, replaced))

    def _follow_optimizers(self) -> None:
        """Stand in for their schedulers, and take the groups that somebody adds."""
        for number, ensemble in enumerate(self.ensembles):
            # The Ensemble refuses groups by this name, and takes it back when it is closed.
            optimizer: Any = ensemble.optimizer
            optimizer.add_param_group = partial(self._add_group, number)
            configs = self.trainer.lr_scheduler_configs
            configs = [of for of in configs if of.scheduler.optimizer is ensemble.optimizer]
            for config in configs:
                if not isinstance(config.scheduler, _Rescheduled):
                    stand_in = _Rescheduled(config.scheduler, self, number)
                    self._taken_over.enter_context(mock.patch.object(config, "scheduler", stand_in))
            if configs and (ensemble.search or ensemble.controller):  # which ask for the peak
                ensemble.simulate([(of.scheduler.inner, self._period(of)) for of in configs])

    def _period(self, config: Any) -> int:
        """Of a scheduler, in optimizer steps."""
        batches = self.trainer.num_training_batches
        steps = batches // self.trainer.accumulate_grad_batches if batches < math.inf else 1
        return max(1, int(config.frequency * (steps if config.interval == "epoch" else 1)))

    def _save_converged(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.converge()
        save(*args, **kwargs)

    def _call_rescheduling(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Inside, values are the schedule's own, may be written, and groups may be added."""
        self._switch("rescheduling")
        try:
            call(*args, **kwargs)
        finally:
            self._switch("")
        self._follow_optimizers()  # there may be another scheduler by now

    def _add_group(self, number: int, group: dict[str, Any]) -> None:
        before = self._switch("")
        if before != "rescheduling" and "lr" in group:  # computed from base values, or one itself
            correction = self.ensembles[number].corrections.get("lr", 1.0)
            group = {**group, "lr": group["lr"] / correction}
        self.add_group(number, group)
        self._follow_optimizers()
        self._switch(before)

    def _switch(self, context: str) -> str:
        """Leave what is entered, and enter this, of `Adapter.enter`; "": nothing. Returns what was
        entered."""
        before, self._context = self._context, context
        self._entered.close()
        if context:
            self._entered = self.enter(context)
        return before

    # -- a step ------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0:
            self.parts = []  # of a step not finished, whose gradients Lightning clears here
        self._switch("explore")  # again, where the module's own hook has skipped a batch

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._switch("")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._switch("")
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):  # Lightning has divided it by the accumulation
            self.observe(loss.detach() * trainer.accumulate_grad_batches)
        if batch is not None:
            self.parts.append((batch, batch_idx))
        if trainer.global_step == self._steps:  # it accumulates
            return
        self._steps = trainer.global_step
        self.end_step()
        for name, value in self.metrics().items():
            in_bar = "/corrections/" in name
            pl_module.log(name, value, on_step=True, on_epoch=False, prog_bar=in_bar)

    # -- what Lightning does -----------------------------------------------------------------------

    def find_obstacle(self) -> str | None:
        if self.losses_of is None and not self.module.automatic_optimization:
            return (
                "scores batches, and a training_step that optimizes by hand cannot: pass losses_of="
            )
        return None

    def compute_loss(self, part: tuple[Any, int]) -> torch.Tensor | None:
        trainer, module = self.trainer, self.module
        if self.losses_of is not None:
            with trainer.precision_plugin.train_step_context():
                return self.losses_of(module, part[0]).mean() / trainer.accumulate_grad_batches
        takes_index = _signatures.is_param_in_hook_signature(
            module.training_step, "batch_idx", min_args=2
        )
        with mock.patch.object(module, "log"):
            output = trainer.strategy.training_step(*(part if takes_index else part[:1]))
        loss: torch.Tensor | None = output["loss"] if isinstance(output, Mapping) else output
        return None if loss is None else loss / trainer.accumulate_grad_batches

    def backward(self, loss: torch.Tensor) -> None:
        self.module.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def clip_gradients(self) -> None:
        trainer = self.trainer
        self.module.configure_gradient_clipping(
            trainer.optimizers[0], trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        )

    @torch.no_grad()
    def begin_averages(self) -> None:
        for callback in self._averaging():
            average = callback._average_model
            counted = getattr(average, "n_averaged", getattr(callback, "n_averaged", None))
            buffers = [buffer for buffer in average.buffers() if buffer is not counted]
            now = (*self.module.parameters(), *self.module.buffers())
            for averaged, tensor in zip((*average.parameters(), *buffers), now, strict=False):
                averaged.copy_(tensor)
            if counted is not None:
                counted.zero_()

    def _averaging(self) -> list[Any]:
        # Lightning has no public name for the average
        callbacks = (each for each in self.trainer.callbacks if isinstance(each, _AVERAGING))
        return [each for each in callbacks if each._average_model is not None]

    # -- where others look -------------------------------------------------------------------------

    def converge(self) -> None:
        """See `Adapter.converge`; of averages that other callbacks keep, too."""
        super().converge()
        for ensemble in self.ensembles[:1]:
            explores = any(knob.grid.explores for knob in ensemble.knobs)
            if ensemble.sync.gradients != "local" and not explores:
                continue  # replicas never differ
            for callback in self._averaging():
                module = callback._average_model
                tensors = (*module.parameters(), *module.buffers())
                floats = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
                average_tensors(floats, ensemble.replicas)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.converge()

    def state_dict(self) -> dict[str, Any]:
        return {"ensembles": self.save_states()} if self.ensembles else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved_states = list(state_dict["ensembles"])


class _Rescheduled(StandIn):
    """In the place of a scheduler that Lightning, or a module that optimizes by hand, steps."""

    def __init__(self, inner: Any, callback: HdetCallback, number: int) -> None:
        self.inner, self._callback, self._number = inner, callback, number

    def step(self, *args: Any, **kwargs: Any) -> None:
        with self._callback.ensembles[self._number].rescheduling():
            self.inner.step(*args, **kwargs)


def _count_steps(trainer: Any) -> float:
    """The run's length in optimizer steps; Lightning's own leaves out that accumulation may change
    between epochs."""
    kind = pytorch.callbacks.GradientAccumulationScheduler
    changes = [callback for callback in trainer.callbacks if isinstance(callback, kind)]
    epochs, batches = trainer.max_epochs or 0, trainer.num_training_batches
    if not changes or epochs < 1 or not 0 < batches < math.inf:
        return float(trainer.estimated_stepping_batches)
    parts = (changes[-1].get_accumulate_grad_batches(epoch) for epoch in range(epochs))
    steps = sum(math.ceil(batches / part) for part in parts)
    return float(steps if trainer.max_steps < 0 else min(steps, trainer.max_steps))
