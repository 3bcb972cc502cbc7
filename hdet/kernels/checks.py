"""Refusals: every check runs before anything is written, and its message names the argument, what
is wrong, and the remedy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..rules import COUPLED, DECOUPLED, RULES, StepSettings
from .interface import Column, StepOptions, StepTensors
from .numbers import CODES, LOWER, count_scales, is_lower

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MOMENTS = (torch.float32, torch.bfloat16, CODES)
MASTER_TYPES = (torch.float32, *LOWER)
MASTERS = {
    torch.float32: (),
    torch.bfloat16: MASTER_TYPES,
    torch.float16: (torch.float32,),
}


def wide_dtype(device: torch.device) -> torch.dtype:
    """What hyperparameters and sums of squares are computed in: float64 wherever the device has
    it."""
    return torch.float32 if device.type == "mps" else torch.float64


class UnusualMemory(ValueError):
    """A tensor that a copy of it could stand in for: its memory has gaps or another order, or holds
    the opposite of its values."""


def check_tensor(
    tensor: object,
    name: str,
    device: torch.device,
    dtypes: Sequence[torch.dtype] = FLOATS,
    any_strides: bool = False,
) -> None:
    """Accepts a dense, contiguous tensor (or one of any strides) of one of the dtypes with memory
    on `device`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, which wraps other tensors; pass its local tensor"
        )
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{name} has the layout {tensor.layout}; only dense (strided) tensors are supported: "
            "use .to_dense()"
        )
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{name} has the dtype {tensor.dtype}; it must be {_listed(dtypes)}: use "
            f".to({dtypes[0]})"
        )
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device}, but the first tensor is on {device}; one call works on "
            "one device"
        )
    if not (any_strides or tensor.is_contiguous()):
        raise UnusualMemory(
            f"{name} of shape {tuple(tensor.shape)} is not contiguous (strides {tensor.stride()}): "
            "use .contiguous()"
        )
    if tensor.is_neg():
        raise UnusualMemory(
            f"{name} is a negated view, whose memory holds the opposite of what it stands for: use "
            ".resolve_neg()"
        )
    held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if tensor.numel() > 0 and (tensor.data_ptr() == 0 or held < tensor.nbytes):
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} has no memory (meta or fake tensor), or its "
            "storage was resized to less than it needs: give it its memory back"
        )


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    names = [str(dtype) for dtype in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def device_of(tensor: object, name: str) -> torch.device:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    return tensor.device


def check_same_shape(tensor: Tensor, like: Tensor, name: str, like_name: str) -> None:
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} has the shape {tuple(tensor.shape)}, but {like_name} has {tuple(like.shape)}"
        )


