"""Stepper: what lies behind a fused optimizer, its options, state and plans."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from hdet import kernels
from hdet.kernels import RankOnePlan, RankOneTensors, StepOptions, StepTensors
from hdet.kernels.spec.interface import COUPLED
from hdet.tensors import dtensor as shards

from . import group_checks as groups
from . import step_plans as plans
from .displacement import LineWatch
from .finish import Averaging, ShardedClip
from .lists import VersionWatch
from .state import MASTER_KEYS, REPLICA_KEYS, Layout, replicas_for
from .step_plans import Hyper, Part, Planned, Watch

# What a copy or a pickle keeps beside torch's parts.
_OWN = (
    "backend",
    "decay_at",
    "first_replica",
    "master_weights",
    "moment_dtype",
    "multipliers",
    "num_replicas",
    "seed",
    "stochastic_rounding",
    "storage",
    "zero_gradients",
    "_max_grad_norm",
    "_sets",
)


class Options(TypedDict, total=False):
    """What every fused optimizer takes by name; FusedOptimizer explains them."""

    maximize: bool
    master_weights: str | None
    moment_dtype: torch.dtype | None
    stochastic_rounding: bool
    seed: int
    max_grad_norm: float | None
    zero_gradients: bool
    backend: str


class Stepper(Optimizer):
    """A torch optimizer that keeps state and plans for the kernels. FusedOptimizer is its public side."""

    rule: ClassVar[str]
    _keys: ClassVar[tuple[str, ...]]  # what a parameter group must have
    _moments: ClassVar[tuple[str, ...]]
    _required: ClassVar[tuple[str, ...]]  # what a loaded state must have
    _carried: ClassVar[dict[str, Any]]  # what torch's optimizer keeps in a group and this class does not use: states pass both ways
    _step_supports_amp_scaling = True

    multipliers: list[list[float]]
    _held: dict[str, Any]
    """what load_state_dict takes past torch"""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        maximize: bool = False,
        master_weights: str | None = None,
        moment_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
        zero_gradients: bool = False,
        backend: str = "auto",
        decay_at: str = "replica",
        **carried: Any,
    ) -> None:
        for key in carried.keys() - self._carried.keys():
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {key!r}")
        if decay_at != "replica" and self.rule in COUPLED:
            raise TypeError(f"{type(self).__name__} takes no decay_at: its decay is a part of the gradient")
        kernels.check_name(backend)
        groups.check_storage(master_weights, moment_dtype, seed, decay_at)
        self.backend, self.master_weights, self.moment_dtype = backend, master_weights, moment_dtype or torch.float32
        self.stochastic_rounding, self.seed, self.decay_at = stochastic_rounding, seed, decay_at
        self.max_grad_norm, self.zero_gradients = max_grad_norm, zero_gradients
        self.num_replicas = 1
        self.storage = "parameters"
        """how several replicas are kept; see set_replicas"""
        self.first_replica = 0
        """number of replica 0 among all replicas of the run, for stochastic rounding"""
        self.multipliers = [[]]
        self._sets: dict[Tensor, list[Tensor]] = {}  # of each parameter, in all replicas; empty for one
        self._forget()
        defaults = {**self._carried, **defaults, "maximize": maximize, **carried}
        self._check_group(defaults, "the defaults")
        super().__init__(params, defaults)

    # -- what a rule says ------------------------------------------------------------------------------------------------

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        raise NotImplementedError

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        raise NotImplementedError

    def _keeps_moments(self, group: dict[str, Any]) -> bool:
        return True

    # -- torch's interface -----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, with multipliers of 1.0. A refused group leaves the optimizer as it was."""
        name = f"parameter group {len(self.param_groups)}"
        self._check_group({**self.defaults, **param_group}, name)
        if isinstance(param_group.get("params"), Iterator):  # read here and again by torch
            param_group["params"] = list(param_group["params"])
        groups.check_params(param_group.get("params"), name)
        super().add_param_group(param_group)
        for row in self.multipliers:
            row.append(1.0)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _OWN}
        return {**super().__getstate__(), **own, "multipliers": [list(row) for row in self.multipliers]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called with a whole optimizer by pickle and copy, and with `state` and `param_groups` by load_state_dict.
        for i, group in enumerate(state["param_groups"]):
            name = f"parameter group {i} of the loaded state"
            for key, value in {**self._carried, "maximize": False}.items():
                group.setdefault(key, value)
            if absent := [key for key in self._keys if key not in group]:
                raise ValueError(f"{name} lacks {', '.join(absent)}: it is not that of a {type(self).__name__}")
            self._check_group(group, name)
        if "defaults" not in state:
            state = {**state, "state": self._loaded_state(state["state"])}
        super().__setstate__(state)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer.state_dict. Where there are replicas of a parameter that has not been stepped yet, its state is that
        of a first step: torch's optimizer needs a whole one, and a distributed checkpoint loads what is there to be filled."""
        saved = super().state_dict()
        grouped = [(param, group) for group in self.param_groups for param in group["params"]]
        for i, (param, group) in enumerate(grouped):
            state = saved["state"].get(i, {})
            if "replica_params" in state and state.keys() <= set(REPLICA_KEYS):
                saved["state"][i] = {**state, **self._layout().missing(state, self._replicas_of(param), self._keeps_moments(group))}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of this optimizer or of torch's. See torch.optim.Optimizer.load_state_dict.

        Moments and masters keep their precision, whatever the parameter's dtype is. Co-resident replicas are written in place. A state
        of one replica is everyone's, up to the parameters themselves. A state of another number of replicas is everyone's if they are
        equal, as after a converge (one of two float32 replicas is compared with the model, which is to be loaded before); from the
        middle of a cycle it is refused by ValueError.
        """
        held: dict[str, Any] = {}

        def hold(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            # torch would cast floating state to the parameter's dtype: it gets the groups, and `_loaded_state` takes the rest.
            held.update(final)
            return {**final, "state": {}}

        handle = self.register_load_state_dict_pre_hook(hold)  # the last one: it sees what others have made of the state
        self._held = held
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._held = {}

    def _loaded_state(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """The held state by parameter, in this optimizer's layout. Nothing is changed before all is checked."""
        layout, made = self._layout(), defaultdict(dict, state)
        copies: list[tuple[Tensor, Tensor]] = []
        saved = self._held.get("param_groups", [])
        names = itertools.chain.from_iterable(group["params"] for group in saved)
        params = dict(zip(names, self._listed(), strict=True)) if saved else {}
        dropped = False
        for key, values in self._held.get("state", {}).items():
            param = params.get(key)
            if param is None:  # not a parameter's: carried, as torch does
                made[key] = values
                continue
            entries = layout.loaded(values, param, f"parameter {key}")
            dropped |= layout.master_key(param) is None and not layout.on_line and any(name in entries for name in MASTER_KEYS)
            ours = self._sets.get(param, [param])[1:]
            copies += zip(ours, replicas_for(entries, param, ours), strict=False)
            made[param] = entries
        if dropped:
            warnings.warn("the loaded state has master weights, this optimizer keeps none: they are dropped", stacklevel=4)
        with torch.no_grad():
            for destination, source in copies:
                destination.copy_(source)
        return made

    # -- planning --------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Nothing is planned or held for the next step."""
        self._planned: Planned | None = None
        self._averaging: dict[torch.device, Averaging] = {}
        self._clip: ShardedClip | None = None
        self._plain = StepOptions()
        self._held = {}

    def _listed(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable([group["params"] for group in self.param_groups]))

    def _layout(self) -> Layout:
        return Layout(self._moments, self._required, self.moment_dtype, self.master_weights, self._on_line)

    def _hypers(self) -> list[Hyper]:
        count = len(self.param_groups)
        if len(self.multipliers) != self.num_replicas:
            raise ValueError(f"multipliers has {len(self.multipliers)} lists for {self.num_replicas} replicas: multipliers[replica][group]")
        for k, row in enumerate(self.multipliers):
            if len(row) != count:
                raise ValueError(f"multipliers[{k}] has {len(row)} entries for {count} parameter groups")
        return [self._hyper(group) for group in self.param_groups]

    @property
    def max_grad_norm(self) -> float | None:
        """The global norm that gradients are clipped to; None: no norm is taken."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and not float(value) > 0:
            raise ValueError(f"max_grad_norm={value} must be positive; math.inf measures without clipping, None takes no norm")
        self._max_grad_norm = None if value is None else float(value)

    def _options(self, device: torch.device) -> StepOptions:
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)  # set by torch's GradScaler
        norm, zero = self._max_grad_norm or 0.0, bool(self.zero_gradients)
        if scale is None and found is None:
            if norm != self._plain.max_norm or zero != self._plain.zero_gradients:
                self._plain = StepOptions(max_norm=norm, zero_gradients=zero)
            return self._plain
        return StepOptions(
            grad_scale=plans.scalar(scale, device),
            found_inf=plans.scalar(found, device),
            max_norm=norm,
            zero_gradients=zero,
        )

    def _plan_for(self, params: list[Tensor], absent: list[bool]) -> Planned:
        sizes = [len(group["params"]) for group in self.param_groups]
        flags = [self._keeps_moments(group) for group in self.param_groups]
        planned = self._planned
        if planned is not None and planned.fits(self.state, params, sizes, absent, flags):
            return planned
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("this step has not been planned yet: run one step with the same parameters before capturing it")
        return self._plan(params, sizes, absent, flags)

    def _plan(self, params: list[Tensor], sizes: list[int], absent: list[bool], flags: list[bool]) -> Planned:
        """Plans for the parameters that have gradients, and what is to be added to their states once a step has been done."""
        members = [i for i, none in enumerate(absent) if not none]
        group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
        layout, sets, entries, states = self._layout(), {}, {}, {}
        for i in members:
            kept = self.state.get(params[i], {})
            sets[i] = self._replicas_of(params[i])
            entries[i] = layout.missing(kept, sets[i], flags[group_of[i]])
            states[i] = {key: value for key, value in {**kept, **entries[i]}.items() if value is not None}
        parts = []
        for device, places in plans.by_device(params, members).items():
            kernels.select(self.backend, device)
            groups_of = [group_of[i] for i in places]
            keys = [plans.numbers([states[i][key] for i in places]) for key in ("step", *(["scale"] if self._on_line else []))]
            row_of, first = plans.number_rows(groups_of, *keys)
            own = [shards.local_state(states[i], params[i]) for i in places]
            tensors = self._tensors([sets[i] for i in places], own, row_of, [flags[g] for g in groups_of], places)
            if self._on_line:
                plan = self._line_plan(tensors, own, [keys[1][j] for j in first])
                for i, row in zip(places, row_of, strict=True):  # the plan's own numbers: it moves them
                    entries[i]["scale"] = states[i]["scale"] = plan.scales[row]
            parts.append(
                Part(plan if self._on_line else kernels.step_plan(tensors, self.backend), places, [groups_of[j] for j in first], device)
            )
        written = [tensor for i in members for tensor in sets[i]]
        others = [(param, self.state[param]) for param, none in zip(params, absent, strict=True) if none and param in self.state]
        watch = self._watch([(params[i], states[i]) for i in members], others)
        return Planned(params, sizes, absent, flags, parts, written, entries, states, watch)

    def _line_plan(self, tensors: StepTensors, states: list[dict[str, Any]], scales: list[float]) -> RankOnePlan:
        t, (bases, displacements) = tensors, ([state[key] for state in states] for key in ("base", "displacement"))
        line = RankOneTensors(
            t.rule, bases, displacements, t.params, t.rows, t.steps, t.exp_avgs, t.exp_avg_sqs, t.ids, t.stochastic, t.first_replica, scales
        )
        return kernels.rank_one_plan(line, self.backend)

    def _watch(self, stepped: Sequence[tuple[Tensor, dict[str, Any]]], others: Sequence[tuple[Tensor, dict[str, Any]]]) -> VersionWatch:
        if not self._on_line:
            return Watch(stepped, others)
        return LineWatch(stepped, [(param, state) for param, state in others if "base" in state], self._rho_of)

    @property
    def _on_line(self) -> bool:
        return self.storage == "displacement"

    def _rho_of(self, param: Tensor) -> list[float]:
        """The multipliers of a parameter, one for each replica, as the kernels read them."""
        group = next(g for g, group in enumerate(self.param_groups) if any(param is p for p in group["params"]))
        return [float(row[group]) for row in self.multipliers]

    def _tensors(
        self, sets: list[list[Tensor]], states: list[dict[str, Any]], rows: list[int], keeps: list[bool], places: list[int]
    ) -> StepTensors:
        """What one plan works on. `states`: as they lie on this rank. `keeps`: has the tensor moments? `places`: its number among all
        parameters."""
        count = self.num_replicas
        moments = [plans.column([state if keep else {} for state, keep in zip(states, keeps, strict=True)], key) for key in self._moments]
        small_second = len(self._moments) == 2 and self.moment_dtype == torch.bfloat16
        return StepTensors(
            rule=self.rule,
            params=[[shards.local(s[k]) for s in sets] for k in range(count)],
            rows=rows,
            steps=[state["step"] for state in states],
            exp_avgs=moments[0],
            exp_avg_sqs=moments[1] if len(moments) == 2 else None,
            masters=plans.master_columns(states, count),
            ids=places,
            stochastic=self.seed if self.stochastic_rounding or small_second else None,
            first_replica=self.first_replica,
        )

    def _replicas_of(self, param: Tensor) -> list[Tensor]:
        if self.num_replicas == 1:
            return [param]
        if param not in self._sets:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} has no co-resident copies: call set_replicas again for added groups"
            )
        return self._sets[param]

    def _moves(self, param: Tensor) -> bool:
        return param.requires_grad or "step" in self.state.get(param, {})
