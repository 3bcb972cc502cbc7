"""hdet beside an optimizer and a scheduler of Megatron-Core."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..ensemble import Ensemble
from ..policies import Sync
from ..replicas import Replicas
from .common import check_settings, converge, inside, load, make, numbers, require, states, step, with_controller

__all__ = ["Wrapped", "wrap"]

try:
    _core = require("megatron.core")
except ImportError as error:  # the package has another name
    raise ImportError(f"{str(error).partition(': pip install')[0]}: pip install megatron-core") from error
_optimizers = require("megatron.core.optimizer.optimizer")
_parallel_state = _core.parallel_state
_random = require("megatron.core.tensor_parallel.random")
_groups = require("megatron.core.process_groups_config").ProcessGroupCollection
_log_once = require("megatron.core.utils").log_single_rank
_LOG = logging.getLogger("megatron.hdet")

Losses = Sequence[Any]
"""What ``forward_backward_func`` returns: a dict, or a number, for each micro-batch; empty on all stages but the last."""


def wrap(optimizer: Any, scheduler: Any, model: Any, **settings: Any) -> Wrapped:
    """What stands in the place of the scheduler::

        optimizer = get_megatron_optimizer(config, model)
        scheduler = OptimizerParamScheduler(optimizer, ...)
        scheduler = hdet.integrations.megatron.wrap(optimizer, scheduler, model, controller=hdet.AutoLR, total_steps=n)

    Replicas are those of ``parallel_state``: what is tensor, context and pipeline parallel is inside of one. The base rate is in the groups' ``lr``,
    as always; their ``max_lr`` stays the schedule's own.

    Args:
        optimizer: of ``get_megatron_optimizer``, in float32 or with float32 masters.
        scheduler: its ``OptimizerParamScheduler``.
        model: the list of chunks from which the optimizer was made.
        settings: of the `hdet.Ensemble`, such as ``controller``, ``knobs``, ``sync``, ``total_steps`` (the optimizer's). ``controller`` and ``replicas``
            may be functions of the model. ``log`` is called on rank 0 only.

    Raises:
        TypeError: a setting that an Ensemble does not have; an optimizer that is none of Megatron's.
        ValueError: a distributed optimizer, or another one that hdet does not know; no parameters on this rank; an OptimizerConfig without min_lr, where
            the rate decays; one controller for several optimizers; with an AutoLR: several optimizers, float16.
    """
    check_settings(settings)
    settings = dict(with_controller(settings))  # before there is a sync, which is not the user's
    members = _members(optimizer)
    if scheduler.lr_decay_style != "constant" and any(group.get("min_lr", 0.0) is None for group in optimizer.param_groups):
        raise ValueError(
            "the parameter groups have no min_lr, towards which the scheduler is to decay: Megatron would fail in its first step after the warm-up. Set "
            "min_lr in the OptimizerConfig, such as min_lr=0.0"
        )
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    ensembles = make(
        [member.optimizer for member in members],
        [_settings_of(member, chunks, settings) for member in members],
        chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks),
        tell=partial(_log_once, _LOG, logging.INFO),
        first=dist.get_rank() == 0,
        no_copies={"trains copies of the run, whose gradients no loss scale looks after: use bf16": members[0].config.fp16},
    )
    return Wrapped(optimizer, scheduler, chunks, members, ensembles)


class Wrapped:
    """Ensembles that know Megatron's optimizer and scheduler; made by `wrap`. What is not here is the scheduler's own."""

    def __init__(self, optimizer: Any, scheduler: Any, chunks: list[Any], members: list[Any], ensembles: list[Ensemble]) -> None:
        self.optimizer, self.scheduler, self.chunks, self.members = optimizer, scheduler, chunks, members
        self.ensembles = ensembles
        """One for each optimizer of a chain."""
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def ensemble(self) -> Ensemble:
        """The first optimizer's."""
        return self.ensembles[0]

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while it is copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    # -- a step --------------------------------------------------------------------------------------------------------------

    def explore(self) -> AbstractContextManager[None]:
        """See `Ensemble.explore`: around ``forward_backward_func``, where other knobs than rates are explored."""
        return inside(ensemble.explore() for ensemble in self.ensembles)

    def step(self, increment: int, losses: Losses = (), closure: Callable[[], Losses] | None = None) -> None:
        """After an ``optimizer.step()`` that was successful, in the place of ``scheduler.step(increment)``.

        Args:
            increment: the scheduler's.
            losses: what ``forward_backward_func`` has returned. The first number of each dict is the loss, of this rank and not yet averaged over
                data parallel ranks; two numbers are a sum over tokens, and how many there are.
            closure: for an `AutoLR`: calls ``forward_backward_func`` on the step's micro-batches once more, with
                ``forward_only=not torch.is_grad_enabled()``, and returns what that returns.

        Raises:
            What `Ensemble.step` raises.
        """
        with self._rescheduling():
            self.scheduler.step(increment)
        for ensemble in self.ensembles:
            for loss, weight in _numbers_of(losses):
                ensemble.observe(loss, weight)
        try:
            for ensemble in self.ensembles:
                step(ensemble, closure=None if closure is None else partial(self._anew, closure))
        finally:
            self._put_back()

    def _rescheduling(self) -> AbstractContextManager[None]:
        return inside(ensemble.rescheduling() for ensemble in self.ensembles)

    def _anew(self, closure: Callable[[], Losses]) -> torch.Tensor | None:
        """The closure: the step's losses, of the weights that are there now; with gradients where they are on, as Megatron's step takes them."""
        (member,) = self.members
        if self._gradients is None:
            self._gradients = [
                (p.main_grad, p.main_grad.clone()) for chunk in self.chunks for p in chunk.parameters() if hasattr(p, "main_grad")
            ]
        _to_model(member)
        states = _random.get_cuda_rng_tracker().get_states()
        try:
            if torch.is_grad_enabled():
                for chunk in self.chunks:
                    chunk.zero_grad_buffer()
                member.zero_grad()
            found = _numbers_of(closure())
        finally:
            _random.get_cuda_rng_tracker().set_states(states)
        if torch.is_grad_enabled():
            member.prepare_grads()
            if member.config.clip_grad > 0.0:
                member.clip_grad_norm(member.config.clip_grad)
        if not found:
            return None
        total, weights = sum(loss.float() * weight for loss, weight in found), sum(weight for _, weight in found)
        return torch.as_tensor(total / weights)

    def _put_back(self) -> None:
        """The run's own gradients, and weights where the model has copies of them."""
        if self._gradients is not None:
            for gradient, own in self._gradients:
                gradient.copy_(own)
            for member in self.members:
                _to_model(member)
            self._gradients = None

    # -- where others look ---------------------------------------------------------------------------------------------------

    def converge(self) -> None:
        """Before an evaluation, before a checkpoint and at the end, on every rank: replicas are averaged, unless they are known to be equal."""
        converge(self.ensembles)

    def metrics(self) -> dict[str, float]:
        """For the log, beside the groups' ``lr``, which is the base rate in force: corrections and this replica's multipliers."""
        return numbers(*self.ensembles)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own, and the Ensembles' beside it. After `converge`."""
        return {**self.scheduler.state_dict(), "hdet": states(self.ensembles)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also one of the scheduler alone. See `Ensemble.load_state_dict`."""

        def load_scheduler() -> None:
            with self._rescheduling():
                self.scheduler.num_steps = 0  # Megatron's adds to it
                self.scheduler.load_state_dict({key: value for key, value in state.items() if key != "hdet"})

        load(self.ensembles, state.get("hdet", ()), load_scheduler)

    def close(self) -> None:
        """See `Ensemble.close`."""
        for ensemble in self.ensembles:
            ensemble.close()


# -- what is wrapped ---------------------------------------------------------------------------------------------------------


def _members(optimizer: Any) -> list[Any]:
    """Of a chain, or the only one. Raises TypeError or ValueError for what is not known."""
    if not isinstance(optimizer, (_optimizers.MegatronOptimizer, _optimizers.ChainedOptimizer)):
        raise TypeError(f"optimizer must be what get_megatron_optimizer gives, got {type(optimizer).__name__}")
    members = list(optimizer.chained_optimizers) if isinstance(optimizer, _optimizers.ChainedOptimizer) else [optimizer]
    for member in members:
        kind = type(member).__name__
        if getattr(member.config, "use_distributed_optimizer", False) or "Distributed" in kind:
            raise ValueError(
                f"{kind} keeps one copy of the optimizer's state for all data parallel ranks, so there are no replicas: set "
                "use_distributed_optimizer=False, in the OptimizerConfig and in the DistributedDataParallelConfig"
            )
        if not isinstance(member, (_optimizers.FP32Optimizer, _optimizers.Float16OptimizerWithFloat16Params)):
            raise ValueError(f"the optimizer is a {kind}, which hdet does not know: use 'adam' or 'sgd' in the OptimizerConfig")
        if type(member.optimizer).__module__.startswith("megatron."):
            raise ValueError(
                f"{type(member.optimizer).__name__} steps parts of the parameters in several optimizers: leave optimizer_cpu_offload out"
            )
    if not members or any(member.is_stub_optimizer for member in members):
        raise ValueError("this rank has no parameters to train: lay the frozen parts out so that each rank has some")
    return members


def _settings_of(member: Any, chunks: list[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of the Ensemble of one optimizer."""
    sync = settings.get("sync") or Sync()
    extra: dict[str, Any] = {}
    if sync.refresh is None and isinstance(member, _optimizers.Float16OptimizerWithFloat16Params):
        extra["refresh"] = partial(_to_model, member)
    if not sync.tied:
        extra["tied"] = _tied(member, chunks)
    replicas = {} if "replicas" in settings else {"replicas": Replicas.from_megatron(_groups.use_mpu_process_groups())}
    return {**replicas, **settings, "sync": dataclasses.replace(sync, **extra)}


def _to_model(member: Any) -> None:
    """Masters were written: the model's copies of them follow, as after each step."""
    if isinstance(member, _optimizers.Float16OptimizerWithFloat16Params):
        with torch.no_grad():
            member._copy_main_params_to_model_params()


def _tied(member: Any, chunks: list[Any]) -> list[tuple[torch.Tensor, Any]]:
    """The embedding that a pipeline's first and last stage have in common, where this rank has it in this optimizer."""
    if _parallel_state.get_pipeline_model_parallel_world_size() == 1 or not _parallel_state.is_rank_in_embedding_group():
        return []
    trained = {id(p) for p in member.get_parameters()}
    found = []
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        if getattr(chunk, "share_embeddings_and_output_weights", False):
            weight = chunk.shared_embedding_or_output_weight()
            own = getattr(weight, "main_param", weight)
            if id(own) in trained:
                found.append((own, _parallel_state.get_embedding_group()))
    return found


def _numbers_of(losses: Losses) -> list[tuple[torch.Tensor, torch.Tensor | float]]:
    """(loss, weight) of each micro-batch."""
    found: list[tuple[torch.Tensor, torch.Tensor | float]] = []
    for part in losses:
        loss = torch.as_tensor(next(iter(part.values())) if isinstance(part, Mapping) else part).detach()
        if loss.numel() == 2:  # a sum, and the tokens that it is of
            total, tokens = loss.flatten()
            found.append((total / tokens.clamp(min=1), tokens))
        else:
            found.append((loss.reshape(()), 1.0))
    return found