def check_apart(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """No two of the named tensors share memory: what is written to one would be read again as the
    other."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors if t.numel()
    )
    for (_, end, one), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"{one} and {other} overlap in memory: give each its own")


def check_gradients_apart(gradients: Column, numbers: Sequence[int]) -> None:
    """Of a step that zeroes them: one that two parameters share would be zeros for the second."""
    pairs = zip(numbers, gradients, strict=True)
    check_apart((f"the gradient of parameter {i}", g) for i, g in pairs if g is not None)


def check_sets(
    params: Sequence[Sequence[Tensor]],
    masters: Sequence[Column] | None,
    numbers: Sequence[int] | None = None,
    noun: str = "parameter",
) -> list[tuple[str, Tensor]]:
    """K equally long lists of tensors of equal shapes and dtypes at equal places, and their
    masters: one format speaks for all replicas. Returns all of them with their names, by `numbers`,
    default their positions."""
    first, count = params[0], len(params)
    numbers = range(len(first)) if numbers is None else numbers
    device = device_of(first[0], f"{noun} {numbers[0]}")
    if masters is not None and len(masters) != count:
        raise ValueError(f"masters has {len(masters)} lists for {count} replicas")
    named: list[tuple[str, Tensor]] = []
    for k, row in enumerate(params):
        of = f" of replica {k}" if count > 1 else ""
        _check_length(row, f"params{of}", len(first), f"{noun}s")
        for i, tensor, like in zip(numbers, row, first, strict=True):
            name = f"{noun} {i}{of}"
            check_tensor(tensor, name, device)
            check_same_shape(tensor, like, name, f"{noun} {i} of replica 0")
            named.append((name, tensor))
        _check_alike(row, first, numbers, noun, k)
        if masters is not None:
            named += _check_masters(row, masters[k], numbers, of)
            _check_alike(masters[k], masters[0], numbers, f"master of {noun}", k)
    return named


def _check_length(column: Sequence[object], name: str, count: int, of: str = "parameters") -> None:
    if len(column) != count:
        raise ValueError(f"{name} has {len(column)} entries, but there are {count} {of}")


def _check_alike(column: Column, first: Column, numbers: Sequence[int], noun: str, k: int) -> None:
    for i, *tensors in zip(numbers, column, first, strict=True):
        dtype, like = (None if tensor is None else tensor.dtype for tensor in tensors)
        if dtype != like:
            raise TypeError(
                f"{noun} {i} of replica {k} has the dtype {dtype}, but that of replica 0 "
                f"has {like}; replicas are alike"
            )


def _check_masters(
    params: Sequence[Tensor],
    masters: Column,
    numbers: Sequence[int],
    of: str = "",
    any_strides: bool = False,
) -> list[tuple[str, Tensor]]:
    """With their names."""
    _check_length(masters, f"masters{of or ' (or lower halves)'}", len(params))
    named = []
    for i, param, master in zip(numbers, params, masters, strict=True):
        if master is None:
            continue
        name = f"master of parameter {i}{of}"
        check_tensor(master, name, param.device, MASTER_TYPES, any_strides)
        check_same_shape(master, param, name, "the parameter")
        if master.dtype not in MASTERS[param.dtype]:
            allowed = _listed(MASTERS[param.dtype]) if MASTERS[param.dtype] else ""
            raise TypeError(
                f"{name} ({param.dtype}) has the dtype {master.dtype}; it must be "
                f"{allowed or 'None: the parameter is its own master'}"
            )
        named.append((name, master))
    return named


def check_step_tensors(tensors: StepTensors) -> None:
    """Everything a step relies on for as long as its plan is used."""
    t = tensors
    if t.rule not in RULES:
        raise ValueError(f"rule={t.rule!r} is unknown; choose {', '.join(RULES)}")
    if not 0 <= t.first_replica <= 65536 - t.num_replicas:
        raise ValueError(
            f"first_replica={t.first_replica} is out of range: replicas are numbered from 0 to "
            "65535"
        )
    if t.stochastic is not None and not 0 <= t.stochastic < 1 << 64:
        raise ValueError(f"stochastic={t.stochastic} must be a seed from 0 to 2^64 - 1, or None")
    for name, column in (("groups", t.groups), ("steps", t.steps), ("ids", t.numbers)):
        _check_length(column, name, len(t.params[0]))
    named, device = check_sets(t.params, t.masters, t.numbers), t.params[0][0].device
    if sorted(set(t.groups)) != list(range(len(set(t.groups)))):
        raise ValueError(
            f"groups must number the settings from 0 without a gap, got {sorted(set(t.groups))}"
        )
    for key, counters in (("step", t.steps), ("ema_step", t.ema_steps)):
        for i, step in zip(t.numbers, counters, strict=False):
            name = f"{key} of parameter {i}"
            check_tensor(step, name, device, FLOATS[:1])
            if step.dim() != 0:
                raise TypeError(
                    f"{name} must be a 0-d float32 tensor, got the shape {tuple(step.shape)}"
                )
            named.append((name, step))
    check_apart([*named, *_check_moments(t), *_check_emas(t)])


def _check_emas(t: StepTensors) -> Iterable[tuple[str, Tensor]]:
    """With their names."""
    _check_length(t.emas, "emas", len(t.averages), "averages")
    _check_length(t.ema_steps, "ema_steps", len(t.params[0]) if t.averages else 0)
    for j, sets in enumerate(t.emas):
        _check_length(sets, f"average {j}", t.num_replicas, "replicas")
        for k, column in enumerate(sets):
            _check_length(column, f"average {j} of replica {k}", len(t.params[0]))
            for i, average, param in zip(t.numbers, column, t.params[k], strict=True):
                whose = f"average {j} of parameter {i} of replica {k}"
                check_tensor(average, whose, param.device, FLOATS[:1])
                check_same_shape(average, param, whose, "the parameter")
                yield whose, average


def _check_moments(t: StepTensors) -> Iterable[tuple[str, Tensor]]:
    """With their names, and their scales. Codes have scales, nothing else has, and all moments of a
    tensor are codes or none is, but for exact ones."""
    rule, params = RULES[t.rule], t.params[0]
    for title, sets in (("moments", t.moments), ("scales", t.scales)):
        if sets is not None and len(sets) != len(rule.moments):
            raise ValueError(
                f"{title} has {len(sets)} lists, but {t.rule} keeps {', '.join(rule.moments)}"
            )
    coded = set(t.coded())
    for j, name in enumerate(rule.moments):
        exact, scales = name in rule.exact, t.scales_of(j)
        _check_length(t.moments[j], name, len(params))
        _check_length(scales, f"scales of {name}", len(params))
        columns = zip(t.numbers, params, t.moments[j], scales, strict=True)
        for i, (number, param, moment, scale) in enumerate(columns):
            whose = f"{name} of parameter {number}"
            if moment is None:
                if rule.kept_if is None:  # else: see check_settings
                    raise ValueError(f"{whose} is missing; {t.rule} needs it")
                continue
            check_tensor(moment, whose, param.device, FLOATS[:1] if exact else MOMENTS)
            check_same_shape(moment, param, whose, f"parameter {number}")
            yield whose, moment
            if not exact and (moment.dtype == CODES) != (i in coded):
                names = " and ".join(name for name in rule.moments if name not in rule.exact)
                raise TypeError(
                    f"{names} of parameter {number} must all be {CODES}, or none of them"
                )
            if (moment.dtype == CODES) != (scale is not None):
                raise ValueError(
                    f"{whose} ({moment.dtype}) must have scales if it is {CODES}, and none else"
                )
            if scale is not None:
                check_tensor(scale, f"scales of {whose}", param.device, FLOATS[:1])
                if scale.shape != (blocks := count_scales(moment.numel()),):
                    raise ValueError(
                        f"scales of {whose} has the shape {tuple(scale.shape)}, it must be "
                        f"{(blocks,)}: one for each block of codes"
                    )
                yield f"scales of {whose}", scale


def check_gradients(
    gradients: Sequence[object], params: Sequence[Tensor], numbers: Sequence[int]
) -> None:
    """For each parameter None, or a gradient: float32, bfloat16 or float16 of the parameter's
    shape, dense, contiguous, on its device."""
    if len(gradients) != len(params):
        raise ValueError(f"{len(gradients)} gradients for {len(params)} parameters")
    for i, gradient, param in zip(numbers, gradients, params, strict=True):
        name = f"the gradient of parameter {i}"
        if gradient is None:
            continue
        check_tensor(gradient, name, param.device)
        check_same_shape(gradient, param, name, "the parameter")  # type: ignore[arg-type]


def check_pairs(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    source_lowers: Column | None,
    masters: Column | None,
    any_layout: bool,
) -> None:
    """Pairs of equal shapes, no source overlapping a destination.

    `any_layout`: any floating dtypes and strides.
    """
    device = device_of(sources[0], "source 0")
    for i, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        for name, tensor in ((f"source {i}", source), (f"destination {i}", destination)):
            if not any_layout:
                check_tensor(tensor, name, device)
                continue
            device_of(tensor, name)  # refuses what is no tensor
            if tensor.layout != torch.strided or not tensor.is_floating_point():
                raise TypeError(
                    f"{name} ({tensor.dtype}, {tensor.layout}) must be a dense tensor of floating "
                    "point: use .to_dense()"
                )
        check_same_shape(destination, source, f"destination {i}", "its source")
    numbers = range(len(sources))
    written = [(f"destination {i}", tensor) for i, tensor in enumerate(destinations)]
    if masters is not None:
        written += _check_masters(destinations, masters, numbers, any_strides=any_layout)
    read = [(f"source {i}", tensor) for i, tensor in enumerate(sources)]
    if source_lowers is not None:
        read += _check_masters(sources, source_lowers, numbers, any_strides=any_layout)
        for i, lower in enumerate(source_lowers):
            if lower is not None and not is_lower(lower):
                raise TypeError(
                    f"lower half of source {i} has the dtype {lower.dtype}; it must be "
                    f"{_listed(LOWER)}: pass a float32 master as the source"
                )
    if not any_layout:
        _check_sides_apart(read, written)


def _check_sides_apart(
    read: Sequence[tuple[str, Tensor]], written: Sequence[tuple[str, Tensor]]
) -> None:
    """Nothing that is read shares memory with something that is written."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.nbytes, side, name)
        for side, ts in enumerate((read, written))
        for name, t in ts
    )
    last = [(0, ""), (0, "")]  # of each side: the furthest end so far, and whose it is
    for start, end, side, name in spans:
        other_end, other = last[1 - side]
        if start < min(end, other_end):
            raise ValueError(f"{other} and {name} overlap in memory: give each its own")
        last[side] = max(last[side], (end, name))


