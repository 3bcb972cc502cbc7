"""The key under which a tensor is stored: its name if all ranks have the same tensor, else with the number of its holder before it.

torch.distributed.checkpoint takes a plain tensor of one name on several ranks for one tensor and writes any of them. So whatever can
differ between ranks must differ in its key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..replicas import Replicas
from ..tensors.dtensor import is_sharded

_TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")
_PREFIX = re.compile(r"(replica\d+/)?(member\d+/)?")


def bare(key: str) -> str:
    """The name without a prefix of `Keys`."""
    return key[_PREFIX.match(key).end() :]  # type: ignore[union-attr]


class Keys:
    """Prefixes of a rank. Empty: the tensor is everyone's. ``member2/``: of member 2 of every replica. ``replica1/``: of replica 1 alone.

    A replica's members hold one tensor together if it is a DTensor whose mesh connects them, or a parameter that
    DistributedDataParallel keeps equal on them; else each member's is its own, whatever its name.
    """

    def __init__(self, model: nn.Module, replicas: Replicas) -> None:
        self.replicas = replicas
        self.member_of = {rank: m for row in replicas.ranks for m, rank in enumerate(row)}
        self.members = replicas.members
        self.several_processes = replicas.world_group is not None
        self._equal_over = {id(p): ranks for p, ranks in _kept_equal(model)} if self.members > 1 else {}

    def shared(self, tensor: torch.Tensor) -> str:
        """For what is the same on all replicas after a converge."""
        if self.members == 1:
            return ""
        ranks = tensor.device_mesh.mesh.flatten().tolist() if is_sharded(tensor) else self._equal_over.get(id(tensor), [])  # type: ignore[attr-defined]
        holders = {self.member_of[rank] for rank in ranks if rank in self.member_of} | {self.replicas.member}
        return "" if len(holders) == self.members else f"member{min(holders)}/"

    def of_replica(self, tensor: torch.Tensor) -> str:
        """For what each replica has for itself."""
        return f"replica{self.replicas.index}/{self.shared(tensor)}" if self.several_processes else ""

    def of_rank(self, replicas: int | None = None, members: int | None = None) -> str:
        """For what each rank has for itself; in a checkpoint of other numbers of replicas and members, modulo these."""
        if not self.several_processes:
            return ""
        index, member = self.replicas.index % (replicas or self.replicas.count), self.replicas.member % (members or self.members)
        return f"replica{index}/member{member}/"


class Inventory:
    """What a model's state_dict has, by names without the parts that wrappers add (DDP, torch.compile, activation checkpointing)."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Live tensors, each once, under the first of its names."""
        self.others: dict[str, Any] = {}
        """Extra states of modules that are no tensors."""
        self.first_name: dict[str, str] = {}
        """By raw name, that of the model's own state_dict."""
        self.name_of: dict[int, str] = {}
        """By id of a live tensor."""
        self.cleaned: dict[str, str] = {}
        """By raw name, without wrappers, also where a tied tensor has a first name elsewhere."""
        for raw, value in model.state_dict(keep_vars=True).items():
            self.cleaned[raw] = _name(model, raw)
            name = self.first_name[raw] = self.name_of.get(id(value)) or self.cleaned[raw]
            if isinstance(value, torch.Tensor):
                self.name_of[id(value)] = name
                self.tensors[name] = value
            else:
                self.others[name] = value


def _name(model: nn.Module, raw: str) -> str:
    parts, at = [], model
    for part in raw.split("."):
        if not (part in _TRANSPARENT or (part == "module" and isinstance(at, nn.parallel.DistributedDataParallel))):
            parts.append(part)
        at = getattr(at, part, None)  # type: ignore[assignment]
    return ".".join(parts)


def _kept_equal(model: nn.Module) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Parameters that a DistributedDataParallel keeps equal, and the ranks it does so on."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            ranks = dist.get_process_group_ranks(module.process_group)
            for name, parameter in module.module.named_parameters():
                if name not in module.parameters_to_ignore:
                    yield parameter, ranks
