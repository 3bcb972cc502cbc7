"""What a model and an optimizer have, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")


class Inventory:
    """What a model's state_dict has, by names without the parts that wrappers add.

    Attributes:
        tensors: live tensors, each once, under the first of its names.
        others: extra states of modules that are no tensors.
        first_name: by raw name, that of the model's own state_dict, the name in ``tensors``.
        name_of: by id of a live tensor, its name in ``tensors``.
        cleaned: by raw name, the name without wrappers, also of a tied tensor's other names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.others: dict[str, Any] = {}
        self.first_name: dict[str, str] = {}
        self.name_of: dict[int, str] = {}
        self.cleaned: dict[str, str] = {}
        for raw, value in model.state_dict(keep_vars=True).items():
            self.cleaned[raw] = _clean_name(model, raw)
            name = self.first_name[raw] = self.name_of.get(id(value)) or self.cleaned[raw]
            if isinstance(value, torch.Tensor):
                self.name_of[id(value)] = name
                self.tensors[name] = value
            else:
                self.others[name] = value


def _clean_name(model: nn.Module, raw: str) -> str:
    parts, module = [], model
    for part in raw.split("."):
        is_ddp = part == "module" and isinstance(module, nn.parallel.DistributedDataParallel)
        if not (is_ddp or part in _TRANSPARENT):
            parts.append(part)
        module = getattr(module, part, None)  # type: ignore[assignment]
    return ".".join(parts)


def optimizer_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters in the order in which a state_dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]
