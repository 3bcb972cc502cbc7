"""FusedAdamW: torch.optim.AdamW's arguments, results and state, one kernel call for all parameters, a multiplier inside."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from hdet import kernels
from hdet.kernels import AdamWPlan, AdamWSettings, AdamWTensors

# What torch.optim.AdamW keeps in a parameter group and this class does not use: carried, so that states pass both ways.
_TORCH_OPTIONS: dict[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


class FusedAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019) as torch.optim.AdamW computes it, for float32 parameters on one device.

    The state has torch's layout (`step` a 0-d float32 tensor on the CPU, `exp_avg`, `exp_avg_sq`): the state_dict of
    torch.optim.AdamW loads here and the other way round.

    `multipliers` is a list with one number for each parameter group, 1.0 by default: the step and its weight decay use
    lr * multiplier (Eq. 2) and `group["lr"]` stays as it is. It belongs to the running process, not to the training state: it is not
    in state_dict, but a copy or a pickle of the optimizer keeps it.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as torch.optim.AdamW. foreach and fused choose between torch's own
            implementations and are ignored; amsgrad, capturable and differentiable must be off. lr may be a one-element tensor; one on a GPU is read in
            each step, which waits for the GPU.
        backend: "auto", "cpu", "cuda" or "torch"; see hdet.kernels.

    Raises ValueError or TypeError, before anything is changed, for hyperparameters out of range or NaN, amsgrad, and tensors that are
    not float32, dense, contiguous and on one device.
    """

    multipliers: list[float]

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        backend: str = "auto",
    ) -> None:
        kernels.check_name(backend)
        for name, value in (("capturable", capturable), ("differentiable", differentiable)):
            if value:
                raise ValueError(f"{name}={value!r} is not supported by FusedAdamW; use torch.optim.AdamW for it")
        self.backend = backend
        self.multipliers = []
        self._prepared: _Prepared | None = None
        options = {"amsgrad": amsgrad, "foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize, **_TORCH_OPTIONS, **options}
        _check_group(defaults, "the defaults")
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, with a multiplier of 1.0. A refused group leaves the optimizer as it was."""
        name = f"parameter group {len(self.param_groups)}"
        _check_group({**self.defaults, **param_group}, name)
        if isinstance(param_group.get("params"), Iterator):  # read here and again by torch
            param_group["params"] = list(param_group["params"])
        _check_dtypes(param_group.get("params"), name)
        super().add_param_group(param_group)
        self.multipliers.append(1.0)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "multipliers": list(self.multipliers), "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called with a whole optimizer by pickle and copy, and with `state` and `param_groups` by load_state_dict.
        groups = state["param_groups"]
        for i, group in enumerate(groups):
            for key, value in {**_TORCH_OPTIONS, "maximize": False}.items():
                group.setdefault(key, value)
            group["decoupled_weight_decay"] = True  # as torch.optim.AdamW, which also takes the state of an Adam
            _check_group(group, f"parameter group {i} of the loaded state")
        for values in state["state"].values():
            absent = [key for key in ("step", "exp_avg", "exp_avg_sq") if values and key not in values]
            if absent:
                raise ValueError(f"the loaded state of a parameter lacks {', '.join(absent)}: it is not the state of an AdamW")
        super().__setstate__(state)
        for values in self.state.values():
            if "step" in values:  # torch keeps a number, float64 or a tensor on the device, depending on version and options
                values["step"] = torch.tensor(float(values["step"]), dtype=torch.float32)
        self._prepared = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient. Returns the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if len(self.multipliers) != len(self.param_groups):
            raise ValueError(f"multipliers has {len(self.multipliers)} entries for {len(self.param_groups)} parameter groups")
        params: list[Tensor] = []
        gradients: list[Tensor] = []
        ends: list[int] = []
        for group in self.param_groups:
            for param in group["params"]:
                if (gradient := param.grad) is not None:
                    params.append(param)
                    gradients.append(gradient)
            ends.append(len(params))
        if params:
            prepared = self._prepared
            settings = [_settings(group, rho) for group, rho in zip(self.param_groups, self.multipliers, strict=True)]
            if prepared is None or not prepared.fits(self.state, params, ends):
                kernels.check_settings(settings, len(settings))
                prepared = self._prepared = self._prepare(params, gradients, ends)
            prepared.plan.step(gradients, [settings[i] for i in prepared.groups])
            torch.autograd.graph.increment_version(params)  # what a backward pass has saved of them is no longer valid
        return loss

    def _prepare(self, params: list[Tensor], gradients: list[Tensor], ends: list[int]) -> _Prepared:
        """A plan for these parameters. Creates the state of those that step for the first time, after all checks."""
        kernels.select(self.backend, params[0].device)
        kernels.check_parameters(params, gradients)
        for param in params:
            if "exp_avg" not in self.state[param]:
                self.state[param]["step"] = torch.tensor(0.0, dtype=torch.float32)
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        # One row of hyperparameters for each group and step count: a parameter may have missed steps for want of a gradient.
        rows: dict[tuple[int, float], int] = {}
        row_of = []
        group = 0
        for i, param in enumerate(params):
            while i >= ends[group]:
                group += 1
            row_of.append(rows.setdefault((group, self.state[param]["step"].item()), len(rows)))
        states = [self.state[param] for param in params]
        exp_avgs, exp_avg_sqs, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        tensors = AdamWTensors(params, exp_avgs, exp_avg_sqs, steps, row_of)
        return _Prepared(self.state, tensors, states, ends, kernels.adamw_plan(tensors, self.backend), [group for group, _ in rows])


class _Prepared:
    """A plan together with what it was made for, to notice when that is no longer what the optimizer holds."""

    def __init__(
        self,
        container: dict[Tensor, Any],
        tensors: AdamWTensors,
        states: list[dict[str, Any]],
        ends: list[int],
        plan: AdamWPlan,
        groups: list[int],
    ) -> None:
        self.container = container
        self.size = len(container)
        self.tensors = tensors
        self.states = states
        self.addresses = [param.data_ptr() for param in tensors.params]
        self.ends = ends
        self.plan = plan
        self.groups = groups  # of each row

    def fits(self, container: dict[Tensor, Any], params: list[Tensor], ends: list[int]) -> bool:
        """Whether a step on these parameters is the step that was planned: the same tensors, at the same places, in the same groups."""
        t = self.tensors
        same = operator.is_
        return (
            container is self.container
            and len(container) == self.size
            and ends == self.ends
            and all(map(same, params, t.params))
            and [param.data_ptr() for param in params] == self.addresses
            and all(map(same, [state["exp_avg"] for state in self.states], t.exp_avgs))
            and all(map(same, [state["exp_avg_sq"] for state in self.states], t.exp_avg_sqs))
            and all(map(same, [state["step"] for state in self.states], t.steps))
        )


def _settings(group: dict[str, Any], multiplier: float) -> AdamWSettings:
    beta1, beta2 = group["betas"]
    return AdamWSettings(
        float(group["lr"]),
        multiplier,
        float(beta1),
        float(beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
        bool(group["maximize"]),
    )


def _check_group(group: dict[str, Any], name: str) -> None:
    """Refuses, by name, what a group must not contain. NaN fails every comparison."""
    for key in ("lr", "eps", "weight_decay"):
        value = group[key]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{key} of {name} must be a number or a one-element tensor, got the shape {tuple(value.shape)}")
        if not 0.0 <= float(value) < math.inf:
            raise ValueError(f"{key}={float(value)} of {name} must be finite and not negative")
    betas = group["betas"]
    if len(betas) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise ValueError(f"betas={betas} of {name} must be two numbers in [0, 1)")
    if group["amsgrad"]:
        raise ValueError(f"amsgrad=True of {name} is not supported by FusedAdamW; use torch.optim.AdamW for it")


def _check_dtypes(params: Any, name: str) -> None:
    """Refuses parameters at once that no step could update. Frozen ones may have any dtype."""
    entries: Sequence[Any] = [params] if isinstance(params, Tensor) else list(params or ())
    for i, entry in enumerate(entries):
        param = entry[1] if isinstance(entry, tuple) else entry  # torch also takes (name, parameter)
        if isinstance(param, Tensor) and param.requires_grad and param.dtype != torch.float32:
            raise TypeError(f"parameter {i} of {name} has the dtype {param.dtype}; FusedAdamW supports torch.float32 only")
