"""What the host says in each step: the table of numbers that the kernels read, and what is refused
in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .arguments import check_tensor
from .interface import COUPLED, DECOUPLED, StepOptions, StepSettings, StepTensors

CALL_SETTINGS = 1
GROUP_SETTINGS = len(StepSettings._fields) - 1
"""in doubles, as in csrc/core/hyper.h: CallSettings, and GroupSettings with the fields of
StepSettings but for the multipliers"""


def count_settings(num_groups: int, num_replicas: int) -> int:
    """The length of settings_numbers."""
    return CALL_SETTINGS + num_groups * (GROUP_SETTINGS + num_replicas)


def settings_numbers(settings: Sequence[StepSettings], options: StepOptions) -> list[float]:
    """The table, in the order of csrc/core/hyper.h: of the call, of each group,
    rho[groups][replicas] (Eq. 1).

    A rate in a tensor is 0 here: the kernels read it where it is. Nothing is checked.
    """
    numbers = [options.max_norm]
    for s in settings:
        numbers += (0.0 if isinstance(s.lr, Tensor) else s.lr, *s[2:])
    for s in settings:
        numbers += s.multipliers
    return numbers


Rate = tuple[int, torch.dtype | None, torch.Size | None]
"""address, type and shape of a learning rate in device memory; address 0: it is a number of the
table"""


class SettingsTable:
    """What a plan's device has of settings: they are checked and written where they differ from it.

    Another object for a rate in the same memory, like the `detach()` of each step, is the same
    rate.
    """

    def __init__(
        self, tensors: StepTensors, write: Callable[[list[float], list[int]], object]
    ) -> None:
        """`write` gets the numbers, and for each group the address of its rate, or 0."""
        self.tensors, self._write = tensors, write
        self._numbers: list[float] = []
        self._rates: list[Rate] = []
        self._tensors: list[object] = []  # kept alive

    def take(self, settings: Sequence[StepSettings], options: StepOptions) -> None:
        numbers, rates = settings_numbers(settings, options), [_rate(s.lr) for s in settings]
        if numbers == self._numbers and rates == self._rates:
            return
        check_settings(settings, self.tensors)
        self._write(numbers, [address for address, _, _ in rates])
        self._numbers, self._rates, self._tensors = numbers, rates, [s.lr for s in settings]


def _rate(lr: float | Tensor) -> Rate:
    return (lr.data_ptr(), lr.dtype, lr.shape) if isinstance(lr, Tensor) else (0, None, None)


def check_settings(settings: Sequence[StepSettings], tensors: StepTensors) -> None:
    """One entry for each group, with hyperparameters that are finite and in range."""
    if len(settings) != tensors.num_groups:
        raise ValueError(f"{len(settings)} settings for {tensors.num_groups} groups")
    device = tensors.params[0][0].device
    for g, s in enumerate(settings):
        check_group(s, tensors.rule, tensors.num_replicas, device, f"group {g}")
    if tensors.rule == "sgd" and any(s.beta1 != 0 for s in settings):
        for i, group in enumerate(tensors.groups):
            if settings[group].beta1 != 0 and (
                tensors.exp_avgs is None or tensors.exp_avgs[i] is None
            ):
                raise ValueError(
                    f"momentum is {settings[group].beta1}, but exp_avg of parameter {i} is "
                    "missing: plan again with one"
                )


def check_group(
    s: StepSettings, rule: str, num_replicas: int, device: torch.device, name: str
) -> None:
    """The hyperparameters of one group. NaN fails every comparison."""
    if isinstance(s.lr, Tensor):
        check_scalar(s.lr, f"lr of {name}", device)
    elif not 0 <= s.lr < math.inf:
        raise ValueError(f"lr of {name} must be finite and not negative, got {s.lr}")
    if not (0 <= s.eps < math.inf and 0 <= s.weight_decay < math.inf):
        raise ValueError(
            f"eps and weight_decay of {name} must be finite and not negative, got {s.eps} and "
            f"{s.weight_decay}"
        )
    if len(s.multipliers) != num_replicas:
        raise ValueError(
            f"multipliers of {name} has {len(s.multipliers)} entries for {num_replicas} replicas"
        )
    for rho in s.multipliers:
        if not 0 <= rho < math.inf:
            raise ValueError(
                f"multipliers of {name} must be finite and not negative, got {list(s.multipliers)}"
            )
    if rule == "sgd":
        if not (0 <= s.beta1 < math.inf and -math.inf < s.dampening < math.inf):
            raise ValueError(
                f"momentum of {name} must be finite and not negative and dampening finite, got "
                f"beta1={s.beta1}, dampening={s.dampening}"
            )
        if s.nesterov and not (s.beta1 > 0 and s.dampening == 0):
            raise ValueError(
                f"nesterov of {name} needs momentum > 0 and dampening 0, got beta1={s.beta1}, "
                f"dampening={s.dampening}"
            )
    elif not (0 <= s.beta1 < 1 and 0 <= s.beta2 < 1):
        raise ValueError(
            f"beta1 and beta2 of {name} must be in [0, 1), got {s.beta1} and {s.beta2}"
        )
    if num_replicas > 1 and rule in COUPLED and s.weight_decay != 0:
        raise ValueError(
            f"weight_decay={s.weight_decay} of {name} is part of the gradient for {rule}, so "
            f"{num_replicas} replicas cannot share moments: "
            f"set it to 0 or use {' or '.join(DECOUPLED)}"
        )


def check_scalar(tensor: object, name: str, device: torch.device) -> None:
    """Accepts one float32 number on the device."""
    check_tensor(tensor, name, device, (torch.float32,))
    if tensor.numel() != 1:  # type: ignore[attr-defined]
        raise ValueError(f"{name} must hold one number, got the shape {tuple(tensor.shape)}")  # type: ignore[attr-defined]


def check_options(options: StepOptions, tensors: StepTensors) -> None:
    """What is folded into a step must fit the plan."""
    device = tensors.params[0][0].device
    for name in ("grad_scale", "found_inf"):
        if (value := getattr(options, name)) is not None:
            check_scalar(value, name, device)
    if not options.max_norm >= 0:
        raise ValueError(
            f"max_norm={options.max_norm} must not be negative; 0 takes no norm, math.inf does not "
            "clip"
        )


def check_shares(weights: Sequence[float], num_replicas: int) -> None:
    """Weights of a mean, as `normalised` returns them."""
    if len(weights) != num_replicas:
        raise ValueError(f"weights has {len(weights)} entries for {num_replicas} replicas")
    if not (all(0 <= w < math.inf for w in weights) and abs(math.fsum(weights) - 1) < 1e-6):
        raise ValueError(
            f"weights must be finite, not negative and sum to 1, got {list(weights)}: divide them "
            "by their sum"
        )
