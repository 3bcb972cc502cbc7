"""FusedOptimizer: a torch optimizer whose step is one call of hdet's kernels, for one replica or
several."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from hdet import kernels
from hdet.kernels import StepOptions
from hdet.kernels.checks import normalised
from hdet.kernels.ema import Given, averages_of
from hdet.rules import RULES, Facts, Kind
from hdet.tensors import dtensor as shards
from hdet.tensors.profiling import ranged

from . import group_checks as groups
from . import lists
from . import step_plans as plans
from .finish import Averaging, check_copies
from .masters import (
    BESIDE_KEYS,
    EMA_KEYS,
    REPLICA_KEYS,
    Watch,
    kept_beside,
    kept_masters,
    like_first,
    reset_master,
    state_sets,
)
from .moment_storage import Dtype, are_coded, dtype_for
from .release import GradientRelease, forget_norm
from .state import Layout, of_each, replicas_for
from .step_plans import Hyper, Member, Norms, Part, Planned

# What a copy or a pickle keeps beside torch's parts.
_OWN = (
    "backend",
    "cautious_decay",
    "decay_at",
    "ema",
    "first_replica",
    "master_weights",
    "moment_dtype",
    "multipliers",
    "num_replicas",
    "seed",
    "stochastic_rounding",
    "zero_gradients",
    "_max_grad_norm",
    "_sets",
)


# looked up before a program may put hdet's in their place
_TORCHS = {rule.takes: getattr(torch.optim, rule.takes) for rule in RULES.values() if rule.takes}


@functools.cache
def _torchs_defaults(name: str) -> dict[str, Any]:
    """What torch.optim's optimizer of that name, as it is installed, keeps in a group."""
    made: Optimizer = _TORCHS[name]([torch.nn.Parameter(torch.empty(0))])
    return made.defaults


class Options(TypedDict, total=False):
    """What every fused optimizer takes by name; FusedOptimizer explains them."""

    maximize: bool
    master_weights: str | None
    moment_dtype: torch.dtype | str | None
    stochastic_rounding: bool
    seed: int
    max_grad_norm: float | None
    zero_gradients: bool
    backend: str
    cautious_decay: bool
    ema: Given


class TorchOptions(Options, total=False):
    """Those, and what torch's optimizer takes by name as far as it has it."""

    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None
    decoupled_weight_decay: bool


