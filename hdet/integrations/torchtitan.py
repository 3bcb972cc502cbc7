"""hdet inside torchtitan's Trainer."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..ensemble import Ensemble
from ..replicas import Replicas
from .common import attributes_kept, check_settings, converge, inside, losses_anew, make, numbers, require, states, step

__all__ = ["wrap"]

_trainer = require("torchtitan.trainer")
_utils = require("torchtitan.distributed.utils")
_loss = require("torchtitan.components.loss")
_LOG = require("torchtitan.tools.logging").logger
_Any: Any = object
"""HdetTrainer's base, for the type checker: a Trainer's members are those of the class that stands behind it."""

KEY = "hdet"
"""Of the Ensembles' state in torchtitan's checkpoints, beside "lr_scheduler", which keeps last_epoch alone."""


def wrap(config: Any, **settings: Any) -> Any:
    """The configuration of a run, with hdet in the run: what a function of torchtitan's config_registry returns::

        def llama3_8b_hdet() -> Trainer.Config:
            return hdet.integrations.torchtitan.wrap(llama3_8b(), controller=hdet.AutoLR)

    The rest is torchtitan's: its command line, optimizer, schedule, metrics and DCP checkpoints. With ``data_parallel_replicate_degree`` above 1
    (HSDP) replicas are the places along ``dp_replicate``; else all ranks are one replica. They are averaged before a validation, before a
    checkpoint and at the end. The trainer that ``build()`` makes has its ``ensemble``.

    Args:
        config: a ``Trainer.Config``, or that of a Trainer's subclass. It is not changed.
        settings: of the `hdet.Ensemble`, such as ``controller``, ``knobs``, ``sync``. ``controller`` and ``replicas`` may be functions of the model.
            ``log`` is called on rank 0 only.

    Raises:
        TypeError: another kind of configuration; a setting that an Ensemble does not have.
        ValueError: when the trainer is built: pipeline parallel. When training begins: one controller for several optimizers; with an AutoLR:
            several optimizers, CUDA graphs, a Trainer that has its own way through a batch.
    """
    check_settings(settings)
    if not isinstance(config, _trainer.Trainer.Config):
        raise TypeError(
            f"config must be a torchtitan Trainer.Config, as a function of the config_registry returns, got {type(config).__name__}"
        )
    base, owner = type(config), type(config)._owner
    # The class that build() makes is told by the configuration's class, so that is a new one, too; it has no fields of its own.
    made_config: Any = dataclass(kw_only=True, slots=True)(
        type("Config", (base,), {"__module__": __name__, "__qualname__": "HdetTrainer.Config"})
    )
    type(f"Hdet{owner.__name__}", (HdetTrainer, owner), {"Config": made_config, "hdet_settings": settings})
    return made_config(**{field.name: getattr(config, field.name) for field in fields(config) if field.init})


_THROUGH = ("forward_backward_step", "_forward_backward_body")
"""A Trainer's way through a batch."""


