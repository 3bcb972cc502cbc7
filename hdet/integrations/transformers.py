"""hdet inside the Trainer of transformers, and of whatever is made of it, such as trl's."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..ensemble import Ensemble
from .accelerate import look_again, torch_optimizer, unscaled
from .common import attributes_kept, check_settings, converge, losses_anew, make, numbers, require, states, step

__all__ = ["HdetMixin", "HdetTrainer"]

transformers = require("transformers")
_LOG = transformers.utils.logging.get_logger("transformers.hdet")  # beside the Trainer's own messages
_Trainer: Any = transformers.Trainer
_Any: Any = object
"""HdetMixin's base, for the type checker: a Trainer's members are those of the class that stands behind it."""


class HdetMixin(_Any):
    """In front of any Trainer class: replicas or copies of the run search while it trains::

        class Trainer(HdetMixin, SFTTrainer):
            pass


        trainer = Trainer(model, args=args, train_dataset=data, ensemble={"controller": hdet.AutoLR})

    A callback would not do: it sees neither losses nor batches.

    Args:
        ensemble: settings of the `hdet.Ensemble`, such as ``controller``, ``sync``, ``knobs``. ``controller`` and ``replicas`` may be
            functions of the model, as the Trainer calls it: ``hdet.AutoLR``, ``lambda model: hdet.Shadow(hdet.AutoLR(model))``.
            ``log`` is called on the first process only. None: how far the first steps move the weights is looked at, and a rate that is
            wrong by a factor of ten or more is moved, at no cost; ``{"controller": hdet.AutoLR}`` makes a trial.
        args, kwargs: the Trainer's own.

    A loss is the Trainer's own: `compute_loss`, with its accumulation, tokens, label smoothing and autocast, also where it is computed anew for an
    `AutoLR`, whose arms are clipped as the run is. Replicas are averaged before an evaluation and before a save, and when training ends.
    The Ensemble's state is in the checkpoint's ``scheduler.pt``, beside the scheduler's; a checkpoint of a plain Trainer loads, too.

    Raises:
        TypeError: a setting that an Ensemble does not have; a class with HdetMixin behind the Trainer.
        ValueError: DeepSpeed, or another set-up without replicas; a scheduler that needs a metric.
    """

    lr_scheduler: Any  # the Trainer's

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if _Trainer in order and order.index(_Trainer) < order.index(HdetMixin):
            raise TypeError(
                f"HdetMixin stands behind the Trainer in class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)}), where its methods "
                f"are not asked: write class {cls.__name__}(HdetMixin, ...)"
            )

    def __init__(self, *args: Any, ensemble: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._hdet_settings = {} if ensemble is None else ensemble
        check_settings(self._hdet_settings)
        self._hdet: _Driver | None = None
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise ValueError(
                "the Trainer runs DeepSpeed, which keeps one copy of the optimizer's state for all ranks, so there are no replicas: leave "
                "deepspeed out of the TrainingArguments, for DDP"
            )

    @property
    def ensemble(self) -> Ensemble | None:
        """The Ensemble that drives this run; None before the first step."""
        return None if self._hdet is None else self._hdet.ensemble

    # -- what the Trainer asks ---------------------------------------------------------------------------------------------

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The Trainer's, behind a stand-in whose ``step()`` is the Ensemble's."""
        if self.lr_scheduler is not None and isinstance(self.lr_scheduler, _Driver):  # train() is called again
            return self.lr_scheduler
        if self._hdet is not None and self._hdet.ensemble is not None:
            self._hdet.ensemble.close()
        inner = super().create_scheduler(num_training_steps, torch_optimizer(self.optimizer if optimizer is None else optimizer))
        if type(inner).__name__ in ("ReduceLROnPlateau", "GreedyLR"):
            raise ValueError(f"the scheduler is {type(inner).__name__}, which steps by a metric: use a schedule of steps, such as 'cosine'")
        self._hdet = self.lr_scheduler = _Driver(self, inner, num_training_steps)
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        driver = self._hdet
        assert driver is not None, "create_scheduler comes first"
        items = args[0] if args else kwargs.get("num_items_in_batch")
        with driver.micro_batch(model, items):
            loss = super().training_step(model, inputs, *args, **kwargs)
        driver.loss = driver.loss + loss  # of a step, because each is its part already
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        if self._hdet is not None:
            self._hdet.take(prepared)
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Of the averaged model."""
        self._hdet_converge()
        return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """The averaged model. Where training has stopped within a cycle every process must call it, as the Trainer does."""
        self._hdet_converge()
        super().save_model(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; replicas are equal afterwards, also if a callback has stopped it within a cycle."""
        result = super().train(*args, **kwargs)
        self._hdet_converge()
        return result

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """With the corrections and multipliers in force beside the learning rate."""
        if self.ensemble is not None and "learning_rate" in logs:
            logs.update(numbers(self.ensemble))
        super().log(logs, *args, **kwargs)

    def _hdet_converge(self) -> None:
        converge(filter(None, [self.ensemble]))