class FusedOptimizer(Optimizer):
    """What all fused optimizers share: torch's, stepped by one kernel call for all parameters.

    FusedMuon, too, but for its matrices.

    Parameters are float32, bfloat16 or float16, in any mixture, dense, in any order of dimensions
    (channels_last), as their gradients must be, which are any of the three. Arithmetic is float32
    everywhere. Whoever has no gradient is left alone. Options that choose between torch's
    implementations (foreach, fused, capturable) are accepted and change nothing; amsgrad and
    differentiable are refused.

    Args beside torch's:
        master_weights: what stands beside a parameter of 16 bits; float32 parameters need nothing.
            None: nothing, a step smaller than half the parameter's spacing is lost (see
            stochastic_rounding). "fp32": a float32 value, of which the parameter is the rounded
            copy. "split": the 16 bits that a bfloat16 parameter lacks to an exact float32 value;
            the parameter is rounded to nearest, ties away from zero. "split24": the first 8 of
            them, for a value of 24 bits, which a step rounds stochastically: to nearest, steps
            below 2^-17 of a weight would be lost. float16 parameters get "fp32" with both.
        moment_dtype: how moments are stored, torch.float32 (None), torch.bfloat16 or "8bit". In
            bfloat16 a second moment is rounded stochastically: to nearest, an average with beta2 =
            0.999 would stand still. "8bit": codes in blocks of 256 elements with a scale each
            (Dettmers et al. 2021); tensors of fewer than 4096 elements have float32. See below.
        stochastic_rounding: of bfloat16 parameters without a master: up or down with the
            probability that keeps the mean. Always on where a second moment is kept in bfloat16.
        seed: of stochastic rounding, 0 .. 2^64 - 1. Random numbers are a function of (seed, step,
            replica, parameter, element): the same on every device and after a resume; torch's
            generators are not touched.
        max_grad_norm: clip gradients by their global norm inside the step, as
            torch.nn.utils.clip_grad_norm_ would before it; the gradients in memory stay as they
            are. A step whose norm is infinite or NaN is skipped, with its counters. math.inf
            measures and skips, and clips nothing. None: no norm is taken. May be assigned between
            steps. For DTensors the norm is that of the full gradients, by one small all_reduce for
            each mesh dimension that shards; all its ranks must step.
        zero_gradients: gradients are zeros after each step, also after a skipped one, at the same
            addresses. Instead of zero_grad(). May be assigned between steps.
        backend: "auto", "cpu", "cuda", "triton" or "torch"; see hdet.kernels.
        ema: averages of the weights over time, moved at the end of each step: a decay such as
            0.9999, an `hdet.WeightAverage`, or a tuple of up to three. See below.
        cautious_decay: weight decay acts on those elements alone that the direction u brings nearer
            to 0 too, u * p >= 0 (Chen et al. 2025, arXiv 2510.12402). Adam and SGD refuse it: their
            decay is part of the gradient.

    Multipliers: `multipliers[replica][group]`, 1.0 by default, may be assigned at any time. A step
    uses lr * multiplier (Eq. 2), and `group["lr"]` stays as it is. They belong to the running
    process, not to the training state: not in state_dict, but kept by a copy or a pickle.

    State of a parameter, created in its first step with a gradient: `step` (0-d float32, on the
    parameter's device), the moments under torch's names, `master_param` (float32) or `remainder`
    (int16; in `state_dict()` the same bits as bfloat16, which gloo and NCCL can gather; int8 of
    "split24"), and with K replicas `replica_params` and `replica_masters`, lists of K - 1 tensors.
    Each `step` counts for its own parameter, also after a write to it; a parameter without a
    gradient does not count.
    States of torch's optimizer load here and ours there; moments and masters pass bitwise,
    whatever the parameter's dtype is. A state without masters gets them from the parameters, and
    "fp32" and "split" load into each other exactly; for "split24" values are rounded to nearest.

    Moments in 8 bits: in `state` a moment is a uint8 tensor of codes, like the parameter, beside
    float32 scales under `<moment>_scale`. `state_dict()` has float32 values in their place, made
    for it: 4 bytes for each element and moment, for as long as it lives. So it loads everywhere,
    torch.distributed.checkpoint reshards it, and float32 states load here. Values that were codes
    become the same codes again: a resume with the same shards is exact. Blocks begin again in each
    shard. If a number of a block is not finite, its block of 256 is NaN; a step with max_grad_norm,
    or under a GradScaler, is skipped before.

    Averages over time (`ema`): float32, of masters where there are some, else of parameters as they
    are stored; in a state `ema`, `ema_1`, `ema_2`, and `ema_step`, the steps that they have seen. A
    parameter without a gradient, and a skipped step, leave them alone. They begin as the weights,
    also where a state without them was loaded. With K replicas each has its own (`replica_ema`),
    which are averaged with the parameters. `averaged()` puts one into the model. 8 more bytes of
    traffic each.

    Writing to parameters: a master begins as its parameter is. What is written to a parameter in
    place later (load_state_dict of the model, an initialisation, a broadcast) is noticed by the
    version that autograd counts, and taken over before the next step or average wherever the
    parameter no longer is the rounded master. Loading model and optimizer in any order so resumes
    exactly. Writing through `.data` is not counted: call `refresh_masters()` after it. torchft's
    LocalSGD and DiLoCo write so in a hook of the step: while they do, each step compares masters
    and parameters, which reads both once more. A split
    parameter is the upper half of its value: what is written there counts at once, and the lower
    half stays, which is off by up to half the parameter's spacing until `refresh_masters()`.
    Entries of a state may be written to in place, replaced, and moved in memory (`.data`, `set_`,
    `resize_`, share_memory_(), offloading). What a step cannot use it refuses by name.

    DTensors (FSDP2, HSDP, tensor parallelism): a step works on the shards of this rank, which may
    be empty or move. Gradients must be laid out as their parameters; one that is still Partial is
    reduced in the step, as in torch's optimizers. States are DTensors laid out as their parameters,
    which torch.distributed.checkpoint reshards. Random numbers follow the element's place in its
    shard: with stochastic rounding a run is bitwise repeatable under one sharding only. Make the
    optimizer after fully_shard or parallelize_module.

    torch.amp.GradScaler: the step unscales and skips on the device; nothing waits for it. CUDA
    graphs: step once before the capture, with max_grad_norm and zero_gradients as they will be,
    then capture `step()` and call `write_hyperparameters()` before each replay; rates, multipliers,
    betas and clipping may change (max_grad_norm of DTensors may not: it is captured as it is). Some
    gradients may be None; a replay has the gradients, and the Nones, that it was captured with,
    also when steps with others have come between. It also has the memory: capture again after a
    parameter, state or gradient has moved.

    Costs, in bytes for each parameter. State: 4 per moment (2 in bfloat16, 1.016 in 8 bits), 4, 2
    or 1 for a master. Traffic of a float32 step: 8 per moment, 12 for parameter and gradient; with
    max_grad_norm 4 more, with zero_gradients 4 more, and 8 more for each further replica. A step
    with K replicas so moves 20 + 8 K bytes for AdamW, where K separate ones move 28 K. Other
    gradients than in the last step, also None here and there, cost one small copy, and other rates
    come along with the launch. A parameter's first gradient, moved or replaced tensors cost a new
    plan, some microseconds per tensor.
    """

    _step_supports_amp_scaling = True

    is_averaged = False
    """Are the parameters an average over time?"""

    release: GradientRelease | None = None
    """what steps parameters in the backward pass, after release_gradients()"""

    keeps_gradients = False
    """Do backward passes leave gradients alone, in the micro-batches before the last?"""

    rule: ClassVar[str]
    """by its name in hdet.rules, of which all follows that optimizers differ in"""

    def __init__(
        self,
        params: ParamsT,
        settings: Sequence[Any],
        *,
        maximize: bool = False,
        master_weights: str | None = None,
        moment_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
        zero_gradients: bool = False,
        backend: str = "auto",
        cautious_decay: bool = False,
        ema: Given = None,
        decay_at: str = "replica",
        **carried: Any,
    ) -> None:
        rule, name, known = RULES[self.rule], type(self).__name__, self._carried()
        for key in carried.keys() - known.keys():
            raise TypeError(f"{name} got an unexpected keyword argument {key!r}")
        if ema is not None and rule.weights:
            raise TypeError(f"{name} takes no ema: its eval() puts its own average into the model")
        asked = [("decay_at", decay_at != "replica"), ("cautious_decay", cautious_decay)]
        for key, is_asked in asked:
            if is_asked and rule.coupled:
                raise TypeError(f"{name} takes no {key}: its decay is part of the gradient")
        kernels.check_name(backend)
        groups.check_storage(master_weights, moment_dtype, seed, decay_at)
        self.backend, self.master_weights = backend, master_weights
        self.moment_dtype: Dtype = moment_dtype or torch.float32
        self.stochastic_rounding, self.seed, self.decay_at = stochastic_rounding, seed, decay_at
        self.cautious_decay, self.ema = cautious_decay, averages_of(ema)
        self.max_grad_norm, self.zero_gradients = max_grad_norm, zero_gradients
        self.num_replicas = 1
        self.first_replica = 0  # among all replicas of the run, for stochastic rounding
        self.multipliers: list[list[float]] = [[]]
        self._sets: dict[Tensor, list[Tensor]] = {}  # each in all replicas; empty for one
        self.forget_plans()
        given = dict(zip(rule.settings, settings, strict=False))
        defaults = {**known, **given, "maximize": maximize, **carried}
        self._check_group(defaults, "the defaults")
        super().__init__(params, defaults)

    def forget_plans(self) -> None:
        """Nothing is planned or held for the next step."""
        self._held: dict[str, Any] = {}  # what load_state_dict takes past torch
        self._planned: Planned | None = None
        self._measured: Norms | None = None
        self._averaging: dict[torch.device, Averaging] = {}
        if self.release is not None:
            self.release.forget()
        self._plain = StepOptions()

    # -- groups ------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, with multipliers of 1.0.

        A parameter that it names twice is stepped once, where torch steps it twice.
        A refused group leaves the optimizer as it was."""
        name = f"parameter group {len(self.param_groups)}"
        if isinstance(param_group.get("params"), Iterator):  # read here and again by torch
            param_group["params"] = list(param_group["params"])
        self._check_group({**self.defaults, **param_group}, name)
        groups.check_params(param_group.get("params"), name)
        super().add_param_group(param_group)  # which warns of a parameter that is named twice
        group = self.param_groups[-1]
        once = dict(zip(group["params"], group.get("param_names", group["params"]), strict=True))
        group["params"] = list(once)
        if "param_names" in group:
            group["param_names"] = list(once.values())
        if self.release is not None:
            self.release.forget()  # of the number of groups
            self.release.attach(once)
        for row in self.multipliers:
            row.append(1.0)

    def _rule_of(self, group: dict[str, Any]) -> Facts:
        return RULES[self.rule]

    def _carried(self) -> dict[str, Any]:
        """What torch's optimizer keeps in a group and this class need not: states pass both
        ways."""
        rule = RULES[self.rule]
        kept = {} if rule.takes is None else _torchs_defaults(rule.takes)
        return {key: value for key, value in kept.items() if key not in rule.keys}

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        groups.check_settings(group, RULES[self.rule], name, type(self).__name__)

    @property
    def _draws_weights(self) -> bool:
        return self.stochastic_rounding or self.master_weights == "split24"

    def _listed(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable([group["params"] for group in self.param_groups]))

    def _layout(self, param: Tensor) -> Layout:
        """How the state of a parameter is stored."""
        dtype = dtype_for(self.moment_dtype, param)
        return Layout(RULES[self.rule], dtype, self.master_weights, EMA_KEYS[: len(self.ema)])

    def _replicas_of(self, param: Tensor) -> list[Tensor]:
        if self.num_replicas == 1:
            return [param]
        if param not in self._sets:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} has no co-resident copies: call "
                "set_replicas again for added groups"
            )
        return self._sets[param]

    # -- a step ------------------------------------------------------------------------------------

    @ranged("hdet.optimizer.step")
    # a compiled training step calls the kernels as they are; torch's optimizers do the same
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient, in all replicas.

        Returns the closure's loss, or None.

        A gradient that lies otherwise in memory than its parameter, or is a negated view, is copied
        in each step.

        Raises ValueError or TypeError, before anything is changed, for hyperparameters and tensors
        that cannot be used.
        """
        if self.is_averaged:
            self._refuse_average("step()")
        if self.release is not None:
            if closure is not None:
                raise ValueError(
                    "gradients are released, so the closure's backward pass would step before "
                    "step() begins: call loss.backward(), then step() without a closure"
                )
            self._measured = self.release.end(self)
            self._distrust_torchft()
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = self._listed()
        gradients = lists.gradients(params)
        absent = lists.absent(gradients)
        planned = self._plan_for(params, absent)
        settings = self._settings_of(planned)
        planned.watch.check()
        read = planned.step(gradients, absent, settings, self._options)
        self._planned = planned
        self._measured = planned.norms() if self._max_grad_norm is not None else None
        if self.zero_gradients and (planned.sharded or planned.copies_gradients):
            # those that were reduced or copied first: kernels have zeroed what they have read
            for gradient, own in zip(gradients, read, strict=True):
                if gradient is not None and own is not None:
                    given = shards.local(gradient)
                    if given.data_ptr() != own.data_ptr():
                        given.zero_()
        self._distrust_torchft()
        return loss

    def _distrust_torchft(self) -> None:
        hooks = self._optimizer_step_post_hooks
        if hooks and any(map(_is_torchfts, hooks.values())):
            # It may average after this step, or be gone by the next one. To look at a sample of
            # elements instead would wait for the device in each step.
            for planned in self._all_planned:
                planned.watch.distrust()

    def _values(self, rule: Facts, group: dict[str, Any]) -> Hyper:
        """Of the next step, in the order of the rule's `fields`."""
        return rule.values(group)

    def _settings_of(self, planned: Planned) -> Sequence[Any]:
        """What the plan of each part takes, checked as far as it does not check by itself."""
        count, rows = len(self.param_groups), self.multipliers
        if len(rows) != self.num_replicas:
            raise ValueError(
                f"multipliers has {len(rows)} lists for {self.num_replicas} replicas: "
                "multipliers[replica][group]"
            )
        for k, row in enumerate(rows):
            if len(row) != count:
                raise ValueError(
                    f"multipliers[{k}] has {len(row)} entries for {count} parameter groups"
                )
        pairs = zip(planned.groups, self.param_groups, strict=True)
        hypers = [self._values(kind.rule, group) for (_, kind), group in pairs]
        return planned.settings_of(hypers, rows, (self.decay_at == "base", self.cautious_decay))

    def _plan_for(self, params: list[Tensor], absent: list[int]) -> Planned:
        """A plan is for all parameters that have had a gradient since the last change of tensors,
        so that each is planned for once."""
        sized = [
            (len(group["params"]), self._rule_of(group).kind(group)) for group in self.param_groups
        ]
        planned, kept = self._planned, []
        if planned is not None and planned.holds(self.state, params, sized):
            if planned.outside.issubset(absent):
                return planned
            kept = planned.places
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "this step has not been planned yet: run one step with the same parameters before "
                "capturing it"
            )
        chosen = set(range(len(params))).difference(absent).union(kept)
        forget_norm(self)
        return self._plan(params, sized, sorted(chosen), self.state)

    def _plan(
        self,
        params: list[Tensor],
        sized: list[tuple[int, Kind]],
        chosen: list[int],
        container: dict[Tensor, dict[str, Any]],
        first: int = 0,
    ) -> Planned:
        """Plans for the parameters at these places, and what is to be added to their states, in
        `container`, once a step has been done. `first`: the number of the first parameter."""
        group_of = [group for group, (size, _) in enumerate(sized) for _ in range(size)]
        states = {i: container[param] for i, param in enumerate(params) if param in container}
        members, entries = {}, {}
        for i in chosen:
            sets, kind = self._replicas_of(params[i]), sized[group_of[i]][1]
            kept = states.get(i, {})
            made = self._layout(params[i]).missing(kept, sets, kind.keeps_moments)
            entries[params[i]], states[i] = made, plans.with_entries(kept, made)
            unused = () if kind.keeps_moments else kind.rule.moments
            used = {key: x for key, x in states[i].items() if not key.startswith(unused)}
            members[i] = plans.member(i, group_of[i], sets, used, first + i)
        parts = [
            part
            for device, places in plans.by_device(params, chosen).items()
            for part in self._parts(device, [members[i] for i in places])
        ]
        parts.sort(key=lambda part: part.in_turns)  # last: kernels may still refuse
        numbers = range(first, first + len(params))
        return Planned(params, sized, parts, members, states, entries, container, numbers)

    def _parts(self, device: torch.device, members: list[Member]) -> list[Part]:
        """Plans for parameters of one device."""
        return [self._part(device, members)]

    def _part(self, device: torch.device, members: list[Member], replica: int = 0) -> Part:
        """One plan for them. `replica`: the number of their first set."""
        kernels.select(self.backend, device)
        groups_of = sorted({member.group for member in members})
        rule = RULES[self.rule]
        draws = self._draws_weights or (
            self.moment_dtype == torch.bfloat16 and not all(rule.signed)
        )
        tensors = plans.step_tensors(
            self.rule,
            members,
            [groups_of.index(member.group) for member in members],
            rule.moments,
            averages=self.ema,
            stochastic=self.seed if draws else None,
            first_replica=self.first_replica + replica,
        )
        plan = kernels.step_plan(tensors, self.backend)
        return Part(plan, [member.place for member in members], groups_of, device)

    # -- released gradients ------------------------------------------------------------------------

    def release_gradients(self) -> None:
        """From now on `loss.backward()` steps each parameter as soon as it has its gradient, which
        is dropped: of gradients one is there at a time. `step()` ends the step, and raises
        RuntimeError where no backward pass came before it, or a rate was written in between. Code
        that clips gradients between the two finds none.

        The steps are bitwise the usual ones, but for max_grad_norm: gradients are clipped by the
        norm of the step before, as that of this one is not known yet, and each parameter's by its
        own, too; a parameter whose norm is not finite is skipped, and others are not. The first
        step has no norm to clip by; states hold the last one. With math.inf norms are measured, and
        nothing is clipped.

        A step is a kernel call for each parameter: some 60 us of the host's time.

        Several micro-batches: all but the last inside of `keep_gradients()`, whose gradients then
        take their memory, as without release. FSDP2 releases shards. Refused: DDP, whose
        gradients are averaged later, and with it plain tensors of several processes; an Ensemble,
        `find_rate`, a GradScaler (at its first step), closures, zero_gradients, and max_grad_norm
        of DTensors and of FusedMuon's matrices. Not undone: make another optimizer.

        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = hdet.FusedAdamW(model.parameters())
        >>> optimizer.release_gradients()
        >>> model(torch.ones(4, 8)).square().mean().backward()
        >>> model.weight.grad is None
        True
        >>> optimizer.step()
        """
        if getattr(self, "_hdet_fan_out", None) is not None:
            raise ValueError(
                "an Ensemble acts inside optimizer.step(), and released gradients are stepped in "
                "loss.backward(): close() it first"
            )
        if self.release is None:
            self.release = GradientRelease(self)
            self.forget_plans()
        self.release.attach(self._listed())

    @contextmanager
    def keep_gradients(self) -> Iterator[None]:
        """Inside, backward passes add up gradients and step nothing, whether they are released or
        not: for the micro-batches before the last."""
        before, self.keeps_gradients = self.keeps_gradients, True
        try:
            yield
        finally:
            self.keeps_gradients = before

    def check_mode(self, what: str) -> None:
        """Raises RuntimeError where the parameters are not the weights that are trained."""
        self._refuse_average(what)

    @property
    def _all_planned(self) -> list[Planned]:
        if self.release is not None:
            return self.release.planned
        return [] if self._planned is None else [self._planned]

    # -- what a step can do beside stepping --------------------------------------------------------

    @property
    def grad_norm(self) -> Tensor | None:
        """The global norm that the last step found, 0-d float32 on the device; None without
        max_grad_norm. Reading it waits."""
        return None if self._measured is None else self._measured.source.norm

    @torch.no_grad()
    def gradient_norms(self) -> dict[str | int, Tensor]:
        """The norm of each parameter's gradient in the last step, unscaled and before clipping, for
        a log: 0-d float32 tensors on the device, by the names that the optimizer was given, else by
        the parameters' numbers.

        They come from the sums that clipping takes anyway: asking is three small kernels, and does
        not wait. Parameters that had no gradient are left out. Of a DTensor it is the norm of the
        full gradient, without communication. After a skipped step it tells which was not finite.

        Raises RuntimeError where the last step took no norm.

        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = hdet.FusedAdamW(model.named_parameters(), max_grad_norm=torch.inf)
        >>> (2 * model.weight.sum() + model.bias.sum()).backward()
        >>> optimizer.step()
        >>> {name: round(norm.item(), 3) for name, norm in optimizer.gradient_norms().items()}
        {'weight': 5.657, 'bias': 1.0}
        """
        if self._measured is None:
            raise RuntimeError(
                "gradient_norms() needs a step with max_grad_norm before it, whose clipping takes "
                "the norms: set max_grad_norm (math.inf measures and clips nothing), then step()"
            )
        source, places, absent = self._measured
        names: list[str | int] = []
        for group in self.param_groups:
            numbers = range(len(names), len(names) + len(group["params"]))
            names += group.get("param_names", numbers)
        norms = zip(places, source.gradient_norms().unbind(), strict=True)
        return {names[i]: norm for i, norm in norms if i not in absent}

    @property
    def step_skipped(self) -> Tensor | None:
        """1 if the last step was skipped, for an infinite gradient or norm; 0-d float32 on the
        device. None before the first step."""
        if self.release is not None:
            return self.release.skipped
        active = self._planned.active if self._planned else []
        return active[0][1].plan.skipped if active else None

    @torch.no_grad()
    def write_hyperparameters(self) -> None:
        """Writes rates, multipliers, betas, decay and clipping of the next step to the device, for
        replays of a captured one. Whether a norm is taken is captured with it.

        One small asynchronous copy, and none if nothing has changed. Raises RuntimeError before the
        first step.
        """
        if self.release is not None or self._planned is None:
            raise RuntimeError(
                "write_hyperparameters() needs a step before: there is no table to write to"
            )
        if self._planned.clip is not None and self._max_grad_norm is not None:
            raise RuntimeError(
                "write_hyperparameters() cannot clip DTensors, nor matrices of FusedMuon: their "
                "norm is taken outside of the table; set max_grad_norm=None and use "
                "torch.nn.utils.clip_grad_norm_"
            )
        for part, rows in zip(self._planned.parts, self._settings_of(self._planned), strict=True):
            part.plan.upload(rows, self._options(part.device))

    @property
    def max_grad_norm(self) -> float | None:
        """The global norm that gradients are clipped to; None: no norm is taken."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and not float(value) > 0:
            raise ValueError(
                f"max_grad_norm={value} must be positive; math.inf measures without clipping, None "
                "takes no norm"
            )
        self._max_grad_norm = None if value is None else float(value)

    def _options(self, device: torch.device) -> StepOptions:
        # set by torch's GradScaler
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        norm, zero = self._max_grad_norm or 0.0, bool(self.zero_gradients)
        if scale is None and found is None:
            if norm != self._plain.max_norm or zero != self._plain.zero_gradients:
                self._plain = StepOptions(max_norm=norm, zero_gradients=zero)
            return self._plain
        scales = _scalar(scale, device), _scalar(found, device)
        return StepOptions(*scales, max_norm=norm, zero_gradients=zero)

    # -- replicas and masters ----------------------------------------------------------------------

    @torch.no_grad()
    def set_replicas(self, count: int, copies: Callable[[Tensor], Sequence[Tensor]]) -> None:
        """Steps K = `count` replicas that share gradients and moments from now on; multipliers are
        1.

        copies: gives for a parameter its K tensors, of which the first is the parameter itself;
        alike, on one device, apart in memory.

        Adam and SGD need weight_decay 0: theirs is part of the gradient, which replicas share.
        """
        sets = {param: check_copies(param, copies(param), count) for param in self._listed()}
        self.num_replicas, self._sets = count, sets if count > 1 else {}
        for param, (_, *others) in sets.items():
            for key in REPLICA_KEYS:
                self.state.get(param, {}).pop(key, None)
            if count == 1 or not param.requires_grad:
                continue
            state = self.state[param]
            state["replica_params"] = others
            if masters := kept_masters(state):
                first, master = shards.local(param), shards.local(masters[0])
                made = [like_first(shards.local(copy), first, master) for copy in others]
                state["replica_masters"] = [shards.like(one, param) for one in made]
            for key in BESIDE_KEYS:
                if kept := kept_beside(state, key):
                    state[f"replica_{key}"] = of_each(kept, count)[1:]
        self.multipliers = [[1.0] * len(self.param_groups) for _ in range(count)]
        self.forget_plans()

    def replica_parameters(self, k: int) -> list[Tensor]:
        """The parameters of replica k, in the order of the parameter groups; replica 0 is the
        model's own."""
        if not 0 <= k < self.num_replicas:
            raise ValueError(
                f"replica {k} does not exist: there are {self.num_replicas}, numbered from 0"
            )
        return [self._replicas_of(param)[k] for param in self._listed()]

    @torch.no_grad()
    def average_replicas(self, weights: Sequence[float]) -> None:
        """Every replica becomes sum_k weights[k] * replica k (Eq. 3), masters and parameters.
        The weights are divided by their sum; a replica of weight 0 is not read. Moments and
        counters are shared and stay. Frozen parameters are left alone."""
        self._refuse_average("average_replicas()")
        shares = normalised(weights, self.num_replicas)
        self._take_over()
        if self.num_replicas == 1:
            return
        params = [
            param
            for param in self._listed()
            if param.requires_grad or "step" in self.state.get(param, {})
        ]
        for device, places in plans.by_device(params, range(len(params))).items():
            chosen = [params[i] for i in places]
            sets = list(map(list, zip(*map(self._replicas_of, chosen), strict=True)))
            states = [shards.local_state(self.state.get(param, {}), param) for param in chosen]
            masters = plans.master_columns(states, self.num_replicas)
            # weights beside them are averaged as if they were parameters more, without masters
            beside = [kept_beside(state, key) for state in states for key in BESIDE_KEYS]
            beside = [kept for kept in beside if kept]
            sets = [[*column, *(kept[k] for kept in beside)] for k, column in enumerate(sets)]
            masters = masters and [[*column, *([None] * len(beside))] for column in masters]
            self._averaging.setdefault(device, Averaging())(sets, masters, shares, self.backend)
        self._refresh_watches()

    @torch.no_grad()
    def masters(self, params: Sequence[Tensor], replica: int = 0) -> list[Tensor | None]:
        """The master of each of these parameters in that replica: float32, or int16 or int8 (the
        lower half of a split one), or None.

        What has been written to parameters in place is taken over first, so that masters say what
        the model is now. Tensors that the optimizer does not step, and states before their first
        step, have None. Of a DTensor: the shard of its master on this rank.
        """
        if self.master_weights is None:
            return [None] * len(params)
        self._take_over()
        kept = [kept_masters(self.state.get(param, {})) for param in params]
        return [
            shards.local(masters[replica]) if replica < len(masters) else None for masters in kept
        ]

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Masters become exactly what the parameters are: after writing to them in a way that is
        not noticed (see the class)."""
        for param, state in self.state.items():
            for tensor, master in zip(state_sets(state, param), kept_masters(state), strict=False):
                reset_master(tensor, master)

    def _take_over(self) -> None:
        if self.is_averaged:
            return
        if self._planned is not None:
            self._planned.watch.check()
        else:  # with released gradients plans are not of all parameters
            Watch([(p, self.state[p]) for p in self._listed() if p in self.state]).check()

    @torch.no_grad()
    def beside(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        """The weights that are kept beside each of these tensors, as they lie on this rank:
        schedule-free's z, averages over time. None of what is not trained here.

        Of a parameter that has had no gradient yet they are made now, for all replicas must have
        the same ones to average."""
        keys = (*RULES[self.rule].weights, *EMA_KEYS[: len(self.ema)])
        kinds = {
            p: self._rule_of(group).kind(group)
            for group in self.param_groups
            for p in group["params"]
            if keys and p.requires_grad
        }
        made = {
            p: self._layout(p).missing(state, self._replicas_of(p), kinds[p].keeps_moments)
            for p in params
            if p in kinds and not (state := self.state[p]).keys() >= set(keys)
        }
        plans.add_entries(self.state, made)
        states = [shards.local_state(self.state.get(p, {}), p) for p in params]
        return [[state[key] for key in keys if key in state] for state in states]

    # -- averages over time ------------------------------------------------------------------------

    @contextmanager
    def averaged(self, number: int = 0) -> Iterator[None]:
        """Inside, the parameters are their average over time (`ema`), of which `number` chooses
        one: to evaluate the model, or to save it. Afterwards they are the weights again, bitwise,
        also after an error.

        In all replicas, each of its own; of 16 bits rounded to nearest. A parameter that has not
        been stepped yet is left as it is. Costs a copy of the parameters. Inside, step(),
        state_dict(), load_state_dict() and a copy of the optimizer raise RuntimeError: they are
        about the weights.

        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = hdet.FusedAdamW(model.parameters(), ema=0.999)
        >>> model(torch.ones(4, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> with optimizer.averaged():
        ...     loss = model(torch.ones(4, 8)).square().mean()
        """
        if not 0 <= number < len(self.ema):
            raise ValueError(
                f"average {number} does not exist: this optimizer keeps {len(self.ema)} (ema=), "
                "numbered from 0"
            )
        self._refuse_average("averaged()")
        self._take_over()
        states = [(param, self.state.get(param, {})) for param in self._listed()]
        pairs = [
            (shards.local(own), shards.local(average))
            for param, state in states
            for own, average in zip(
                state_sets(state, param), kept_beside(state, EMA_KEYS[number]), strict=False
            )
        ]
        weights = [own.detach().clone() for own, _ in pairs]
        self.is_averaged = True
        try:
            with torch.no_grad():
                for own, average in pairs:
                    own.copy_(average)
            yield
        finally:
            with torch.no_grad():
                for (own, _), weight in zip(pairs, weights, strict=True):
                    own.copy_(weight)
            self.is_averaged = False
            self._refresh_watches()

    def _refresh_watches(self) -> None:
        for planned in self._all_planned:
            planned.watch.refresh()

    def _refuse_average(self, what: str) -> None:
        """Of what needs the weights in the parameters."""
        if self.is_averaged:
            raise RuntimeError(
                f"{what} inside optimizer.averaged(), where the parameters are an average over "
                "time: call it outside"
            )

    # -- state -------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_average("deepcopy() or pickle.dumps()")  # a copy would not know its weights
        own = {name: getattr(self, name) for name in _OWN}
        own["multipliers"] = [list(row) for row in self.multipliers]
        own["releases"] = self.release is not None
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called with a whole optimizer by pickle and copy, and with `state` and `param_groups` by
        # load_state_dict.
        for i, group in enumerate(state["param_groups"]):
            name = f"parameter group {i} of the loaded state"
            for key, value in {**self._carried(), "maximize": False}.items():
                group.setdefault(key, value)
            if self._carried().get("decoupled_weight_decay"):
                # as torch.optim.AdamW, which also takes the state of an Adam
                group["decoupled_weight_decay"] = True
            if absent := [key for key in self._rule_of(group).keys if key not in group]:
                raise ValueError(
                    f"{name} lacks {', '.join(absent)}: it is not that of a {type(self).__name__}"
                )
            self._check_group(group, name)
        if "defaults" not in state:
            state = {**state, "state": self._loaded_state(state["state"])}
        super().__setstate__(state)
        self.forget_plans()
        if self.__dict__.pop("releases", False):
            self.release_gradients()

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer.state_dict.

        Where there are replicas of a parameter that has not been stepped yet, its state is that
        of a first step: torch's optimizer needs a whole one, and a distributed checkpoint loads
        what is there to be filled."""
        self._refuse_average("state_dict()")
        # the first one: others see what it has made
        complete = lambda _, saved: self._complete(saved)
        handle = self.register_state_dict_post_hook(complete, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def _complete(self, saved: dict[str, Any]) -> None:
        """Completes the state that torch has packed, by the parameters' numbers."""
        grouped = [(param, group) for group in self.param_groups for param in group["params"]]
        for i, (param, group) in enumerate(grouped):
            state = saved["state"].get(i, {})
            if "replica_params" in state and state.keys() <= set(REPLICA_KEYS):
                sets, keeps = self._replicas_of(param), self._rule_of(group).keeps_moments(group)
                state = {**state, **self._layout(param).missing(state, sets, keeps)}
                saved["state"][i] = state
            if are_coded(state) or "remainder" in state:
                saved["state"][i] = self._layout(param).saved(state, param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of this optimizer or of torch's.

        See torch.optim.Optimizer.load_state_dict.

        Moments and masters keep their precision, whatever the parameter's dtype is. Co-resident
        replicas are written in place. A state of one replica is everyone's, up to the parameters
        themselves. A state of another number of replicas is everyone's if they are equal, as after
        a converge (one of two float32 replicas is compared with the model, which is to be loaded
        before); from the middle of a cycle it is refused by ValueError.
        """
        self._refuse_average("load_state_dict()")
        held: dict[str, Any] = {}

        def hold(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            # torch would cast floating state to the parameter's dtype: it gets the groups, and
            # `_loaded_state` takes the rest.
            held.update(final)
            return {**final, "state": {}}

        # the last one: it sees what others have made of the state
        handle = self.register_load_state_dict_pre_hook(hold)
        self._held = held
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._held = {}

    def _counted(self, values: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        """The loaded state of a parameter of that group, with its number of steps."""
        return values

    def _loaded_state(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """The held state by parameter, in this optimizer's layout.

        Nothing is changed before all is checked.
        """
        made = defaultdict(dict, state)
        copies: list[tuple[Tensor, Tensor]] = []
        saved = self._held.get("param_groups", [])
        groups_of = {name: group for group in saved for name in group["params"]}
        params = dict(zip(groups_of, self._listed(), strict=True)) if saved else {}
        dropped: dict[str, None] = {}
        for key, values in self._held.get("state", {}).items():
            param = params.get(key)
            if param is None:  # not a parameter's: carried, as torch does
                made[key] = values
                continue
            layout, group = self._layout(param), groups_of[key]
            if "exp_avg_sq" in values and "differentiable" in group and "amsgrad" not in group:
                raise ValueError(
                    f"the loaded state of parameter {key} lacks amsgrad in its group: it is that "
                    "of torch's NAdam or RAdam, which no optimizer of hdet is: load it there, or "
                    "begin without it"
                )
            values = self._counted(values, group)
            entries = layout.loaded(values, param, f"parameter {key}")
            if layout.master_key(param) is None and kept_masters(entries):
                dropped["master weights"] = None
            if not layout.emas and EMA_KEYS[0] in values:
                dropped["averages over time"] = None
            ours = self._sets.get(param, [param])[1:]
            copies += zip(ours, replicas_for(entries, param, ours), strict=False)
            made[param] = entries
        for what in dropped:
            warnings.warn(
                f"the loaded state has {what}, this optimizer keeps none: they are dropped",
                stacklevel=4,
            )
        with torch.no_grad():
            for destination, source in copies:
                destination.copy_(source)
        return made


def _is_torchfts(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torchft.")


def _scalar(value: Tensor | float | None, device: torch.device) -> Tensor | None:
    """What torch's GradScaler leaves, where and as the kernels read it."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.float32, device=device)
    return value.to(device=device, dtype=torch.float32, non_blocking=True)
