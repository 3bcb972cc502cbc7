"""FusedMuon: Muon for the matrices of a model and AdamW for the rest, in one optimizer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hdet.kernels import StepSettings
from hdet.kernels.checks import check_apart, check_group
from hdet.rules import RULES, Facts

from . import group_checks as groups
from . import step_plans as plans
from .fused import FusedOptimizer, Options
from .matrices import MatrixPlan, Row
from .newton_schulz import Iteration, Triple, fastest_dtype
from .readings import Reading, check_names, readings_of
from .split_params import KEYS, MATRICES, OF_SHAPES, split_groups
from .state import Layout
from .step_plans import Member, Part, Planned

_ADJUST = (None, "original", "match_rms_adamw")


class FusedMuon(FusedOptimizer):
    """Muon (Jordan et al. 2024) for matrices, as torch.optim.Muon computes it, and AdamW for every
    other parameter.

    With gradient g, rate r = lr * multiplier (Eq. 2) and NS the Newton-Schulz iteration
    (newton_schulz.py)::

        b = momentum * b + (1 - momentum) * g       momentum_buffer
        u = NS((1 - momentum) * g + momentum * b if nesterov else b)
        p = p * (1 - r * weight_decay) - r * adjust * u

    A parameter belongs to a group that says ``use_muon: True`` or ``False``. A group that does not
    say is split by the argument `use_muon` into two, named "muon" and "adamw", so that
    `hdet.LearningRate(groups=["muon", "adamw"])` explores the two rates. Matrices without names,
    and nothing else, are all Muon's, as with torch.optim.Muon.

    Args:
        params: parameters, (name, parameter) pairs as of model.named_parameters(), or groups of
            either.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: of Muon,
            as torch.optim.Muon. Momentum lies in [0, 1). adjust_lr_fn: "original" (None) multiplies
            the rate of an (m, n) matrix by sqrt(max(1, m / n)), "match_rms_adamw" by 0.2
            sqrt(max(m, n)), with which AdamW's rate and decay can be used (Liu et al. 2025, arXiv
            2502.16982). ns_coefficients: of all steps, or ns_steps triples, one for each, such as
            `hdet.optim.POLAR_EXPRESS`.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: of AdamW.
        use_muon: (name, parameter) -> bool, for groups that do not say. Default: by names, which
            have to be given then, see `hdet.optim.hidden_matrix`. Settings of a group that it
            splits, such as lr and weight_decay, are those of both kinds.
        higher_dims: how a parameter of more than two dimensions is read. "stack": (E, m, n) is E
            matrices, as of experts. "flatten": (out, in, h, w) is one of (out, in * h * w), as of a
            convolution. None: as a stack where "expert" is in its name, else it is refused.
        splits: the rows (or columns, if they add up to these) of the blocks of a matrix that is
            several, such as a fused qkv: each block is orthogonalised and its rate adjusted as if
            it were a parameter. ``{"qkv.weight": (768, 768, 768)}`` by the end of a name; or sizes
            alone, of all matrices.
        ns_dtype: of Newton-Schulz: torch.float32, torch.bfloat16, as torch's, or torch.float16,
            which is three to eight times nearer to float64 than bfloat16. None: the fastest that is
            as exact as torch's, float16 on GPUs, bfloat16 on CPUs with AMX, float32 on others; say
            one where unlike machines train together, or their results are to agree.
        decay_at: as FusedAdamW, of both kinds.
        others: as FusedOptimizer. max_grad_norm is the norm of all gradients, of both kinds.

    All matrices of one shape go through Newton-Schulz as one batch, between two kernel calls, and K
    replicas (`set_replicas`) share one direction. The rest is one kernel call. State of a matrix:
    momentum_buffer, as torch.optim.Muon's, and step; of the rest AdamW's. States of torch's two
    load: groups without use_muon are told by their keys.

    CUDA graphs: as FusedOptimizer, but with max_grad_norm rates cannot change between replays, and
    ns_coefficients, ns_steps, eps and adjust_lr_fn never.

    DTensors: the momentum is sharded as its parameter. A matrix that is cut over one mesh dimension
    (FSDP2, HSDP, tensor parallelism) is put together on one rank of it, in `ns_dtype`, for float16
    in float32; ranks get equal work, m * n * min(m, n), and exchange while they compute. One that
    is cut over several dimensions is gathered by each of their ranks. All ranks of a mesh must
    step, with the same gradients missing.

    Refused, before anything is changed: a rate of matrices in a tensor on a device, and what
    FusedAdamW refuses. Raises ValueError or TypeError.

    Cost of Newton-Schulz for an (m, n) matrix, m <= n: 2 m (2 m n + m^2) operations a step; in
    float32 and float16 with n >= 4 m two thirds and three quarters of that. Memory that is kept: as
    much as the largest batch, at most 67 million elements or one matrix, of `ns_dtype` (float16:
    float32).

    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8))
    >>> optimizer = hdet.FusedMuon(
    ...     model.named_parameters(), lr=0.02, use_muon=lambda name, p: name == "1.weight"
    ... )
    >>> [(group["name"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
    [('muon', 0.02, 1), ('adamw', 0.001, 2)]
    >>> model(torch.arange(4)).square().mean().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model[1].weight]), sorted(optimizer.state[model[1].bias])
    (['momentum_buffer', 'step'], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    rule = "adamw"  # of what the kernels step; decay is decoupled in both kinds

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Triple | Sequence[Triple] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        use_muon: Callable[[str, Tensor], bool] | None = None,
        higher_dims: Literal["stack", "flatten"] | None = None,
        splits: Mapping[str, Sequence[int]] | Sequence[int] | None = None,
        ns_dtype: torch.dtype | None = None,
        decay_at: str = "replica",
        **options: Unpack[Options],
    ) -> None:
        if ns_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"ns_dtype={ns_dtype!r} is not supported; choose torch.float32, torch.bfloat16, "
                "torch.float16 or None"
            )
        self.ns_dtype = ns_dtype
        self._kinds: dict[bool, dict[str, Any]] = {
            True: {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                "higher_dims": higher_dims,
                "splits": splits,
            },
            False: {
                "lr": adamw_lr,
                "betas": adamw_betas,
                "eps": adamw_eps,
                "weight_decay": adamw_weight_decay,
            },
        }
        for use, kind in self._kinds.items():
            self._check_group({**kind, "use_muon": use}, "the defaults")
        if not isinstance(params, Tensor):  # which torch refuses
            params = split_groups(params, use_muon, higher_dims)
        super().__init__(params, (), decay_at=decay_at, **options)
        check_names(group for group in self.param_groups if group["use_muon"])

    # -- groups ------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which says use_muon, if it is not one of matrices among such; the other
        settings are those of the constructor where it does not say them."""
        if "use_muon" not in param_group and all(group["use_muon"] for group in self.param_groups):
            [param_group] = split_groups([param_group], None)
        use = param_group.get("use_muon")
        if not isinstance(use, bool):
            raise ValueError(
                f"use_muon of parameter group {len(self.param_groups)} is {use!r}: say True "
                "(matrices) or False (AdamW)"
            )
        name = "muon" if use else "adamw"
        free = all(group.get("name") != name for group in self.param_groups)
        super().add_param_group(
            {**self._kinds[use], **({"name": name} if free else {}), **param_group}
        )

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        use = group.get("use_muon")
        if use is None:
            return  # the defaults of torch's base class: there are none
        if use:
            _check_muon(group, name)
            readings_of(group, name)
        else:
            groups.check_settings({"maximize": False, **group}, RULES["adamw"], name, "FusedAdamW")

    def _rule_of(self, group: dict[str, Any]) -> Facts:
        return MATRICES if group.get("use_muon") else RULES["adamw"]

    def _carried(self) -> dict[str, Any]:
        return {}

    # -- state -------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "ns_dtype": self.ns_dtype, "_kinds": self._kinds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ours = getattr(self, "param_groups", [])  # none while a copy is made
        for i, group in enumerate(state["param_groups"]):
            name = f"parameter group {i} of the loaded state"
            use = group.setdefault(
                "use_muon", "ns_steps" in group
            )  # torch's optimizers do not say it
            if absent := [key for key in KEYS[bool(use)] if key not in group]:
                raise ValueError(
                    f"{name} lacks {', '.join(absent)}: it is not that of "
                    f"torch.optim.{'Muon' if use else 'AdamW'}"
                )
            if i < len(ours):
                if use != ours[i]["use_muon"]:
                    raise ValueError(
                        f"use_muon={use} of {name}, but that of this optimizer's is {not use}: "
                        "give its groups in this order"
                    )
                own = ("param_names", *OF_SHAPES)  # splits are by these names
                group.update({key: ours[i][key] for key in own if key in ours[i]})
                if "name" in ours[i]:
                    group.setdefault("name", ours[i]["name"])
        super().__setstate__(state)

    def _layout(self, param: Tensor) -> Layout:
        layout = super()._layout(param)
        matrices = [group["params"] for group in self.param_groups if group["use_muon"]]
        of_matrix = any(param is one for params in matrices for one in params)
        return replace(layout, rule=MATRICES) if of_matrix else layout

    # -- a step ------------------------------------------------------------------------------------

    def _settings_of(self, planned: Planned) -> Sequence[Any]:
        made = super()._settings_of(planned)
        return [
            self._rows(part, row) if part.in_turns else row
            for part, row in zip(planned.parts, made, strict=True)
        ]

    def _rows(self, part: Part, settings: Sequence[StepSettings]) -> dict[int, Row]:
        """What the groups of matrices say, checked: it may have been written to."""
        made = {}
        for i, s in zip(part.groups, settings, strict=True):
            group, name = self.param_groups[i], f"parameter group {i}"
            _check_muon(group, name)
            if isinstance(s.lr, Tensor):
                raise ValueError(
                    f"lr of {name} is a tensor on {part.device}, which a step of matrices would "
                    "wait for: give it as a number"
                )
            check_group(s, "muon", self.num_replicas, part.device, name)
            dtype = self._dtype_on(part.device)
            how = Iteration(_coefficients(group), float(group["eps"]), dtype)
            made[i] = Row(s, how, group["adjust_lr_fn"])
        return made

    def _dtype_on(self, device: torch.device) -> torch.dtype:
        """Of Newton-Schulz."""
        return self.ns_dtype or fastest_dtype(device.type)

    # -- planning ----------------------------------------------------------------------------------

    def _parts(self, device: torch.device, members: list[Member]) -> list[Part]:
        matrices = [m for m in members if self.param_groups[m.group]["use_muon"]]
        others = [m for m in members if not self.param_groups[m.group]["use_muon"]]
        made = super()._parts(device, others) if others else []
        if matrices:
            tensors = functools.partial(
                plans.step_tensors,
                "muon",
                moments=("momentum_buffer",),
                averages=self.ema,
                stochastic=self.seed if self._draws_weights else None,
                first_replica=self.first_replica,
            )
            readings = self._readings(matrices)
            plan = MatrixPlan(matrices, readings, self._dtype_on(device), tensors, self.backend)
            places, groups_of = [m.place for m in matrices], sorted({m.group for m in matrices})
            made.append(Part(plan, places, groups_of, device, in_turns=True))
        # No matrix shares memory with what AdamW steps. Each kind has been looked at by itself.
        check_apart((f"parameter {m.number}", tensor) for m in members for tensor in m.sets)
        return made

    def _readings(self, matrices: Sequence[Member]) -> dict[int, Reading]:
        """By place. A matrix may be transposed in memory: so is its direction."""
        check_names(group for group in self.param_groups if group["use_muon"])
        said: dict[int, Reading] = {}
        first = 0
        for i, group in enumerate(self.param_groups):
            if group["use_muon"]:
                said |= enumerate(readings_of(group, f"parameter group {i}"), first)
            first += len(group["params"])
        return {m.place: said[m.number].laid(m.param, m.order, m.number) for m in matrices}


def _coefficients(group: Mapping[str, Any]) -> tuple[Triple, ...]:
    """Of each step."""
    said = group["ns_coefficients"]
    each = any(isinstance(entry, Sequence) for entry in said)
    triples = said if each else [said] * group["ns_steps"]
    return tuple(tuple(map(float, triple)) for triple in triples)  # type: ignore[misc]


def _check_muon(group: Mapping[str, Any], name: str) -> None:
    groups.check_numbers(MATRICES.values({"maximize": False, **group}), MATRICES, name)
    if not 0.0 <= float(group["momentum"]) < 1.0:
        raise ValueError(f"momentum={group['momentum']} of {name} must be in [0, 1)")
    steps = group["ns_steps"]
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps < 100:
        raise ValueError(f"ns_steps={steps!r} of {name} must be a whole number from 1 to 99")
    triples = _coefficients(group)
    if len(triples) != steps or any(
        len(triple) != 3 or not all(map(math.isfinite, triple)) for triple in triples
    ):
        raise ValueError(
            f"ns_coefficients={group['ns_coefficients']} of {name} must be three finite numbers, "
            f"or {steps} times three, as ns_steps={steps}"
        )
    if group["adjust_lr_fn"] not in _ADJUST:
        raise ValueError(
            f'adjust_lr_fn={group["adjust_lr_fn"]!r} of {name} is unknown; choose "original" (or '
            'None) or "match_rms_adamw"'
        )
