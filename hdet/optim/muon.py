"""FusedMuon: Muon for the matrices of a model and AdamW for the rest, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hdet.kernels import StepOptions
from hdet.kernels.spec.arguments import check_apart
from hdet.kernels.spec.settings import check_group
from hdet.profiling import ranged
from hdet.tensors import dtensor as shards
from hdet.tensors import strides

from . import group_checks as groups
from . import lists, owners
from . import step_plans as plans
from .finish import ShardedClip
from .fused import FusedOptimizer, Options
from .matrices import Matrix, MatrixStep, Row, check_matrices
from .moment_storage import dtype_for
from .newton_schulz import Iteration
from .split_params import split_groups
from .state import Layout, adopt, kept_masters, state_sets
from .step_plans import Hyper, add_entries

_ADJUST = (None, "original", "match_rms_adamw")
_KEYS = {
    True: ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    False: ("lr", "betas", "eps", "weight_decay"),
}
"""what a group must have, by its `use_muon`"""


class FusedMuon(FusedOptimizer):
    """Muon (Jordan et al. 2024) for matrices, as torch.optim.Muon computes it, and AdamW for every other parameter.

    With gradient g, rate r = lr * multiplier (Eq. 2) and NS the Newton-Schulz iteration (newton_schulz.py)::

        b = momentum * b + (1 - momentum) * g       momentum_buffer
        u = NS((1 - momentum) * g + momentum * b if nesterov else b)
        p = p * (1 - r * weight_decay) - r * adjust * u

    A parameter belongs to a group that says ``use_muon: True`` or ``False``. A group that does not say is split by the argument
    `use_muon` into two, named "muon" and "adamw", so that `hdet.LearningRate(groups=["muon", "adamw"])` explores the two rates.

    Args:
        params: parameters, (name, parameter) pairs as of model.named_parameters(), or groups of either.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: of Muon, as torch.optim.Muon. Momentum lies in
            [0, 1). adjust_lr_fn: "original" (None) multiplies the rate of an (m, n) matrix by sqrt(max(1, m / n)), "match_rms_adamw" by
            0.2 sqrt(max(m, n)), with which AdamW's rate and decay can be used (Liu et al. 2025, arXiv 2502.16982).
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: of AdamW.
        use_muon: (name, parameter) -> bool, for groups that do not say. Default: by names, which have to be given then, see
            `hdet.optim.hidden_matrix`. Parameters of more than two dimensions are stacks of matrices, (E, m, n): experts, not convolutions.
        ns_dtype: of Newton-Schulz, torch.float32 or torch.bfloat16. None: float32 on a CPU, bfloat16 elsewhere; torch's is bfloat16.
        decay_at: as FusedAdamW, of both kinds.
        others: as FusedOptimizer. max_grad_norm is the norm of all gradients, of both kinds.

    All matrices of one shape go through Newton-Schulz as one batch, and K replicas (`set_replicas`) share one direction. The rest is one
    kernel call. State of a matrix: momentum_buffer, as torch.optim.Muon's, and step; of the rest AdamW's. States of torch's two load:
    groups without use_muon are told by their keys.

    DTensors: the momentum is sharded as its parameter. A matrix that is cut over one mesh dimension (FSDP2, HSDP, tensor parallelism) is put
    together on one rank of it, in `ns_dtype`; ranks get equal work, m * n * min(m, n), and exchange while they compute. One that is cut over
    several dimensions is gathered by each of their ranks. All ranks of a mesh must step, with the same gradients missing.

    Refused, before anything is changed: set_replicas(storage="displacement"), CUDA graphs, a rate of matrices in a tensor on a device,
    matrices made in inference mode, and what FusedAdamW refuses. Raises ValueError or TypeError, RuntimeError for graphs.

    Cost of Newton-Schulz for an (m, n) matrix, m <= n: 2 m (2 m n + m^2) operations a step; in float32 with n >= 4 m two thirds of that.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8))
    >>> optimizer = hdet.FusedMuon(model.named_parameters(), lr=0.02, use_muon=lambda name, p: name == "1.weight")
    >>> [(group["name"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
    [('muon', 0.02, 1), ('adamw', 0.001, 2)]
    >>> model(torch.arange(4)).square().mean().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model[1].weight]), sorted(optimizer.state[model[1].bias])
    (['momentum_buffer', 'step'], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    rule = "adamw"  # of what the kernels step; decay is decoupled in both kinds
    _keys = ("lr", "eps", "weight_decay")
    _moments = ("exp_avg", "exp_avg_sq")
    _required = ("step", "exp_avg", "exp_avg_sq")
    _carried: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        use_muon: Callable[[str, Tensor], bool] | None = None,
        ns_dtype: torch.dtype | None = None,
        decay_at: str = "replica",
        **options: Unpack[Options],
    ) -> None:
        if ns_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"ns_dtype={ns_dtype!r} is not supported; choose torch.float32, torch.bfloat16 or None")
        self.ns_dtype = ns_dtype
        values = (lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn)
        adamw = {"lr": adamw_lr, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": adamw_weight_decay}
        self._kinds: dict[bool, dict[str, Any]] = {True: dict(zip(_KEYS[True], values, strict=True)), False: adamw}
        for use, kind in self._kinds.items():
            self._check_group({**kind, "use_muon": use}, "the defaults")
        super().__init__(split_groups(params, use_muon), {}, decay_at=decay_at, **options)

    # -- groups ----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which says use_muon; the other settings are those of the constructor where it does not say them."""
        use = param_group.get("use_muon")
        if not isinstance(use, bool):
            raise ValueError(f"use_muon of parameter group {len(self.param_groups)} is {use!r}: say True (matrices) or False (AdamW)")
        name = "muon" if use else "adamw"
        free = all(group.get("name") != name for group in self.param_groups)
        super().add_param_group({**self._kinds[use], **({"name": name} if free else {}), **param_group})

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        use = group.get("use_muon")
        if use is None:
            return  # the defaults of torch's base class: there are none
        groups.check_not_negative(group, ("lr", "eps", "weight_decay"), name)
        if not use:
            groups.check_betas(group, name)
            groups.check_off(group, ("amsgrad", "differentiable"), name, "FusedAdamW")
            return
        _check_muon(group, name)
        groups.check_dimensions(group.get("params", ()), name)

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        if group["use_muon"]:
            return group["lr"], group["momentum"], 0.0, group["eps"], group["weight_decay"], 0.0, group["nesterov"], group["maximize"]
        beta1, beta2 = group["betas"]
        return group["lr"], beta1, beta2, group["eps"], group["weight_decay"], 0.0, False, group["maximize"]

    def _by_muon(self) -> list[int]:
        """The group of each parameter that is a matrix, -1 of the others."""
        return [i if group["use_muon"] else -1 for i, group in enumerate(self.param_groups) for _ in group["params"]]

    # -- state -----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "ns_dtype": self.ns_dtype, "_kinds": self._kinds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ours = getattr(self, "param_groups", [])  # none while a copy is made
        for i, group in enumerate(state["param_groups"]):
            name = f"parameter group {i} of the loaded state"
            use = group.setdefault("use_muon", "ns_steps" in group)  # torch's optimizers do not say it
            if absent := [key for key in _KEYS[bool(use)] if key not in group]:
                raise ValueError(f"{name} lacks {', '.join(absent)}: it is not that of torch.optim.{'Muon' if use else 'AdamW'}")
            if i < len(ours):
                if use != ours[i]["use_muon"]:
                    raise ValueError(f"use_muon={use} of {name}, but that of this optimizer's is {not use}: give its groups in this order")
                if "name" in ours[i]:
                    group.setdefault("name", ours[i]["name"])
        super().__setstate__(state)

    def _layout(self, param: Tensor) -> Layout:
        of_matrix = any(param is p for group in self.param_groups if group["use_muon"] for p in group["params"])
        return self._layout_of_matrices(param) if of_matrix else super()._layout(param)

    def _layout_of_matrices(self, param: Tensor) -> Layout:
        return Layout(("momentum_buffer",), ("momentum_buffer",), dtype_for(self.moment_dtype, param), self.master_weights)

    def _take_over(self) -> None:
        super()._take_over()
        self._adopt((p, self.state[p]) for p, g in zip(self._listed(), self._by_muon(), strict=True) if g >= 0 and p in self.state)

    @staticmethod
    def _adopt(states: Iterable[tuple[Tensor, Mapping[str, Any]]]) -> None:
        """What was written to matrices goes into their float32 masters. All are looked at: that is little beside Newton-Schulz."""
        for param, state in states:
            for tensor, master in zip(state_sets(state, param), kept_masters(state), strict=False):
                if master.dtype == torch.float32:
                    adopt(tensor, master)

    def check_storage(self, storage: str, count: int) -> None:
        """Raises ValueError for anything but "parameters": replicas of matrices are not kept as a base and a displacement."""
        if storage == "displacement":
            raise ValueError(
                'storage="displacement" is not supported by FusedMuon, whose matrices have no such step: use storage="parameters"'
            )
        super().check_storage(storage, count)

    # -- a step ----------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        super()._forget()
        self._skipped: Tensor | None = None
        self._apart: Any = None  # addresses of parameters that do not overlap

    @ranged("hdet.optimizer.step")
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient, in all replicas. Returns the closure's loss, or None.

        Raises ValueError or TypeError, before anything is changed, for hyperparameters and tensors that cannot be used.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("FusedMuon cannot be captured in a CUDA graph, its rates of matrices are Python numbers: step outside of it")
        params, group_of = self._listed(), self._by_muon()
        gradients = lists.gradients(params)
        others = [None if group >= 0 else gradient for gradient, group in zip(gradients, group_of, strict=True)]
        absent = lists.absent(others)
        planned = self._plan_for(params, absent)
        settings = planned.settings_of(self._hypers(), self.multipliers, self.decay_at == "base")
        pairs = enumerate(zip(gradients, params, strict=True))
        own = [None if g is None else shards.gradient_on(g, p, f"the gradient of parameter {i}") for i, (g, p) in pairs]
        laid = planned.laid_and_checked(own)  # of both kinds, before a norm is taken of them
        by_device = plans.by_device(params, [i for i, g in enumerate(own) if g is not None and group_of[i] >= 0])
        steps = [(device, [self._matrix(i, group_of[i], params[i], laid[i]) for i in places]) for device, places in by_device.items()]
        rows = {device: self._rows(device, {matrix.group for matrix in matrices}) for device, matrices in steps}
        for _, matrices in steps:
            check_matrices(matrices, self.num_replicas)
        self._check_apart(params, [*planned.places, *(matrix.place for _, matrices in steps for matrix in matrices)])
        options = self._clipped(params, own)
        planned.watch.check()
        self._skipped = None  # of AdamW alone the plan tells
        planned.step([None if group >= 0 else g for g, group in zip(own, group_of, strict=True)], absent, settings, options)
        # All states are kept before the matrices are stepped: Newton-Schulz may run out of memory, and AdamW's moments are true then.
        made = {matrix.param: matrix.entries for _, matrices in steps for matrix in matrices if matrix.entries}
        add_entries(self.state, made)
        if planned is not self._planned or made:
            planned.write_back(self.state)
            self._planned = planned
        for device, matrices in steps:
            self._adopt((matrix.param, self.state[matrix.param]) for matrix in matrices)
            seed = self.seed if self.stochastic_rounding else None
            step = MatrixStep(rows[device], options(device), backend=self.backend, stochastic=seed, first_replica=self.first_replica)
            owners.run(step, matrices)
            self._skipped = torch.zeros((), dtype=torch.float32, device=device) if step.skip is None else step.skip.float()
        if self.zero_gradients:  # a gradient that was reduced first has been zeroed where it was reduced to
            for gradient in gradients:
                if gradient is not None and shards.is_partial(gradient):
                    shards.local(gradient).zero_()
        planned.watch.refresh()  # matrices with masters that were planned beside have been written to
        return loss

    def _check_apart(self, params: list[Tensor], places: list[int]) -> None:
        """No matrix shares memory with what AdamW steps. Each kind has been looked at by itself."""
        sets = [(f"parameter {i}", tensor) for i in places for tensor in shards.locals_of(self._replicas_of(params[i]))]
        tensors = [tensor for _, tensor in sets]
        if self._apart is None or not self._apart.same(tensors):
            check_apart(sets)
            self._apart = lists.note_addresses(tensors)

    def _matrix(self, place: int, group: int, param: Tensor, gradient: Any) -> Matrix:
        sets, kept = self._replicas_of(param), self.state.get(param, {})
        entries = self._layout_of_matrices(param).missing(kept, sets, moments=True)
        whole = {key: value for key, value in {**kept, **entries}.items() if value is not None}
        own, state = shards.locals_of(sets), shards.local_state(whole, param)
        order = None if shards.is_sharded(param) else strides.memory_order(param)
        if order is not None and order[:-2] == tuple(range(param.ndim - 2)):  # transposed: so is its direction
            own, state = [strides.laid(tensor, order) for tensor in own], strides.laid_state(state, param)
        return Matrix(place, group, param, own, state, entries, gradient)

    def _rows(self, device: torch.device, chosen: set[int]) -> dict[int, Row]:
        """What the groups say, checked."""
        made, dtype = {}, self.ns_dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        for i in chosen:
            group, name = self.param_groups[i], f"parameter group {i}"
            _check_muon(group, name)  # a group may have been written to
            columns = tuple(float(row[i]) for row in self.multipliers)
            settings = plans._settings(self._hyper(group), columns, self.decay_at == "base", device)
            if isinstance(settings.lr, Tensor):
                raise ValueError(f"lr of {name} is a tensor on {device}, which a step of matrices would wait for: give it as a number")
            check_group(settings, "adamw", self.num_replicas, device, name)
            how = Iteration(tuple(map(float, group["ns_coefficients"])), int(group["ns_steps"]), float(group["eps"]), dtype)  # type: ignore[arg-type]
            made[i] = Row(settings, how, group["adjust_lr_fn"])
        return made

    def _clipped(self, params: list[Tensor], own: list[Tensor | None]) -> Callable[[torch.device], StepOptions]:
        """The options of a step. A norm is taken here, over both kinds."""
        devices = list(dict.fromkeys(g.device for g in own if g is not None))
        if self._max_grad_norm is None or not devices:
            self._clip = None  # no norm has been found
            return self._options
        if len(devices) > 1:
            listed = ", ".join(map(str, devices))
            raise ValueError(f"max_grad_norm needs all parameters on one device, they are on {listed}: use torch.nn.utils.clip_grad_norm_")
        if self._clip is None or not lists.same(self._clip.params, params):
            self._clip = ShardedClip(params)
        options = self._clip(own, self._max_grad_norm, self._options(devices[0]))
        return lambda _: options

    @property
    def grad_norm(self) -> Tensor | None:
        """The global norm that the last step found, of both kinds; 0-d float32. None without max_grad_norm. Reading it waits."""
        return None if self._clip is None or self._max_grad_norm is None else self._clip.norm

    @property
    def step_skipped(self) -> Tensor | None:
        """1 if the last step was skipped, for an infinite gradient or norm; 0-d float32 on the device. None before the first step."""
        return self._skipped if self._skipped is not None else super().step_skipped

    def write_hyperparameters(self) -> None:
        """Raises RuntimeError: a step of matrices cannot be captured."""
        raise RuntimeError("write_hyperparameters() is for steps captured in a CUDA graph, which FusedMuon does not support: call step()")


def _check_muon(group: Mapping[str, Any], name: str) -> None:
    if not 0.0 <= float(group["momentum"]) < 1.0:
        raise ValueError(f"momentum={group['momentum']} of {name} must be in [0, 1)")
    coefficients = group["ns_coefficients"]
    if len(coefficients) != 3 or not all(math.isfinite(c) for c in coefficients):
        raise ValueError(f"ns_coefficients={coefficients} of {name} must be three finite numbers")
    steps = group["ns_steps"]
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps < 100:
        raise ValueError(f"ns_steps={steps!r} of {name} must be a whole number from 1 to 99")
    if group["adjust_lr_fn"] not in _ADJUST:
        raise ValueError(f'adjust_lr_fn={group["adjust_lr_fn"]!r} of {name} is unknown; choose "original" (or None) or "match_rms_adamw"')
