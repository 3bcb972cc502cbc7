"""hdet as a callback of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..converge import average_tensors
from .common import Adapter, attributes_kept, check_settings, require

__all__ = ["HdetCallback"]

try:  # the same framework under two names, whose classes are different ones
    pytorch: Any = require("lightning.pytorch")
except ImportError:
    pytorch = require("pytorch_lightning")
_Callback: Any = pytorch.Callback
_signatures: Any = require(f"{pytorch.__name__}.utilities.signature_utils")
_AVERAGING = tuple(
    getattr(pytorch.callbacks, name)
    for name in ("WeightAveraging", "StochasticWeightAveraging")
    if hasattr(pytorch.callbacks, name)  # the first is new in 2.6
)
"""Callbacks that keep an average of the weights."""
_RESCHEDULING = {
    pytorch.callbacks.BaseFinetuning: "finetune_function",
    pytorch.callbacks.StochasticWeightAveraging: "on_train_epoch_start",
}
"""Callbacks that write rates, and the method in which they do."""


class HdetCallback(Adapter, _Callback):
    """Replicas or copies of the run search while Lightning's Trainer trains::

        trainer = Trainer(callbacks=[HdetCallback(controller=hdet.AutoLR)])

    Automatic and manual optimization, one optimizer or several (an Ensemble for each), any
    schedulers, which Lightning goes on to step: a stand-in for each does so inside
    `hdet.Ensemble.rescheduling`. Replicas are averaged before a validation, before a checkpoint
    and when training ends, and so are the averages that callbacks such as EMAWeightAveraging keep.
    The state of the Ensembles is in Lightning's checkpoints. A parameter group that is added in
    mid-run, as by BackboneFinetuning, gets an Ensemble with it, which goes on where the old one
    was.

    Args:
        losses: ``losses(module, batch)`` -> the losses of a batch, computed again with a graph,
            shape (examples,) or one number, for an `AutoLR`. None: what ``training_step`` returns;
            its calls of ``log`` have no effect then. Needed under manual optimization, and where
            ``training_step`` changes what is no buffer (a torchmetrics object).
        settings: of the `hdet.Ensemble`, such as ``sync``, ``knobs``, ``controller``.
            ``controller`` and ``replicas`` may be functions of the module: ``hdet.AutoLR``,
            ``lambda module: hdet.Replicas.from_mesh(module.mesh)``. ``log`` is called on the first
            process only.

    Raises:
        TypeError: a setting that an Ensemble does not have.
        ValueError: when training begins: DeepSpeed or another strategy without replicas; with the
            trial of an AutoLR: several optimizers, manual optimization without ``losses``,
            ReduceLROnPlateau.
    """

    def __init__(
        self, *, losses: Callable[[Any, Any], torch.Tensor] | None = None, **settings: Any
    ) -> None:
        super().__init__()
        check_settings(settings)
        self.losses, self.settings = losses, settings
        self._states: list[Mapping[str, Any]] = []
        self._batches: list[tuple[Any, int]] = []
        self._exploring: ExitStack | None = None
        """Open within a batch."""
        self._rescheduled: ExitStack | None = None
        """Open while another callback writes rates."""
        self._taken_over = ExitStack()
        """Gives back what stands in the place of something else."""

    # -- begin and end -----------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stand before callbacks that average: they see weights after ours, and copy their average
        into the module when training ends, by which time it is the replicas' mean."""
        others = [callback for callback in trainer.callbacks if callback is not self]
        places = [i for i, callback in enumerate(others) if isinstance(callback, _AVERAGING)]
        if places and places[0] < trainer.callbacks.index(self):
            trainer.callbacks = [*others[: places[0]], self, *others[places[0] :]]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if "deepspeed" in type(trainer.strategy).__name__.lower():
            raise ValueError(
                "the strategy is DeepSpeed's, which keeps one copy of the optimizer's state for "
                "all ranks: there are no replicas. Use 'ddp'"
            )
        self.trainer, self.module = trainer, pl_module
        steps = trainer.estimated_stepping_batches
        several = len(trainer.optimizers)
        if several > 1 and trainer.max_steps > 0:  # Lightning counts the steps of each
            steps = min(steps, -(-trainer.max_steps // several))
        length = {"total_steps": int(steps)} if 0 < steps < float("inf") else {}
        self.begin(
            trainer.optimizers,
            [{**length, **self.settings}] * several,
            pl_module,
            logs=trainer.is_global_zero,
            states=self._states,
        )
        self._states, self._batches, self._steps = [], [], trainer.global_step
        self._take_over()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.converge()
        self._release()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        self._end_exploring()
        self._taken_over.close()

    # -- in the place of others --------------------------------------------------------------------

    def _take_over(self) -> None:
        # No hook of a callback comes before the weights of a checkpoint are read, and none at all
        # where weights alone are saved.
        self._replace(self.trainer, "save_checkpoint", self._save_converged)
        for callback in self.trainer.callbacks:
            for kind, name in _RESCHEDULING.items():
                if isinstance(callback, kind):
                    self._replace(callback, name, self._call_rescheduling)
        for number in range(len(self.ensembles)):
            self._catch_groups(number)
        self._stand_in_for_schedulers()

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        inner, own = getattr(owner, name), vars(owner).get(name)
        setattr(owner, name, wraps(inner)(partial(method, inner)))
        if own is None:
            self._taken_over.callback(delattr, owner, name)
        else:
            self._taken_over.callback(setattr, owner, name, own)

    def _save_converged(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.converge()
        save(*args, **kwargs)

    def _call_rescheduling(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Inside, values are the schedule's own, may be written, and groups may be added."""
        with ExitStack() as stack:
            stack.enter_context(self.rescheduling())
            self._rescheduled = stack
            try:
                call(*args, **kwargs)
            finally:
                self._rescheduled = None
        self._stand_in_for_schedulers()  # there may be another one by now

    def _catch_groups(self, number: int) -> None:
        ensemble = self.ensembles[number]
        # The Ensemble refuses groups by this name, and takes it back when it is closed.
        ensemble.optimizer.add_param_group = partial(self._add_group, number)  # type: ignore[method-assign]
        for config in self.trainer.lr_scheduler_configs:
            if config.scheduler.optimizer is ensemble.optimizer:
                inner = getattr(config.scheduler, "hdet_inner", config.scheduler)
                ensemble.schedule.stepped_elsewhere.append(inner)

    def _add_group(self, number: int, group: dict[str, Any]) -> None:
        if self._rescheduled is not None:
            self._rescheduled.close()
        elif "lr" in group:  # computed from base values, or meant as one
            correction = self.ensembles[number].corrections.get("lr", 1.0)
            group = {**group, "lr": group["lr"] / correction}
        was_exploring = self._end_exploring()
        self.add_group(number, group)
        self._catch_groups(number)
        if was_exploring:
            self._begin_exploring()
        if self._rescheduled is not None:
            self._rescheduled.enter_context(self.rescheduling())

    def _stand_in_for_schedulers(self) -> None:
        for config in self.trainer.lr_scheduler_configs:
            for number, ensemble in enumerate(self.ensembles):
                inner = config.scheduler
                if ensemble.optimizer is inner.optimizer and not isinstance(inner, _Rescheduled):
                    config.scheduler = _Rescheduled(inner, self, number)
                    self._taken_over.callback(setattr, config, "scheduler", inner)

    # -- a step ------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end_exploring()  # the module's own hook may have skipped the rest of an epoch
        if pl_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0:
            self._batches = []  # of a step not finished, whose gradients Lightning clears here
        self._begin_exploring()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._end_exploring()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end_exploring()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):  # Lightning has divided it by the accumulation
            self.observe(loss.detach() * trainer.accumulate_grad_batches)
        if batch is not None:
            self._batches.append((batch, batch_idx))
        if trainer.global_step == self._steps:  # it accumulates
            return
        self._steps = trainer.global_step
        batches, self._batches = self._batches, []
        self.end_step(partial(self.compute_again, batches))
        for name, value in self.metrics(with_values=True).items():
            in_bar = "/corrections/" in name
            pl_module.log(name, value, on_step=True, on_epoch=False, prog_bar=in_bar)

    def _begin_exploring(self) -> None:
        self._exploring = ExitStack()
        self._exploring.enter_context(self.explore())

    def _end_exploring(self) -> bool:
        """Returns whether it was explored."""
        exploring, self._exploring = self._exploring, None
        if exploring is not None:
            exploring.close()
        return exploring is not None

    # -- what Lightning does -----------------------------------------------------------------------

    @property
    def scaler(self) -> Any:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def tell(self, line: str) -> None:
        pytorch.utilities.rank_zero_info(line)

    def find_obstacle(self) -> str | None:
        if self.losses is None and not self.module.automatic_optimization:
            return "scores batches, and a training_step that optimizes by hand cannot: pass losses="
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers):
            return (
                "trains copies of the run to the end of their schedule, and ReduceLROnPlateau has "
                "none, but steps by a metric: use a schedule of steps"
            )
        return None

    def compute_again(self, parts: Any) -> torch.Tensor | None:
        with attributes_kept(self.module), _silent(self.module):
            return super().compute_again(parts)

    def compute_loss(self, part: tuple[Any, int]) -> torch.Tensor | None:
        trainer, module, batch = self.trainer, self.module, part[0]
        if self.losses is not None:
            with trainer.precision_plugin.train_step_context():
                return self.losses(module, batch).mean() / trainer.accumulate_grad_batches
        takes_index = _signatures.is_param_in_hook_signature(
            module.training_step, "batch_idx", min_args=2
        )
        output = trainer.strategy.training_step(*(part if takes_index else [batch]))
        loss: torch.Tensor | None = output["loss"] if isinstance(output, Mapping) else output
        return None if loss is None else loss / trainer.accumulate_grad_batches

    def backward(self, loss: torch.Tensor) -> None:
        self.module.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def without_sync(self) -> AbstractContextManager[Any]:
        block: Callable[[], AbstractContextManager[Any]] = getattr(
            self.trainer.strategy, "block_backward_sync", nullcontext
        )
        return block()

    def clip_gradients(self) -> None:
        trainer = self.trainer
        self.module.configure_gradient_clipping(
            trainer.optimizers[0], trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        )

    # -- where others look -------------------------------------------------------------------------

    def converge(self) -> None:
        """See `Adapter.converge`; of averages that other callbacks keep, too."""
        super().converge()
        if not self.ensembles:
            return
        ensemble = self.ensembles[0]
        if any(knob.spread > 0 for knob in ensemble.knobs) or ensemble.sync.gradients == "local":
            for callback in self.trainer.callbacks:
                has_begun = getattr(callback, "n_averaged", 0) is not None
                if isinstance(callback, _AVERAGING) and has_begun:
                    module = callback._average_model  # Lightning has no public name for it
                    tensors = (*module.parameters(), *module.buffers())
                    floats = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
                    average_tensors(floats, ensemble.replicas)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.converge()

    def state_dict(self) -> dict[str, Any]:
        return {"ensembles": self.save_states()} if self.ensembles else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._states = list(state_dict["ensembles"])


class _Rescheduled:
    """In the place of a scheduler that Lightning, or a module that optimizes by hand, steps."""

    def __init__(self, inner: Any, callback: HdetCallback, number: int) -> None:
        self.hdet_inner, self._callback, self._number = inner, callback, number

    def step(self, *args: Any, **kwargs: Any) -> None:
        with self._callback.ensembles[self._number].rescheduling():
            self.hdet_inner.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "hdet_inner":  # while it is copied
            raise AttributeError(name)
        return getattr(self.hdet_inner, name)


@contextmanager
def _silent(module: Any) -> Iterator[None]:
    """Inside, what the module logs goes nowhere."""
    vars(module)["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del vars(module)["log"]