def normalised(weights: Sequence[float], num_replicas: int) -> list[float]:
    """The weights divided by their sum."""
    values = [float(w) for w in weights]
    if num_replicas == 0:
        raise ValueError("replicas is empty; pass at least one list of tensors")
    if len(values) != num_replicas:
        raise ValueError(f"weights has {len(values)} entries for {num_replicas} replicas")
    if not all(0 <= w < math.inf for w in values):
        raise ValueError(f"weights must be finite and not negative, got {values}")
    total = math.fsum(values)
    if total <= 0:
        raise ValueError(f"weights must not all be 0, got {values}: no replica is left to average")
    return [w / total for w in values]


def check_settings(settings: Sequence[StepSettings], tensors: StepTensors) -> None:
    """One entry for each group, with hyperparameters that are finite and in range."""
    if len(settings) != tensors.num_groups:
        raise ValueError(f"{len(settings)} settings for {tensors.num_groups} groups")
    device = tensors.params[0][0].device
    for g, s in enumerate(settings):
        check_group(s, tensors.rule, tensors.num_replicas, device, f"group {g}")
    kept_if = RULES[tensors.rule].kept_if
    for i, group in enumerate(tensors.groups if kept_if else ()):
        value = getattr(settings[group], kept_if)  # type: ignore[arg-type]
        if value != 0 and tensors.moments[0][i] is None:
            raise ValueError(
                f"{kept_if} is {value}, but {RULES[tensors.rule].moments[0]} of parameter "
                f"{tensors.numbers[i]} is missing: plan again with one"
            )