class HdetTrainer(_Any):
    """In front of a Trainer class; made by `wrap`."""

    hdet_settings: Mapping[str, Any] = {}
    lr_schedulers: Any  # the Trainer's

    def __init__(self, config: Any) -> None:
        if config.parallelism.pipeline_parallel_degree > 1:
            raise ValueError(
                "pipeline_parallel_degree is above 1, and hdet has not been tried in torchtitan's pipelines: set it to 1, and shard over more ranks "
                "(data_parallel_shard_degree, tensor_parallel_degree)"
            )
        super().__init__(config)
        self.hdet = self.lr_schedulers = _Driver(self, self.lr_schedulers)
        if self.checkpointer.enable:
            self.checkpointer.states[KEY] = self.hdet
            self._hdet_converge_before_saves()
        if self.config.validator.enable:
            self.validator.validate = self._hdet_converged(self.validator.validate)

    @property
    def ensembles(self) -> list[Ensemble]:
        """One for each optimizer, from the first step on."""
        return self.hdet.ensembles

    @property
    def ensemble(self) -> Ensemble | None:
        """The first optimizer's; None before the first step."""
        return self.ensembles[0] if self.ensembles else None

    def train_step(self, data_iterator: Iterator[Any]) -> Any:
        self.hdet.begin()
        return super().train_step(data_iterator)

    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: torch.Tensor, **others: Any) -> torch.Tensor:
        """Of one micro-batch."""
        with self.hdet.micro_batch(input_dict, labels, global_valid_tokens) as observe:
            loss: torch.Tensor = super().forward_backward_step(
                input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens, **others
            )
            observe(loss)
        return loss

    def hdet_pass(self, **inputs: Any) -> torch.Tensor:
        """The Trainer's own `forward_backward_step`: nothing is observed."""
        loss: torch.Tensor = super().forward_backward_step(**inputs)
        return loss

    def train(self) -> None:
        """As the Trainer's; replicas are equal afterwards, also where the data has run out within a cycle."""
        super().train()
        self.hdet.converge()

    def close(self) -> None:
        if hasattr(self, "hdet"):  # __init__ may have failed
            self.hdet.close()
        super().close()

    def _hdet_converged(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def converged(*args: Any, **kwargs: Any) -> Any:
            self.hdet.converge()
            return inner(*args, **kwargs)

        return converged

    def _hdet_converge_before_saves(self) -> None:
        """save() is called after each step, and knows by itself whether there is something to do."""
        checkpointer, inner = self.checkpointer, self.checkpointer.save

        def save(curr_step: int, last_step: bool = False) -> Any:
            if checkpointer._should_save(curr_step, last_step):
                self.hdet.converge()
            return inner(curr_step, last_step)

        checkpointer.save = save


class _Driver:
    """In the place of torchtitan's LRSchedulersContainer, whose step() follows the optimizers'; and the state in a checkpoint."""

    def __init__(self, trainer: Any, schedulers: Any) -> None:
        self.trainer, self.inner = trainer, schedulers
        self.ensembles: list[Ensemble] = []
        """One for each optimizer, once training has begun."""
        self._state = b""
        self._parts: list[tuple[Any, Any, torch.Tensor]] = []

    def begin(self) -> None:
        """Before the first step: a checkpoint has been loaded, for which torchtitan makes a step of rate 0 that is none of ours."""
        if self.ensembles:
            return
        trainer, owner = self.trainer, type(self.trainer).__mro__[2]
        own = [way for way in _THROUGH if getattr(owner, way) is not getattr(_trainer.Trainer, way)]
        length = {"total_steps": trainer.config.training.steps}
        replicas = {} if "replicas" in trainer.hdet_settings else {"replicas": self._replicas()}
        self.ensembles = make(
            list(trainer.optimizers),
            [{"scheduler": scheduler, **length, **replicas, **trainer.hdet_settings} for scheduler in self.inner.schedulers],
            trainer.model_parts[0] if len(trainer.model_parts) == 1 else nn.ModuleList(trainer.model_parts),
            tell=_LOG.info,
            first=dist.get_rank() == 0,
            states=torch.load(io.BytesIO(self._state), weights_only=True) if self._state else (),
            clip=self._clip,
            no_copies={
                f"asks for a batch's losses without gradients, and {owner.__name__}.{', '.join(own)} is not the Trainer's, which hdet knows: "
                "use a controller that compares replicas, such as hdet.SoftmaxController": bool(own),
                "trains copies of the run, whose gradients a captured CUDA graph does not reach: set training.disable_cuda_graphs": (
                    trainer.fwd_bwd_fn != trainer._forward_backward_body
                ),
            },
        )

    def _replicas(self) -> Replicas:
        """All ranks with one place along dp_replicate are one."""
        dims = self.trainer.parallel_dims
        if dims.dp_replicate_enabled:
            return Replicas.from_mesh(dims.get_mesh("dp_replicate"))
        return Replicas.from_group([list(range(dist.get_world_size()))])

    # -- a step --------------------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, inputs: Any, labels: Any, tokens: torch.Tensor) -> Iterator[Callable[[torch.Tensor], None]]:
        """Around the Trainer's work with one; takes its loss."""
        self._parts.append((inputs, labels, tokens))
        dims = self.trainer.parallel_dims

        def observe(loss: torch.Tensor) -> None:
            """A rank's sum over its tokens, divided by the tokens of all ranks."""
            weight = (labels != _loss.IGNORE_INDEX).sum() / dims.cp  # each of the ranks that share a sequence reports its part
            for ensemble in self.ensembles:
                ensemble.observe(local(loss.detach()) * tokens / weight.clamp(min=1e-9), weight)

        with inside(ensemble.explore() for ensemble in self.ensembles):
            yield observe

    def step(self) -> None:
        parts, self._parts = self._parts, []
        for ensemble in self.ensembles:
            step(ensemble, closure=partial(self._anew, parts))

    def _anew(self, parts: list[Any]) -> torch.Tensor:
        """The closure: the step's loss anew, with gradients where they are on, as the Trainer makes them."""
        trainer = self.trainer
        dims = trainer.parallel_dims
        with attributes_kept(trainer):
            total = losses_anew(
                parts,
                self._loss_of,
                backward=lambda loss: None,  # has happened
                no_sync=nullcontext,  # torchtitan reduces the gradients of each micro-batch
            )
        assert total is not None
        return total * (dims.dp_replicate * dims.dp_shard * dims.cp)  # ranks' means are averaged, and these are parts of a sum

    def _clip(self) -> None:
        trainer = self.trainer
        parameters = [p for part in trainer.model_parts for p in part.parameters()]
        _utils.clip_grad_norm_(parameters, trainer.config.training.max_norm, foreach=True, ep_enabled=trainer.parallel_dims.ep_enabled)

    def _loss_of(self, part: tuple[Any, Any, torch.Tensor]) -> torch.Tensor:
        """Of a micro-batch, anew; with its gradients, where they are on."""
        trainer, (inputs, labels, tokens) = self.trainer, part
        if torch.is_grad_enabled():
            loss = trainer.hdet_pass(input_dict=inputs, labels=labels, global_valid_tokens=tokens)
            return local(loss.detach())
        inputs, labels, others = trainer.post_dataloading_process(inputs, labels)
        with trainer.train_context():  # what _forward_backward_body does, which calls backward() in any case
            positions = {key: value for key, value in others.items() if key == "positions"}
            loss, _ = trainer.loss_fn(trainer.model_parts[0](inputs, **others), labels, tokens, **positions)
        return local(loss)

    # -- where others look ---------------------------------------------------------------------------------------------------

    def converge(self) -> None:
        converge(self.ensembles)

    def close(self) -> None:
        for ensemble in self.ensembles:
            ensemble.close()

    def get_metrics(self) -> dict[str, float]:
        """torchtitan's, by its names, of the base rates in force; and what they are corrected and multiplied by."""
        own = [scheduler._last_lr for scheduler in self.inner.schedulers]
        try:
            for scheduler in self.inner.schedulers:
                scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
            found: dict[str, float] = self.inner.get_metrics()
        finally:
            for scheduler, last in zip(self.inner.schedulers, own, strict=True):
                scheduler._last_lr = last
        return {**found, **numbers(*self.ensembles)}

    def state_dict(self) -> dict[str, Any]:
        """For torchtitan's checkpoints. One value, because it has other parts in another run, and a checkpoint is read by the names of the parts."""
        if not self.ensembles:
            return {"state": self._state}
        file = io.BytesIO()
        torch.save(states(self.ensembles), file)
        return {"state": file.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Kept until the Ensembles are made."""
        self._state = state_dict["state"]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is copied
            raise AttributeError(name)
        return getattr(self.inner, name)


def local(loss: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    return loss.to_local() if isinstance(loss, DTensor) else loss
