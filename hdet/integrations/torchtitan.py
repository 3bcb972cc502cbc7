"""hdet inside torchtitan's Trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..ensemble import Ensemble
from ..replicas import Replicas
from .common import Adapter, attributes_kept, check_settings, require

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
            return hdet.integrations.torchtitan.wrap(llama3_8b(), controller=hdet.AutoLR)

    The rest is torchtitan's: its command line, optimizer, schedule, metrics and DCP checkpoints.
    With ``data_parallel_replicate_degree`` above 1 (HSDP) replicas are the places along
    ``dp_replicate``; else all ranks are one replica. They are averaged before a validation, before
    a checkpoint and at the end. The trainer that ``build()`` makes has its ``ensemble``.

    Args:
        config: a ``Trainer.Config``, or that of a Trainer's subclass. It is not changed.
        settings: of the `hdet.Ensemble`, such as ``controller``, ``knobs``, ``sync``.
            ``controller`` and ``replicas`` may be functions of the model. ``log`` is called on
            rank 0 only.

    Raises:
        TypeError: another kind of configuration; a setting that an Ensemble does not have.
        ValueError: when the trainer is built: pipeline parallel. When training begins: one
            controller for several optimizers; with an AutoLR: several optimizers, CUDA graphs, a
            Trainer that has its own way through a batch.
    """
    check_settings(settings)
    if not isinstance(config, _trainer.Trainer.Config):
        raise TypeError(
            f"config must be a torchtitan Trainer.Config, as a function of the config_registry "
            f"returns, got {type(config).__name__}"
        )
    given: Any = type(config)

    class Driven(HdetTrainer, given._owner):
        hdet_settings, hdet_owner = settings, given._owner

        @dataclass(kw_only=True, slots=True)
        class Config(given):  # by its class torchtitan knows what build() makes
            pass

    values = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    return Driven.Config(**values)


class HdetTrainer(_Any):
    """In front of a Trainer class; made by `wrap`."""

    hdet_settings: Mapping[str, Any]
    hdet_owner: type
    """The Trainer class behind it."""
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
        validates = self.config.validator.enable and self.validator.should_validate(self.step)
        if saves or validates:
            self.hdet.converge()
        return result

    def forward_backward_step(
        self, *, input_dict: Any, labels: Any, global_valid_tokens: torch.Tensor, **others: Any
    ) -> torch.Tensor:
        """Go through one micro-batch."""
        with self.hdet.micro_batch(input_dict, labels, global_valid_tokens) as observe:
            loss = self.hdet_pass(
                input_dict=input_dict,
                labels=labels,
                global_valid_tokens=global_valid_tokens,
                **others,
            )
            observe(loss)
        return loss

    def hdet_pass(self, **inputs: Any) -> torch.Tensor:
        """Go through one as the Trainer does: nothing is observed."""
        loss: torch.Tensor = super().forward_backward_step(**inputs)
        return loss

    def train(self) -> None:
        """Train as the Trainer does; replicas are equal afterwards, also where the data has run
        out within a cycle."""
        super().train()
        self.hdet.converge()

    def close(self) -> None:
        if hasattr(self, "hdet"):  # __init__ may have failed
            self.hdet.close()
        super().close()


