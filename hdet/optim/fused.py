"""FusedOptimizer: a torch optimizer whose step is one call of hdet's kernels, for one replica or
several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hdet import kernels
from hdet.kernels import StepOptions
from hdet.kernels.checks import UnusualMemory
from hdet.rules import RULES
from hdet.tensors import dtensor as shards
from hdet.tensors.profiling import ranged

from . import group_checks as groups
from . import lists
from . import step_plans as plans
from .coresident import Coresident
from .finish import ShardedClip
from .step_plans import Planned


class _Norms(NamedTuple):
    source: kernels.StepPlan | ShardedClip
    places: Sequence[int]
    """of its norms among all parameters"""
    absent: list[int]
    """the places of those that had no gradient"""


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


class TorchOptions(Options, total=False):
    """Those, and what torch's optimizer takes by name as far as it has it."""

    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None
    decoupled_weight_decay: bool


class FusedOptimizer(Coresident):
    """What all fused optimizers share: torch's, stepped by one kernel call for all parameters.

    FusedMuon, too, but for its matrices.

    Parameters are float32, bfloat16 or float16, in any mixture, dense, in any order of dimensions
    (channels_last), as their gradients must be, which are any of the three. Arithmetic is float32
    everywhere. Whoever has no gradient is left alone. A gradient that is a negated view
    (`is_neg()`) is refused in a first step. Later ones are not asked, to save a call for each: use
    resolve_neg() in a hook where a model makes such views. Options that choose between torch's
    implementations (foreach, fused, capturable) are accepted and change nothing; amsgrad and
    differentiable are refused.

    Args beside torch's:
        master_weights: what stands beside a parameter of 16 bits; float32 parameters need nothing.
            None: nothing, a step smaller than half the parameter's spacing is lost (see
            stochastic_rounding). "fp32": a float32 value, of which the parameter is the rounded
            copy. "split": the 16 bits that a bfloat16 parameter lacks to an exact float32 value;
            the parameter is rounded to nearest, ties away from zero. float16 parameters get "fp32"
            then.
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
        cautious_decay: weight decay acts on those elements alone that the direction u brings nearer
            to 0 too, u * p >= 0 (Chen et al. 2025, arXiv 2510.12402). Adam and SGD refuse it: their
            decay is part of the gradient.

    Multipliers: `multipliers[replica][group]`, 1.0 by default, may be assigned at any time. A step
    uses lr * multiplier (Eq. 2), and `group["lr"]` stays as it is. They belong to the running
    process, not to the training state: not in state_dict, but kept by a copy or a pickle.

    State of a parameter, created in its first step with a gradient: `step` (0-d float32, on the
    parameter's device), the moments under torch's names, `master_param` (float32) or `remainder`
    (int16; in `state_dict()` the same bits as bfloat16, which gloo and NCCL can gather), and with K
    replicas `replica_params` and `replica_masters`, lists of K - 1 tensors. Each `step` counts for
    its own parameter, also after a write to it; a parameter without a gradient does not count.
    States of torch's optimizer load here and ours there; moments and masters pass bitwise,
    whatever the parameter's dtype is. A state without masters gets them from the parameters, and
    "fp32" and "split" load into each other exactly.

    Moments in 8 bits: in `state` a moment is a uint8 tensor of codes, like the parameter, beside
    float32 scales under `<moment>_scale`. `state_dict()` has float32 values in their place, made
    for it: 4 bytes for each element and moment, for as long as it lives. So it loads everywhere,
    torch.distributed.checkpoint reshards it, and float32 states load here. Values that were codes
    become the same codes again: a resume with the same shards is exact. Blocks begin again in each
    shard. If a number of a block is not finite, its block of 256 is NaN; a step with max_grad_norm,
    or under a GradScaler, is skipped before.

    Writing to parameters: a master begins as its parameter is. What is written to a parameter in
    place later (load_state_dict of the model, an initialisation, a broadcast) is noticed by the
    version that autograd counts, and taken over before the next step or average wherever the
    parameter no longer is the rounded master. Loading model and optimizer in any order so resumes
    exactly. Writing through `.data` is not counted: call `refresh_masters()` after it. torchft's
    LocalSGD and DiLoCo write so in a hook of the step: while they do, each step compares masters
    and parameters, which reads both once more. A split
    parameter is the upper half of its value: what is written there counts at once, and the lower
    half stays, which is off by up to half the parameter's spacing until `refresh_masters()`.

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
    also when steps with others have come between.

    Costs, in bytes for each parameter. State: 4 per moment (2 in bfloat16, 1.016 in 8 bits), 4 or 2
    for a master. Traffic of a float32 step: 8 per moment, 12 for parameter and gradient; with
    max_grad_norm 4 more, with zero_gradients 4 more, and 8 more for each further replica. A step
    with K replicas so moves 20 + 8 K bytes for AdamW, where K separate ones move 28 K. Other
    gradients than in the last step, also None here and there, cost one small copy, and other rates
    come along with the launch. A parameter's first gradient, moved or replaced tensors cost a new
    plan, some microseconds per tensor.
    """

    _step_supports_amp_scaling = True

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
        decay_at: str = "replica",
        **carried: Any,
    ) -> None:
        defaults = {
            **self._carried(),
            **dict(zip(RULES[self.rule].settings, settings, strict=False)),
        }
        for key in carried.keys() - self._carried().keys():
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {key!r}")
        if decay_at != "replica" and RULES[self.rule].coupled:
            raise TypeError(
                f"{type(self).__name__} takes no decay_at: its decay is a part of the gradient"
            )
        if cautious_decay and RULES[self.rule].coupled:
            raise TypeError(
                f"{type(self).__name__} takes no cautious_decay: its decay is part of the gradient"
            )
        kernels.check_name(backend)
        groups.check_storage(master_weights, moment_dtype, seed, decay_at)
        self.backend, self.master_weights = backend, master_weights
        self.moment_dtype = moment_dtype or torch.float32
        self.stochastic_rounding, self.seed, self.decay_at = stochastic_rounding, seed, decay_at
        self.cautious_decay = cautious_decay
        self.max_grad_norm, self.zero_gradients = max_grad_norm, zero_gradients
        self.num_replicas = 1
        self.first_replica = 0
        self.multipliers = [[]]
        self._sets = {}
        self._forget()
        defaults |= {"maximize": maximize, **carried}
        self._check_group(defaults, "the defaults")
        super().__init__(params, defaults)

    def _forget(self) -> None:
        super()._forget()
        self._clip: ShardedClip | None = None
        self._measured: _Norms | None = None
        self._plain = StepOptions()

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
        own = planned.own(gradients, absent)
        options = self._options_of(planned, own)
        try:
            laid = _as_stored(own) if planned.copies_gradients else own
            planned.step(laid, settings, options)
        except UnusualMemory:  # torch's optimizers take such gradients, too
            planned.copies_gradients, laid = True, _as_stored(own)
            planned.step(laid, settings, options)
        if self.zero_gradients and planned.copies_gradients:
            for gradient, copied in zip(own, laid, strict=True):
                if gradient is not None and gradient is not copied:
                    gradient.zero_()
        self._planned, self._measured = planned, self._norms_in(planned)
        hooks = self._optimizer_step_post_hooks
        if hooks and any(map(_is_torchfts, hooks.values())):
            # It may average after this step, or be gone by the next one. To look at a sample of
            # elements instead would wait for the device in each step.
            planned.watch.distrust()
        if (
            self.zero_gradients and planned.sharded
        ):  # a gradient that was reduced first has been zeroed where it was reduced to
            for gradient in gradients:
                if gradient is not None and shards.is_partial(gradient):
                    shards.local(gradient).zero_()
        return loss

    def _options_of(
        self, planned: Planned, own: list[Tensor | None]
    ) -> Callable[[torch.device], StepOptions]:
        """The options of a step on these gradients, by device.

        Of shards, and of what is stepped in turns, the norm is taken here.
        """
        devices = {part.device for _, part in planned.active}
        if (
            self._max_grad_norm is None
            or len(devices) != 1
            or not (planned.sharded or planned.in_turns)
        ):
            self._clip = None  # no norm is found, or a plan finds it
            return self._options
        planned.check(own)
        if self._clip is None or not lists.same(self._clip.params, planned.params):
            self._clip = ShardedClip(planned.params)
        options = self._clip(own, self._max_grad_norm, self._options(*devices))
        return lambda _: options

    def _norms_in(self, planned: Planned) -> _Norms | None:
        """Where the step that has been done has left the norms of its gradients."""
        if self._max_grad_norm is None or not planned.active:
            return None
        if self._clip is not None:
            return _Norms(self._clip, range(len(planned.params)), planned.absent)
        part = planned.active[0][1]
        return _Norms(part.plan, part.places, planned.absent)

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
        return (
            self._planned.active[0][1].plan.skipped
            if self._planned and self._planned.active
            else None
        )

    @torch.no_grad()
    def write_hyperparameters(self) -> None:
        """Writes rates, multipliers, betas, decay and clipping of the next step to the device, for
        replays of a captured one. Whether a norm is taken is captured with it.

        One small asynchronous copy, and none if nothing has changed. Raises RuntimeError before the
        first step.
        """
        if self._planned is None:
            raise RuntimeError(
                "write_hyperparameters() needs a step before: there is no table to write to"
            )
        apart = self._planned.sharded or self._planned.in_turns
        if apart and self._max_grad_norm is not None:
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
        scale, found = (
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
        )  # set by torch's GradScaler
        norm, zero = self._max_grad_norm or 0.0, bool(self.zero_gradients)
        if scale is None and found is None:
            if norm != self._plain.max_norm or zero != self._plain.zero_gradients:
                self._plain = StepOptions(max_norm=norm, zero_gradients=zero)
            return self._plain
        return StepOptions(
            plans.scalar(scale, device),
            plans.scalar(found, device),
            max_norm=norm,
            zero_gradients=zero,
        )


def _is_torchfts(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torchft.")


def _as_stored(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies of those whose memory has gaps or another order, or holds the opposite of their
    values."""
    return [
        None if gradient is None else gradient.resolve_neg().contiguous() for gradient in gradients
    ]
