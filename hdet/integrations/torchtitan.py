"""hdet inside torchtitan's Trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..ensemble import Ensemble
from ..replicas import Replicas
from .common import Adapter, StandIn, complete_settings, require, skip_backward

__all__ = ["wrap"]

_trainer = require("torchtitan.trainer")
_utils = require("torchtitan.distributed.utils")
_loss = require("torchtitan.components.loss")
_LOG = require("torchtitan.tools.logging").logger
_Any: Any = object
"""HdetTrainer's base, for the type checker: members are those of the class behind it."""

KEY = "hdet"
"""Of the Ensembles' state in torchtitan's checkpoints, beside "lr_scheduler", which keeps
last_epoch alone."""


def wrap(config: Any, **settings: Any) -> Any:
    """Put hdet into the configuration of a run, which a function of torchtitan's config_registry
    returns::

        def llama3_8b_hdet() -> Trainer.Config:
            return hdet.integrations.torchtitan.wrap(llama3_8b(), search=hdet.AutoLR)

    The rest is torchtitan's: its command line, optimizer, schedule, metrics and DCP checkpoints.
    With ``data_parallel_replicate_degree`` above 1 (HSDP) replicas are the places along
    ``dp_replicate``; else all ranks are one replica. They are averaged before a validation, before
    a checkpoint and at the end. The trainer that ``build()`` makes has its ``ensemble``.

    Args:
        config: a ``Trainer.Config``, or that of a Trainer's subclass. It is not changed.
        settings: of the `hdet.Ensemble`, such as ``search``, ``knobs``, ``sync``. ``search``,
            ``controller`` and ``replicas`` may be functions of the model. ``log`` is called on
            rank 0 only.

    Raises:
        TypeError: a setting that an Ensemble does not have.
        ValueError: when the trainer is built: pipeline parallel. When training begins: one
            search or controller for several optimizers; with an AutoLR: several optimizers, CUDA
            graphs.
    """
    given: Any = type(config)

    class Driven(HdetTrainer, given._owner):
        hdet_settings = complete_settings(settings)

        @dataclass(kw_only=True, slots=True)
        class Config(given):  # by its class torchtitan knows what build() makes
            pass

    values = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    return Driven.Config(**values)


class HdetTrainer(_Any):
    """In front of a Trainer class; made by `wrap`."""

    hdet_settings: Mapping[str, Any]
    lr_schedulers: Any  # the Trainer's

    def __init__(self, config: Any) -> None:
        if config.parallelism.pipeline_parallel_degree > 1:
            raise ValueError(
                "pipeline_parallel_degree is above 1, and hdet has not been tried in torchtitan's "
                "pipelines: set it to 1, and shard over more ranks (data_parallel_shard_degree, "
                "tensor_parallel_degree)"
            )
        super().__init__(config)
        self.hdet = self.lr_schedulers = _Driver(self, self.lr_schedulers)
        if self.checkpointer.enable:
            self.checkpointer.states[KEY] = self.hdet

    @property
    def ensembles(self) -> list[Ensemble]:
        """One for each optimizer, from the first step on."""
        return self.hdet.ensembles

    @property
    def ensemble(self) -> Ensemble | None:
        """The first optimizer's; None before the first step."""
        return self.hdet.ensemble

    def train_step(self, data_iterator: Iterator[Any]) -> Any:
        """Step; what is validated or saved after it is averaged."""
        self.hdet.begin_run()
        result = super().train_step(data_iterator)
        # torchtitan has no public name for whether it is going to save.
        is_last = self.step == self.config.training.steps
        saves = self.checkpointer.enable and self.checkpointer._should_save(self.step, is_last)
        if saves or (self.config.validator.enable and self.validator.should_validate(self.step)):
            self.hdet.converge()
        return result

    def forward_backward_step(self, **part: Any) -> torch.Tensor:
        """Go through one micro-batch."""
        with self.hdet.enter("explore"):
            loss: torch.Tensor = super().forward_backward_step(**part)
        self.hdet.end_part(loss, part)
        return loss

    def train(self) -> None:
        """Train as the Trainer does; replicas are equal afterwards, also where the data has run
        out within a cycle."""
        super().train()
        self.hdet.converge()

    def close(self) -> None:
        self.hdet.close()
        super().close()


