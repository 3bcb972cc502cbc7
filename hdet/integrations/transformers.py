"""hdet inside the Trainer of transformers, and of whatever is made of it, such as trl's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from ..ensemble import Ensemble
from .accelerate import leave_scaled, refresh_step, torch_optimizer
from .common import Adapter, StandIn, complete_settings, require, skip_backward

__all__ = ["HdetMixin", "HdetTrainer"]

transformers = require("transformers")
_LOG = transformers.utils.logging.get_logger("transformers.hdet")  # beside the Trainer's messages
_Trainer: Any = transformers.Trainer
_Any: Any = object
"""HdetMixin's base, for the type checker: a Trainer's members are those of the class behind it."""


class HdetMixin(_Any):
    """In front of any Trainer class: hdet in its training loop::

        class Trainer(HdetMixin, SFTTrainer):
            pass


        trainer = Trainer(
            model, args=args, train_dataset=data, ensemble={"search": hdet.AutoLR}
        )

    A callback would not do: it sees neither losses nor batches.

    Args:
        ensemble: settings of the `hdet.Ensemble`, such as ``search``, ``sync``, ``knobs``.
            ``search``, ``controller`` and ``replicas`` may be functions of the model, as the
            Trainer calls it, such as ``hdet.AutoLR``. ``log`` is called on the first process only.
            None: how far the first steps move the weights is looked at, and a rate that is wrong by
            a factor of ten or more is moved, at no cost; ``{"search": hdet.AutoLR}`` makes a trial.
        args, kwargs: the Trainer's own.

    A loss is the Trainer's own: `compute_loss`, with its accumulation, tokens, label smoothing and
    autocast, also where it is computed again for an `AutoLR`, whose arms are clipped as the run is.
    Replicas are averaged before an evaluation and before a save, and when training ends. The
    Ensemble's state is in the checkpoint's ``scheduler.pt``, beside the scheduler's; a checkpoint
    of a plain Trainer loads, too.

    Raises:
        TypeError: a setting that an Ensemble does not have; a class with HdetMixin behind the
            Trainer.
        ValueError: when training begins: DeepSpeed, or another set-up without replicas; a
            scheduler that needs a metric.
    """

    lr_scheduler: Any  # the Trainer's

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if _Trainer in order and order.index(_Trainer) < order.index(HdetMixin):
            raise TypeError(
                f"HdetMixin stands behind the Trainer in class {cls.__name__}, where its methods "
                f"are not asked: write class {cls.__name__}(HdetMixin, ...)"
            )

    def __init__(
        self, *args: Any, ensemble: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._hdet = _Driver(self, complete_settings(ensemble or {}))
        super().__init__(*args, **kwargs)

    @property
    def ensemble(self) -> Ensemble | None:
        """The Ensemble that drives this run; None before the first step."""
        return self._hdet.ensemble

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Make the Trainer's, behind a stand-in whose ``step()`` is the Ensemble's."""
        if self.lr_scheduler is not self._hdet:  # else train() is called again
            prepared = self.optimizer if optimizer is None else optimizer
            inner = super().create_scheduler(num_training_steps, torch_optimizer(prepared))
            self._hdet.close()
            self._hdet = _Driver(self, self._hdet.settings, inner, num_training_steps)
            self.lr_scheduler = self._hdet
        return self.lr_scheduler

    def training_step(
        self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._hdet.begin_part(model)
        with self._hdet.enter("explore"):
            loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        self._hdet.end_part(loss, args, kwargs)
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        # Not compute_loss, which is public: a subclass may change the inputs before it calls it.
        prepared = super()._prepare_inputs(inputs)
        self._hdet.inputs = copy.copy(prepared)  # compute_loss may write to them
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the averaged model."""
        self._hdet.converge()
        return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the averaged model. Where training has stopped within a cycle every process must
        call it, as the Trainer does."""
        self._hdet.converge()
        super().save_model(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; replicas are equal afterwards, also if a callback has stopped
        it within a cycle."""
        result = super().train(*args, **kwargs)
        self._hdet.converge()
        return result

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log base values, corrections and multipliers in use beside the learning rate."""
        if "learning_rate" in logs:
            logs.update(self._hdet.metrics())
        super().log(logs, *args, **kwargs)


class HdetTrainer(HdetMixin, _Trainer):
    """transformers' Trainer with hdet in it::

        trainer = HdetTrainer(
            model=model, args=args, train_dataset=data, ensemble={"search": hdet.AutoLR}
        )
        trainer.train()

    Arguments are the Trainer's, and those of `HdetMixin`.
    """


class _Driver(Adapter, StandIn):
    """In the place of the Trainer's scheduler, which calls it after each optimizer step, saves and
    loads it."""

    def __init__(
        self, trainer: Any, settings: Mapping[str, Any], scheduler: Any = None, total_steps: int = 0
    ) -> None:
        super().__init__(_LOG.info)
        self.owner = self.trainer = trainer
        self.settings, self.inner, self.total_steps = settings, scheduler, total_steps
        self.inputs: Any = None
        self._loss: torch.Tensor | float = 0.0
        self._step = -1

    def begin_part(self, model: nn.Module) -> None:
        """Before a micro-batch. In the first one model and optimizer are as they will be, and
        loaded."""
        trainer = self.trainer
        if not self.ensembles:
            self.model, self.scaler = model, trainer.accelerator.scaler
            self.without_sync = partial(trainer.accelerator.no_sync, model=model)
            given = {"scheduler": self.inner, "total_steps": self.total_steps, **self.settings}
            optimizer = torch_optimizer(trainer.optimizer)
            is_first = trainer.is_world_process_zero()
            self.begin([optimizer], [given], model, logs=is_first)
            refresh_step(trainer.optimizer)
        if trainer.state.global_step != self._step:  # a scaler may have skipped the one before
            self._step, self._loss, self.parts = trainer.state.global_step, 0.0, []

    def end_part(self, loss: torch.Tensor, *others: Any) -> None:
        """``others``: arguments of training_step, beside the inputs."""
        self._loss = self._loss + loss  # of a step, because each is its part already
        self.parts.append((self.inputs, *others))

    # -- a scheduler -------------------------------------------------------------------------------

    def step(self) -> None:
        self.observe(self._loss)
        self.end_step()

    def get_last_lr(self) -> list[Any]:
        """Give the base rates in use."""
        return [group["lr"] for group in self.trainer.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Give the scheduler's own, and the Ensemble's beside it."""
        own: dict[str, Any] = self.inner.state_dict()
        return {**own, "hdet": self.save_states()[0]} if self.ensembles else own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load also a plain Trainer's. The Ensemble's is kept until there is one."""
        own = dict(state)
        ours = own.pop("hdet", None)
        self.saved_states = [] if ours is None else [ours]
        self.inner.load_state_dict(own)

    # -- what the Trainer does ---------------------------------------------------------------------

    def compute_loss(self, part: tuple[Any, Any, Any]) -> torch.Tensor:
        """As the Trainer's training_step does, with the inputs that it has prepared."""
        inputs, args, kwargs = part
        prepared = mock.patch.object(self.trainer, "_prepare_inputs", lambda _: copy.copy(inputs))
        with prepared, skip_backward():
            step = super(HdetMixin, self.trainer).training_step  # type: ignore[misc]
            loss: torch.Tensor = step(self.model, inputs, *args, **kwargs)
        return loss

    def clip_gradients(self) -> None:
        if self.trainer.args.max_grad_norm > 0:
            with leave_scaled(self.trainer.accelerator):
                self.trainer._clip_grad_norm(self.model)  # which has no public name