class _Driver(Adapter):
    """In the place of torchtitan's LRSchedulersContainer, whose step() follows the optimizers';
    and the state in a checkpoint."""

    def __init__(self, trainer: Any, schedulers: Any) -> None:
        super().__init__()
        self.trainer, self.inner = trainer, schedulers
        self._state = b""
        self._parts: list[tuple[Any, Any, torch.Tensor]] = []

    def begin_run(self) -> None:
        """Before the first step: a checkpoint has been loaded, for which torchtitan makes a step
        of rate 0 that is none of ours."""
        if self.ensembles:
            return
        trainer, settings = self.trainer, self.trainer.hdet_settings
        given = {"total_steps": trainer.config.training.steps}
        if "replicas" not in settings:
            given["replicas"] = self._find_replicas()
        parts = trainer.model_parts
        states = json.loads(self._state) if self._state else ()
        self.begin(
            list(trainer.optimizers),
            [{"scheduler": of, **given, **settings} for of in self.inner.schedulers],
            parts[0] if len(parts) == 1 else nn.ModuleList(parts),
            logs=dist.get_rank() == 0,
            states=states,
        )

    def _find_replicas(self) -> Replicas:
        """All ranks with one place along dp_replicate are one."""
        dims = self.trainer.parallel_dims
        if dims.dp_replicate_enabled:
            return Replicas.from_mesh(dims.get_mesh("dp_replicate"))
        return Replicas.from_group([list(range(dist.get_world_size()))])

    # -- a step ------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(
        self, inputs: Any, labels: Any, tokens: torch.Tensor
    ) -> Iterator[Callable[[torch.Tensor], None]]:
        """Surround the Trainer's work with one; gives what takes its loss."""
        self._parts.append((inputs, labels, tokens))
        degree = self.trainer.parallel_dims.cp

        def observe(loss: torch.Tensor) -> None:
            # A rank's loss is the sum over its tokens, divided by the tokens of all ranks; each of
            # the ranks that share a sequence reports its part.
            weight = (labels != _loss.IGNORE_INDEX).sum() / degree
            self.observe(_local(loss.detach()) * tokens / weight.clamp(min=1e-9), weight)

        with self.explore():
            yield observe

    def step(self) -> None:
        parts, self._parts = self._parts, []
        self.end_step(partial(self.compute_again, parts))

    # -- what torchtitan does ----------------------------------------------------------------------

    def tell(self, line: str) -> None:
        _LOG.info(line)

    def find_obstacle(self) -> str | None:
        trainer, owner = self.trainer, self.trainer.hdet_owner
        ways = ("forward_backward_step", "_forward_backward_body")
        own = [way for way in ways if getattr(owner, way) is not getattr(_trainer.Trainer, way)]
        if own:
            return (
                f"asks for a batch's losses without gradients, and {owner.__name__}."
                f"{', '.join(own)} is not the Trainer's, which hdet knows: use a controller that "
                "compares replicas, such as hdet.SoftmaxController"
            )
        if trainer.fwd_bwd_fn != trainer._forward_backward_body:
            return (
                "trains copies of the run, whose gradients a captured CUDA graph does not "
                "reach: set training.disable_cuda_graphs"
            )
        return None

    def compute_again(self, parts: Any) -> torch.Tensor | None:
        dims = self.trainer.parallel_dims
        with attributes_kept(self.trainer):
            total = super().compute_again(parts)
        # Ranks' means are averaged, and these are parts of a sum.
        return None if total is None else total * (dims.dp_replicate * dims.dp_shard * dims.cp)

    def compute_loss(self, part: tuple[Any, Any, torch.Tensor]) -> torch.Tensor:
        """Where gradients are on, with them: torchtitan reduces those of each micro-batch."""
        trainer, (inputs, labels, tokens) = self.trainer, part
        if torch.is_grad_enabled():
            return _local(
                trainer.hdet_pass(
                    input_dict=inputs, labels=labels, global_valid_tokens=tokens
                ).detach()
            )
        inputs, labels, others = trainer.post_dataloading_process(inputs, labels)
        with trainer.train_context():  # as _forward_backward_body, which always calls backward()
            positions = {key: value for key, value in others.items() if key == "positions"}
            output = trainer.model_parts[0](inputs, **others)
            loss, _ = trainer.loss_fn(output, labels, tokens, **positions)
        return _local(loss)

    def backward(self, loss: torch.Tensor) -> None:
        """`compute_loss` has done it."""

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
        """Give torchtitan's, by its names, of the base rates in force; and what they are corrected
        and multiplied by."""
        own = [scheduler._last_lr for scheduler in self.inner.schedulers]
        try:
            for scheduler in self.inner.schedulers:
                scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
            rates: dict[str, float] = self.inner.get_metrics()
        finally:
            for scheduler, last in zip(self.inner.schedulers, own, strict=True):
                scheduler._last_lr = last
        return {**rates, **self.metrics()}

    def state_dict(self) -> dict[str, Any]:
        """Give one value for torchtitan's checkpoints: it has other parts in another run, and a
        checkpoint is read by the names of the parts."""
        if not self.ensembles:
            return {"state": self._state}
        return {"state": json.dumps(self.save_states()).encode()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep it until the Ensembles are made."""
        self._state = state_dict["state"]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is copied
            raise AttributeError(name)
        return getattr(self.inner, name)


def _local(loss: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    return loss.to_local() if isinstance(loss, DTensor) else loss