class _Driver(Adapter, StandIn):
    """In the place of torchtitan's LRSchedulersContainer, whose step() follows the optimizers';
    and the state in a checkpoint."""

    def __init__(self, trainer: Any, schedulers: Any) -> None:
        super().__init__(_LOG.info)
        self.owner = self.trainer = trainer
        self.inner = schedulers
        self._state = b""

    def begin_run(self) -> None:
        """Before the first step: a checkpoint has been loaded, for which torchtitan makes a step
        of rate 0 that is none of ours."""
        if self.ensembles:
            return
        trainer = self.trainer
        given = {"replicas": self._find_replicas, "total_steps": trainer.config.training.steps}
        given |= trainer.hdet_settings
        settings = [{"scheduler": scheduler, **given} for scheduler in self.inner.schedulers]
        self.saved_states = json.loads(self._state) if self._state else ()
        model, is_first = trainer.model_parts[0], dist.get_rank() == 0
        self.begin(list(trainer.optimizers), settings, model, logs=is_first)

    def _find_replicas(self, model: Any) -> Replicas:
        """All ranks with one place along dp_replicate are one."""
        dims = self.trainer.parallel_dims
        if dims.dp_replicate_enabled:
            return Replicas.from_mesh(dims.get_mesh("dp_replicate"))
        return Replicas.from_group([list(range(dist.get_world_size()))])

    # -- a step ------------------------------------------------------------------------------------

    def end_part(self, loss: torch.Tensor, part: Mapping[str, Any]) -> None:
        # A rank's loss is the sum over its tokens, divided by the tokens of all ranks; each of the
        # ranks that share a sequence reports its part.
        weight = (part["labels"] != _loss.IGNORE_INDEX).sum() / self.trainer.parallel_dims.cp
        mean = _local(loss.detach()) * part["global_valid_tokens"] / weight.clamp(min=1e-9)
        self.observe(mean, weight)
        self.parts.append(part)

    def step(self) -> None:
        self.end_step()

    # -- what torchtitan does ----------------------------------------------------------------------

    def find_obstacle(self) -> str | None:
        if self.trainer.config.training.disable_cuda_graphs:
            return None
        return (
            "trains copies of the run, whose gradients a captured CUDA graph does not reach: set "
            "training.disable_cuda_graphs"
        )

    def compute_loss(self, part: Mapping[str, Any]) -> torch.Tensor:
        """Where gradients are on, with them: torchtitan reduces those of each micro-batch."""
        dims = self.trainer.parallel_dims
        with skip_backward():
            step = super(HdetTrainer, self.trainer).forward_backward_step  # type: ignore[misc]
            loss = _local(step(**part).detach())
        # Ranks' means are averaged, and these are parts of a sum.
        return loss * (dims.dp_replicate * dims.dp_shard * dims.cp)

    def clip_gradients(self) -> None:
        trainer = self.trainer
        _utils.clip_grad_norm_(
            [p for part in trainer.model_parts for p in part.parameters()],
            trainer.config.training.max_norm,
            foreach=True,
            ep_enabled=trainer.parallel_dims.ep_enabled,
        )

    # -- where others look -------------------------------------------------------------------------

    def get_metrics(self) -> dict[str, float]:
        """Give torchtitan's, by its names, of the base rates in use; and hdet's."""
        for scheduler in self.inner.schedulers:  # each knows its own values only
            scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
        return {**self.inner.get_metrics(), **self.metrics()}

    def state_dict(self) -> dict[str, Any]:
        """Give one value for torchtitan's checkpoints: it has other parts in another run, and a
        checkpoint is read by the names of the parts."""
        if self.ensembles:
            self._state = json.dumps(self.save_states()).encode()
        return {"state": self._state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep it until the Ensembles are made."""
        self._state = state_dict["state"]


def _local(loss: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    return loss.to_local() if isinstance(loss, DTensor) else loss