def check_group(
    s: StepSettings, rule: str, num_replicas: int, device: torch.device, name: str
) -> None:
    """The hyperparameters of one group. NaN fails every comparison."""
    if isinstance(s.lr, Tensor):
        check_scalar(s.lr, f"lr of {name}", device)
    if len(s.multipliers) != num_replicas:
        raise ValueError(
            f"multipliers of {name} has {len(s.multipliers)} entries for {num_replicas} replicas"
        )
    for rho in s.multipliers:
        if not 0 <= rho < math.inf:
            raise ValueError(
                f"multipliers of {name} must be finite and not negative, got {list(s.multipliers)}"
            )
    facts = RULES[rule]
    values = facts.read(s)
    facts.check((0.0, *values[1:]) if isinstance(s.lr, Tensor) else values, name)
    if s.cautious_decay and rule in COUPLED:
        raise ValueError(
            f"cautious_decay of {name} needs decay that is no part of the gradient: use "
            f"{' or '.join(DECOUPLED)}"
        )
    if num_replicas > 1 and RULES[rule].gives_parameter:
        raise ValueError(f"{rule} steps one replica, not {num_replicas}")
    if num_replicas > 1 and rule in COUPLED and s.weight_decay != 0:
        raise ValueError(
            f"weight_decay={s.weight_decay} of {name} is part of the gradient for {rule}, so "
            f"{num_replicas} replicas cannot share moments: "
            f"set it to 0 or use {' or '.join(DECOUPLED)}"
        )


def check_scalar(tensor: object, name: str, device: torch.device) -> None:
    """Accepts one float32 number on the device."""
    check_tensor(tensor, name, device, (torch.float32,))
    shape = tuple(tensor.shape)  # type: ignore[attr-defined]
    if math.prod(shape) != 1:
        raise ValueError(f"{name} must hold one number, got the shape {shape}")


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
