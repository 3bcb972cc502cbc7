"""hdet beside an optimizer and a scheduler of Megatron-Core."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..converge.sync import Sync
from ..replicas import Replicas
from .common import Adapter, StandIn, complete_settings, require

__all__ = ["Wrapped", "wrap"]

_parallel_state = require("megatron.core", "megatron-core").parallel_state
_optimizers = require("megatron.core.optimizer.optimizer")
_random = require("megatron.core.tensor_parallel.random")
_groups = require("megatron.core.process_groups_config").ProcessGroupCollection
_log_once = require("megatron.core.utils").log_single_rank
_LOG = logging.getLogger("megatron.hdet")

Losses = Sequence[Any]
"""What ``forward_backward_func`` returns: a dict, or a number, for each micro-batch; empty on all
stages but the last."""


def wrap(optimizer: Any, scheduler: Any, model: Any, **settings: Any) -> Wrapped:
    """Make what stands in the place of the scheduler::

        optimizer = get_megatron_optimizer(config, model)
        scheduler = OptimizerParamScheduler(optimizer, ...)
        scheduler = hdet.integrations.megatron.wrap(
            optimizer, scheduler, model, search=hdet.AutoLR, total_steps=n
        )

    Replicas are those of ``parallel_state``: what is tensor, context and pipeline parallel is
    inside of one. The base rate is in the groups' ``lr``, as always; their ``max_lr`` stays the
    schedule's own.

    Args:
        optimizer: of ``get_megatron_optimizer``, in float32 or with float32 masters.
        scheduler: its ``OptimizerParamScheduler``.
        model: the list of chunks from which the optimizer was made.
        settings: of the `hdet.Ensemble`, such as ``search``, ``knobs``, ``sync``,
            ``total_steps`` (the optimizer's). ``search``, ``controller`` and ``replicas`` may be
            functions of the model. ``log`` is called on rank 0 only.

    Raises:
        TypeError: a setting that an Ensemble does not have.
        ValueError: a distributed optimizer, or another one that hdet does not know; no parameters
            on this rank; one search or controller for several optimizers; with an AutoLR: several
            optimizers, float16.
    """
    return Wrapped(optimizer, scheduler, list(model), complete_settings(settings))


class Wrapped(Adapter, StandIn):
    """Ensembles that know Megatron's optimizer and scheduler; made by `wrap`. What is not here is
    the scheduler's own."""

    def __init__(
        self, optimizer: Any, scheduler: Any, chunks: list[Any], settings: Mapping[str, Any]
    ) -> None:
        super().__init__(partial(_log_once, _LOG, logging.INFO))
        self.inner, self.chunks = scheduler, chunks
        self.members = _find_members(optimizer)
        self._has_stale_copies = False
        self.begin(
            [member.optimizer for member in self.members],
            [_settings_of(member, chunks, settings) for member in self.members],
            chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks),
            logs=dist.get_rank() == 0,
        )
        self._first_states = self.save_states()

    def step(
        self,
        increment: int,
        losses: Losses = (),
        closure: Callable[[], Losses] | None = None,
    ) -> None:
        """Follow an ``optimizer.step()`` that was successful, in the place of
        ``scheduler.step(increment)``.

        Args:
            increment: the scheduler's.
            losses: what ``forward_backward_func`` has returned. The first number of each dict is
                the loss, of this rank and not yet averaged over data parallel ranks; two numbers
                are a sum over tokens, and how many there are.
            closure: for an `AutoLR`: calls ``forward_backward_func`` on the step's micro-batches
                once more, with ``forward_only=not torch.is_grad_enabled()``, and returns what that
                returns.

        Raises:
            What `Ensemble.step` raises.
        """
        with self.enter("rescheduling"):
            self.inner.step(increment)
        for loss, weight in _weigh(losses):
            self.observe(loss, weight)
        self.parts = [closure] if closure is not None else []
        self.end_step()
        if self._has_stale_copies:  # of the masters of an arm
            _copy_masters(self.members[0])
            self._has_stale_copies = False

    # -- what Megatron does ------------------------------------------------------------------------

    def find_obstacle(self) -> str | None:
        if self.members[0].config.fp16:
            return "trains copies of the run, whose gradients no loss scale looks after: use bf16"
        return None

    def compute_loss(self, part: Callable[[], Losses]) -> torch.Tensor | None:
        """Of the whole step, with the weights that are there now; where gradients are on, with
        them, reduced as Megatron's step takes them."""
        [member] = self.members
        self._has_stale_copies = True
        _copy_masters(member)
        tracker = _random.get_cuda_rng_tracker()
        states = tracker.get_states()
        try:
            if torch.is_grad_enabled():
                for chunk in self.chunks:
                    chunk.zero_grad_buffer()
                member.zero_grad()
            weighed = _weigh(part())
        finally:
            tracker.set_states(states)
        if torch.is_grad_enabled():
            member.prepare_grads()
        if not weighed:
            return None
        total = sum(loss.float() * weight for loss, weight in weighed)
        return torch.as_tensor(total / sum(weight for _, weight in weighed))

    def clip_gradients(self) -> None:
        [member] = self.members
        if member.config.clip_grad > 0.0:
            member.clip_grad_norm(member.config.clip_grad)

    # -- where others look -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Give the scheduler's own, and the Ensembles' beside it. After `converge`."""
        return {**self.inner.state_dict(), "hdet": self.save_states()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load also one of the scheduler alone. See `Ensemble.load_state_dict`."""
        # First: the optimizer may have been loaded, and its groups hold rates that it was saved
        # with.
        own = dict(state)
        self.load_states(own.pop("hdet", self._first_states))
        with self.enter("rescheduling"):
            self.inner.num_steps = 0  # Megatron's adds to it
            self.inner.load_state_dict(own)


def _find_members(optimizer: Any) -> list[Any]:
    """The optimizers of a chain, or the only one. Raises ValueError for what has no replicas, or is
    not known."""
    members = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    if not members or any(member.is_stub_optimizer for member in members):
        raise ValueError(
            "this rank has no parameters to train: lay the frozen parts out so that each rank has "
            "some"
        )
    for member in members:
        kind = type(member).__name__
        if member.config.use_distributed_optimizer or "Distributed" in kind:
            raise ValueError(
                f"{kind} keeps one copy of the optimizer's state for all data parallel ranks, so "
                "there are no replicas: set use_distributed_optimizer=False, in the "
                "OptimizerConfig and in the DistributedDataParallelConfig"
            )
        is_known = isinstance(member, _optimizers.FP32Optimizer) or _has_masters(member)
        if not is_known or type(member.optimizer).__module__.startswith("megatron."):
            raise ValueError(
                f"the optimizer is a {kind} of {type(member.optimizer).__name__}, which hdet does "
                "not know: use 'adam' or 'sgd' in the OptimizerConfig, without "
                "optimizer_cpu_offload"
            )
    return members


def _has_masters(member: Any) -> bool:
    return isinstance(member, _optimizers.Float16OptimizerWithFloat16Params)


def _settings_of(member: Any, chunks: list[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of the Ensemble of one optimizer."""
    sync = settings.get("sync") or Sync()
    refresh = sync.refresh or partial(_copy_masters, member)
    tied = sync.tied or _find_tied(member, chunks)
    return {
        "replicas": lambda model: Replicas.from_megatron(_groups.use_mpu_process_groups()),
        **settings,
        "sync": dataclasses.replace(sync, refresh=refresh, tied=tied),
    }


def _copy_masters(member: Any) -> None:
    """Masters were written: the model's copies of them follow, as after each step. Megatron has no
    public name for it."""
    if _has_masters(member):
        with torch.no_grad():
            member._copy_main_params_to_model_params()


def _find_tied(member: Any, chunks: list[Any]) -> list[tuple[torch.Tensor, Any]]:
    """The embedding that a pipeline's first and last stage have in common, where this rank has it
    in this optimizer."""
    is_pipeline = _parallel_state.get_pipeline_model_parallel_world_size() > 1
    if not is_pipeline or not _parallel_state.is_rank_in_embedding_group():
        return []
    trained = {id(p) for p in member.get_parameters()}
    tied = []
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        if getattr(chunk, "share_embeddings_and_output_weights", False):
            weight = chunk.shared_embedding_or_output_weight()
            own = getattr(weight, "main_param", weight)
            if id(own) in trained:
                tied.append((own, _parallel_state.get_embedding_group()))
    return tied


def _weigh(losses: Losses) -> list[tuple[torch.Tensor, torch.Tensor | float]]:
    """(loss, weight) of each micro-batch."""
    weighed: list[tuple[torch.Tensor, torch.Tensor | float]] = []
    for part in losses:
        first = next(iter(part.values())) if isinstance(part, Mapping) else part
        loss = torch.as_tensor(first).detach()
        if loss.numel() == 2:  # a sum, and the tokens that it is of
            total, tokens = loss.flatten()
            weighed.append((total / tokens.clamp(min=1), tokens))
        else:
            weighed.append((loss.reshape(()), 1.0))
    return weighed
