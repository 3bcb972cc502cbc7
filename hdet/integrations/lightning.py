"""hdet as a callback of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..ensemble import Ensemble
from .common import attributes_kept, check_settings, converge, inside, losses_anew, make, numbers, require, states, step

__all__ = ["HdetCallback"]

try:  # the same framework under two names, whose classes are different ones
    pytorch: Any = require("lightning.pytorch")
except ImportError:
    pytorch = require("pytorch_lightning")
_Callback: Any = pytorch.Callback


class HdetCallback(_Callback):
    """Replicas or copies of the run search while Lightning's Trainer trains::

        trainer = Trainer(callbacks=[HdetCallback(controller=hdet.AutoLR)])

    Automatic and manual optimization, one optimizer or several (an Ensemble for each), any schedulers, which Lightning goes on to step: a stand-in
    for each does so inside `hdet.Ensemble.rescheduling`. Replicas are
    averaged before a validation, before a checkpoint and when training ends. The state of the Ensembles is in Lightning's checkpoints.

    Args:
        losses: ``losses(module, batch)`` -> the losses of a batch anew, with a graph, shape (examples,) or one number, for an `AutoLR`. None: what
            ``training_step`` returns; its calls of ``log`` have no effect then. Needed under manual optimization, and where ``training_step``
            changes what is no buffer (a torchmetrics object).
        settings: of the `hdet.Ensemble`, such as ``sync``, ``knobs``, ``controller``. ``controller`` and ``replicas`` may be functions of the module:
            ``hdet.AutoLR``, ``lambda module: hdet.Replicas.from_mesh(module.mesh)``. ``log`` is called on the first
            process only.

    Raises:
        TypeError: a setting that an Ensemble does not have.
        ValueError: when training begins: DeepSpeed or another strategy without replicas; with the trial of an AutoLR: several optimizers, manual
            optimization without ``losses``, ReduceLROnPlateau.
    """

    def __init__(self, *, losses: Callable[[Any, Any], torch.Tensor] | None = None, **settings: Any) -> None:
        check_settings(settings)
        self.losses, self.settings = losses, settings
        self.ensembles: list[Ensemble] = []
        """One for each optimizer, once training has begun."""
        self._states: list[Mapping[str, Any]] = []
        self._batches: list[tuple[Any, int]] = []
        self._exploring = ExitStack()
        self._saves: tuple[Any, Any] | None = None
        self._schedulers: list[Any] = []

    @property
    def ensemble(self) -> Ensemble | None:
        """The first optimizer's; None before training begins."""
        return self.ensembles[0] if self.ensembles else None

    # -- begin and end -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if "deepspeed" in type(trainer.strategy).__name__.lower():
            raise ValueError(
                "the strategy is DeepSpeed's, which keeps one copy of the optimizer's state for all ranks: there are no replicas. Use 'ddp'"
            )
        steps = trainer.estimated_stepping_batches
        several = len(trainer.optimizers)
        if several > 1 and trainer.max_steps > 0:  # Lightning counts the steps of each
            steps = min(steps, -(-trainer.max_steps // several))
        length = {"total_steps": int(steps)} if 0 < steps < float("inf") else {}
        self.ensembles = make(
            trainer.optimizers,
            [{**length, **self.settings}] * several,
            pl_module,
            tell=pytorch.utilities.rank_zero_info,
            first=trainer.is_global_zero,
            states=self._states,
            no_copies={
                "scores batches, and a training_step that optimizes by hand cannot: pass losses=": self.losses is None
                and not pl_module.automatic_optimization,
                "trains copies of the run to the end of their schedule, and ReduceLROnPlateau has none, but steps by a metric: use a schedule of "
                "steps": any(isinstance(config.scheduler, ReduceLROnPlateau) for config in trainer.lr_scheduler_configs),
            },
            clip=lambda: pl_module.configure_gradient_clipping(
                trainer.optimizers[0], trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            ),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
        )
        self._states, self._batches, self._steps = [], [], trainer.global_step
        for config in trainer.lr_scheduler_configs:
            for ensemble in self.ensembles:
                if ensemble.optimizer is config.scheduler.optimizer:
                    ensemble.schedule.stepped_elsewhere.append(config.scheduler)
                    config.scheduler = _Rescheduled(config.scheduler, ensemble)
        self._schedulers = trainer.lr_scheduler_configs
        self._converge_before_saves(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        converge(self.ensembles)
        self._release()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        self._exploring.close()
        for config in self._schedulers:
            config.scheduler = getattr(config.scheduler, "hdet_inner", config.scheduler)
        self._schedulers = []
        if self._saves is not None:
            del self._saves[0].save_checkpoint
            self._saves = None

    # -- a step ------------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._exploring.close()  # the module's own hook may have skipped the rest of an epoch
        if pl_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0:
            self._batches = []  # of a step that was not finished, whose gradients Lightning clears here
        self._exploring.enter_context(inside(ensemble.explore() for ensemble in self.ensembles))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._exploring.close()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._exploring.close()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):  # Lightning has divided it by the accumulation
            for ensemble in self.ensembles:
                ensemble.observe(loss.detach() * trainer.accumulate_grad_batches)
        if batch is not None:
            self._batches.append((batch, batch_idx))
        if trainer.global_step == self._steps:  # it accumulates
            return
        self._steps = trainer.global_step
        batches, self._batches = self._batches, []
        for ensemble in self.ensembles:
            step(ensemble, closure=lambda: self._anew(trainer, pl_module, batches))
        for name, value in numbers(*self.ensembles, values=True).items():
            pl_module.log(name, value, on_step=True, on_epoch=False, prog_bar="/corrections/" in name)

    def _anew(self, trainer: Any, module: Any, batches: list[tuple[Any, int]]) -> torch.Tensor | None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        with attributes_kept(module), _silent(module):
            return losses_anew(
                batches,
                lambda part: self._loss_of(trainer, module, *part),
                backward=lambda loss: module.backward(loss if scaler is None else scaler.scale(loss)),
                no_sync=getattr(trainer.strategy, "block_backward_sync", nullcontext),
            )

    def _loss_of(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> torch.Tensor | None:
        """Of a micro-batch, its part of the step's. None: ``training_step`` leaves it out."""
        parts = trainer.accumulate_grad_batches
        if self.losses is not None:
            with trainer.precision_plugin.train_step_context():
                return self.losses(module, batch).mean() / parts
        given = trainer.fit_loop.epoch_loop._build_kwargs({}, batch, batch_idx)
        output = trainer.strategy.training_step(*given.values())
        loss: torch.Tensor | None = output["loss"] if isinstance(output, Mapping) else output
        return None if loss is None else loss / parts

    # -- where others look -------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        converge(self.ensembles)

    def state_dict(self) -> dict[str, Any]:
        return {"ensembles": states(self.ensembles)} if self.ensembles else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._states = list(state_dict["ensembles"])

    def _converge_before_saves(self, trainer: Any) -> None:
        """No hook comes before the weights are read, and none at all where weights alone are saved."""
        save = trainer.save_checkpoint

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            converge(self.ensembles)
            save(*args, **kwargs)

        trainer.save_checkpoint, self._saves = save_checkpoint, (trainer, save)


class _Rescheduled:
    """In the place of a scheduler that Lightning, or a module that optimizes by hand, steps."""

    def __init__(self, inner: Any, ensemble: Ensemble) -> None:
        self.hdet_inner, self._ensemble = inner, ensemble

    def step(self, *args: Any, **kwargs: Any) -> None:
        with self._ensemble.rescheduling():
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
