"""An optimizer's state by parameter name, taken and given back without a step of the optimizer."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..optim.state import REPLICA_KEYS

__all__ = ["blank_state", "listed", "on_the_device_of"]


def listed(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters in the order in which a state_dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def blank_state(optimizer: Optimizer, group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """What the optimizer keeps for a parameter: names, shapes and dtypes, as a place to load into; the values mean nothing.

    Libraries find this out by a step of the optimizer itself with rate 0, which counts in Adam's correction, runs hooks, and can turn
    -0 into 0. Here a stand-in of the same class steps a tensor of zeros.
    """
    image = torch.nn.Parameter(torch.zeros_like(param.detach()))
    image.grad = torch.zeros_like(param.detach())
    rates = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0.0 for key, value in group.items() if key == "lr"}
    stand_in: Any = object.__new__(type(optimizer))
    # Wrappers of the instance's methods stay behind, and what a GradScaler has left on it.
    left_out = {name for name in vars(optimizer) if callable(getattr(type(optimizer), name, None))} | {"grad_scale", "found_inf"}
    stand_in.__dict__.update({name: value for name, value in vars(optimizer).items() if name not in left_out})
    stand_in.__dict__.update(
        {name: OrderedDict() for name in vars(optimizer) if name.startswith("_optimizer_") and name.endswith("_hooks")}
    )
    stand_in.state, stand_in.param_groups = defaultdict(dict), [{**group, **rates, "params": [image]}]
    if hasattr(stand_in, "set_replicas"):  # hdet's: no plan of the original's, one replica
        stand_in.num_replicas, stand_in._sets, stand_in.multipliers = 1, {}, [[1.0]]
        stand_in._forget()
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # without torch's wrapper, which runs the hooks that are registered for all optimizers
    try:
        step(stand_in)
    except Exception:  # noqa: BLE001 - one that needs more than gradients, such as LBFGS: what it keeps is known after its first step
        return {}
    return {key: value for key, value in stand_in.state[image].items() if value is not None and key not in REPLICA_KEYS}


def on_the_device_of(loaded: Any, present: Any) -> Any:
    """A loaded group setting where the present one lies: torch moves states to the parameters' devices, but not settings."""
    return loaded.to(present.device) if isinstance(loaded, torch.Tensor) and isinstance(present, torch.Tensor) else loaded