class HdetTrainer(HdetMixin, _Trainer):
    """transformers' Trainer, see `HdetMixin`::

    trainer = HdetTrainer(model=model, args=args, train_dataset=data, ensemble={"controller": hdet.AutoLR})
    trainer.train()
    """


class _Driver:
    """In the place of the Trainer's scheduler, which calls it after each optimizer step, saves and loads it."""

    def __init__(self, trainer: Any, scheduler: Any, total_steps: int) -> None:
        self.trainer, self.scheduler, self.total_steps = trainer, scheduler, total_steps
        self.ensemble: Ensemble | None = None
        self.loss: torch.Tensor | float = 0.0
        self._parts: list[tuple[Any, Any]] = []
        self._state: Mapping[str, Any] | None = None
        self._recording = self._ended = False

    # -- a scheduler ---------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        assert self.ensemble is not None, "training_step comes first"
        step(self.ensemble, self.loss, closure=self._losses)

    def get_last_lr(self) -> list[Any]:
        """The base rates in force."""
        return [group["lr"] for group in self.trainer.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own, and the Ensemble's beside it."""
        own: dict[str, Any] = self.scheduler.state_dict()
        if self.ensemble is None:
            return own
        [state] = states([self.ensemble])
        return {**own, "hdet": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Kept until the Ensemble is made; a plain Trainer's is loaded at once."""
        own = {key: value for key, value in state.items() if key != "hdet"}
        self._state = state.get("hdet")
        if self._state is None:
            self.scheduler.load_state_dict(own)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while it is copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    # -- the Ensemble --------------------------------------------------------------------------------------------------------

    def _begin(self, model: nn.Module) -> Ensemble:
        """Model and optimizer are as they will be, and loaded."""
        trainer = self.trainer
        [ensemble] = make(
            [torch_optimizer(trainer.optimizer)],
            [{"scheduler": self.scheduler, "total_steps": self.total_steps, **trainer._hdet_settings}],
            model,
            tell=_LOG.info,
            first=trainer.is_world_process_zero(),
            states=[] if self._state is None else [self._state],
            clip=self._clip,
            scaler=getattr(trainer.accelerator, "scaler", None),
        )
        look_again(trainer.optimizer)
        return ensemble

    def _clip(self) -> None:
        trainer = self.trainer
        if trainer.args.max_grad_norm > 0:
            unscaled(trainer.accelerator, lambda: trainer._clip_grad_norm(self.model))

    # -- the batches of a step -----------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, model: nn.Module, items: Any) -> Iterator[None]:
        """Around the Trainer's work with one."""
        if self.ensemble is None:
            self.ensemble = self._begin(model)
        if self._ended:
            self.loss, self._parts, self._ended = 0.0, [], False
        self.model, self._items = model, items
        self._recording = True
        try:
            with self.ensemble.explore():
                yield
        finally:
            self._recording, self._ended = False, self.trainer.accelerator.sync_gradients

    def take(self, inputs: Any) -> None:
        """Of the running micro-batch, as they go into `compute_loss`, which may write to them."""
        if self._recording:
            self._parts.append((copy.copy(inputs), self._items))

    def _losses(self) -> torch.Tensor | None:
        """The closure: the step's loss anew, with gradients where they are on."""
        trainer, model = self.trainer, self.model
        with attributes_kept(trainer):
            return losses_anew(
                self._parts,
                self._loss_of,
                backward=trainer.accelerator.backward,
                no_sync=lambda: trainer.accelerator.no_sync(model=model),
            )

    def _loss_of(self, part: tuple[Any, Any]) -> torch.Tensor:
        """A micro-batch's part of the loss, scaled as `Trainer.training_step` does."""
        trainer, (inputs, items) = self.trainer, part
        with trainer.compute_loss_context_manager():
            loss: torch.Tensor = trainer.compute_loss(self.model, copy.copy(inputs), num_items_in_batch=items)
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
        return loss.mean() if scaled else loss.mean() / len(self._parts)
