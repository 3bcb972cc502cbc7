"""hdet inside the Trainer of transformers, and of whatever is made of it, such as trl's."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..ensemble import Ensemble
from .accelerate import call_unscaled, refresh_step, torch_optimizer
from .common import Adapter, attributes_kept, check_settings, require

__all__ = ["HdetMixin", "HdetTrainer"]

transformers = require("transformers")
_LOG = transformers.utils.logging.get_logger("transformers.hdet")  # beside the Trainer's messages
_Trainer: Any = transformers.Trainer
_Any: Any = object
"""HdetMixin's base, for the type checker: a Trainer's members are those of the class behind it."""


class HdetMixin(_Any):
    """In front of any Trainer class: replicas or copies of the run search while it trains::

        class Trainer(HdetMixin, SFTTrainer):
            pass


        trainer = Trainer(
            model, args=args, train_dataset=data, ensemble={"controller": hdet.AutoLR}
        )

    A callback would not do: it sees neither losses nor batches.

    Args:
        ensemble: settings of the `hdet.Ensemble`, such as ``controller``, ``sync``, ``knobs``.
            ``controller`` and ``replicas`` may be functions of the model, as the Trainer calls it:
            ``hdet.AutoLR``, ``lambda model: hdet.Shadow(hdet.AutoLR(model))``. ``log`` is called
            on the first process only. None: how far the first steps move the weights is looked at,
            and a rate that is wrong by a factor of ten or more is moved, at no cost;
            ``{"controller": hdet.AutoLR}`` makes a trial.
        args, kwargs: the Trainer's own.

    A loss is the Trainer's own: `compute_loss`, with its accumulation, tokens, label smoothing and
    autocast, also where it is computed again for an `AutoLR`, whose arms are clipped as the run is.
    Replicas are averaged before an evaluation and before a save, and when training ends. The
    Ensemble's state is in the checkpoint's ``scheduler.pt``, beside the scheduler's; a checkpoint
    of a plain Trainer loads, too.

    Raises:
        TypeError: a setting that an Ensemble does not have; a class with HdetMixin behind the
            Trainer.
        ValueError: DeepSpeed, or another set-up without replicas; a scheduler that needs a metric.
    """

    lr_scheduler: Any  # the Trainer's

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if _Trainer in order and order.index(_Trainer) < order.index(HdetMixin):
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise TypeError(
                f"HdetMixin stands behind the Trainer in class {cls.__name__}({bases}), where its "
                f"methods are not asked: write class {cls.__name__}(HdetMixin, ...)"
            )

    def __init__(
        self, *args: Any, ensemble: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._hdet_settings = {} if ensemble is None else ensemble
        check_settings(self._hdet_settings)
        self._hdet: _Driver | None = None
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise ValueError(
                "the Trainer runs DeepSpeed, which keeps one copy of the optimizer's state for all "
                "ranks, so there are no replicas: leave deepspeed out of the TrainingArguments, "
                "for DDP"
            )

    @property
    def ensemble(self) -> Ensemble | None:
        """The Ensemble that drives this run; None before the first step."""
        return None if self._hdet is None else self._hdet.ensemble

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Make the Trainer's, behind a stand-in whose ``step()`` is the Ensemble's."""
        if isinstance(self.lr_scheduler, _Driver):  # train() is called again
            return self.lr_scheduler
        if self._hdet is not None:
            self._hdet.close()
        prepared = self.optimizer if optimizer is None else optimizer
        inner = super().create_scheduler(num_training_steps, torch_optimizer(prepared))
        if type(inner).__name__ in ("ReduceLROnPlateau", "GreedyLR"):
            raise ValueError(
                f"the scheduler is {type(inner).__name__}, which steps by a metric: use a "
                "schedule of steps, such as 'cosine'"
            )
        self._hdet = self.lr_scheduler = _Driver(self, inner, num_training_steps)
        return self.lr_scheduler

    def training_step(
        self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        assert self._hdet is not None, "create_scheduler comes first"
        items = args[0] if args else kwargs.get("num_items_in_batch")
        with self._hdet.micro_batch(model, items):
            loss = super().training_step(model, inputs, *args, **kwargs)
        self._hdet.loss = self._hdet.loss + loss  # of a step, because each is its part already
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        # Not compute_loss, which is public: a subclass may change the inputs before it calls it.
        prepared = super()._prepare_inputs(inputs)
        if self._hdet is not None:
            self._hdet.record_inputs(prepared)
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the averaged model."""
        self._hdet_converge()
        return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the averaged model. Where training has stopped within a cycle every process must
        call it, as the Trainer does."""
        self._hdet_converge()
        super().save_model(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; replicas are equal afterwards, also if a callback has stopped
        it within a cycle."""
        result = super().train(*args, **kwargs)
        self._hdet_converge()
        return result

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the corrections and multipliers in force beside the learning rate."""
        if self._hdet is not None and "learning_rate" in logs:
            logs.update(self._hdet.metrics())
        super().log(logs, *args, **kwargs)

    def _hdet_converge(self) -> None:
        if self._hdet is not None:
            self._hdet.converge()


class HdetTrainer(HdetMixin, _Trainer):
    """transformers' Trainer, see `HdetMixin`::

    trainer = HdetTrainer(
        model=model, args=args, train_dataset=data, ensemble={"controller": hdet.AutoLR}
    )
    trainer.train()
    """


class _Driver(Adapter):
    """In the place of the Trainer's scheduler, which calls it after each optimizer step, saves and
    loads it."""

    def __init__(self, trainer: Any, scheduler: Any, total_steps: int) -> None:
        super().__init__()
        self.trainer, self.scheduler, self.total_steps = trainer, scheduler, total_steps
        self.loss: torch.Tensor | float = 0.0
        self._parts: list[tuple[Any, Any]] = []
        self._states: list[Mapping[str, Any]] = []
        self._is_recording = self._has_ended = False

    # -- a scheduler -------------------------------------------------------------------------------

    def step(self) -> None:
        assert self.ensembles, "training_step comes first"
        self.observe(self.loss)
        self.end_step(partial(self.compute_again, self._parts))

    def get_last_lr(self) -> list[Any]:
        """Give the base rates in force."""
        return [group["lr"] for group in self.trainer.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Give the scheduler's own, and the Ensemble's beside it."""
        own: dict[str, Any] = self.scheduler.state_dict()
        return {**own, "hdet": self.save_states()[0]} if self.ensembles else own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep it until the Ensemble is made; a plain Trainer's is loaded at once."""
        if state.get("hdet") is None:
            own = {key: value for key, value in state.items() if key != "hdet"}
            self.scheduler.load_state_dict(own)
        else:
            self._states = [state["hdet"]]

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while it is copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    # -- the batches of a step ---------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, model: nn.Module, items: Any) -> Iterator[None]:
        """Surround the Trainer's work with one. In the first one model and optimizer are as they
        will be, and loaded."""
        trainer = self.trainer
        if not self.ensembles:
            given = {"scheduler": self.scheduler, "total_steps": self.total_steps}
            self.begin(
                [torch_optimizer(trainer.optimizer)],
                [{**given, **trainer._hdet_settings}],
                model,
                logs=trainer.is_world_process_zero(),
                states=self._states,
            )
            refresh_step(trainer.optimizer)
        if self._has_ended:
            self.loss, self._parts, self._has_ended = 0.0, [], False
        self.model, self._items = model, items
        self._is_recording = True
        try:
            with self.explore():
                yield
        finally:
            self._is_recording, self._has_ended = False, trainer.accelerator.sync_gradients

    def record_inputs(self, inputs: Any) -> None:
        """Of the running micro-batch, as they go into `compute_loss`, which may write to them."""
        if self._is_recording:
            self._parts.append((copy.copy(inputs), self._items))

    # -- what the Trainer does ---------------------------------------------------------------------

    @property
    def scaler(self) -> Any:
        return getattr(self.trainer.accelerator, "scaler", None)

    def tell(self, line: str) -> None:
        _LOG.info(line)

    def compute_again(self, parts: Any) -> torch.Tensor | None:
        with attributes_kept(self.trainer):
            return super().compute_again(parts)

    def compute_loss(self, part: tuple[Any, Any]) -> torch.Tensor:
        """Scaled as `Trainer.training_step` does."""
        trainer, (inputs, items) = self.trainer, part
        with trainer.compute_loss_context_manager():
            loss: torch.Tensor = trainer.compute_loss(
                self.model, copy.copy(inputs), num_items_in_batch=items
            )
        is_scaled = trainer.loss_is_scaled_for_ga
        if is_scaled is None:
            counts_items = trainer.model_accepts_loss_kwargs and items is not None
            is_scaled = counts_items or trainer.compute_loss_func is not None
        return loss.mean() if is_scaled else loss.mean() / len(self._parts)

    def backward(self, loss: torch.Tensor) -> None:
        self.trainer.accelerator.backward(loss)

    def without_sync(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.trainer.accelerator.no_sync(model=self.model)
        return context

    def clip_gradients(self) -> None:
        trainer = self.trainer
        if trainer.args.max_grad_norm > 0:  # the Trainer has no public name for its clipping
            call_unscaled(trainer.accelerator, lambda: trainer._clip_grad_norm(self.model))
