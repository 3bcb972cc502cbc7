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
from .numbers import CODES, count_scales

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MOMENTS = (torch.float32, torch.bfloat16, CODES)
MASTER_TYPES = (torch.float32, torch.int16)
MASTERS = {
    torch.float32: (),
    torch.bfloat16: MASTER_TYPES,  # int16: the split form
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
    if tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} has no memory (meta or fake tensor)"
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


def _of(i: int, k: int, num_replicas: int) -> str:
    return f"parameter {i}" + (f" of replica {k}" if num_replicas > 1 else "")


def check_step_tensors(tensors: StepTensors) -> None:
    """Everything a step relies on for as long as its plan is used."""
    t = tensors
    if t.rule not in RULES:
        raise ValueError(f"rule={t.rule!r} is unknown; choose {', '.join(RULES)}")
    count, replicas = len(t.params[0]), t.num_replicas
    if not 0 <= t.first_replica <= 65536 - replicas:
        raise ValueError(
            f"first_replica={t.first_replica} is out of range: replicas are numbered from 0 to "
            "65535"
        )
    if t.stochastic is not None and not 0 <= t.stochastic < 1 << 64:
        raise ValueError(f"stochastic={t.stochastic} must be a seed from 0 to 2^64 - 1, or None")
    _check_lengths(t, count)
    named = list(_step_parts(t))
    device = device_of(t.params[0][0], "parameter 0")
    for i, name, tensor, dtypes in named:
        check_tensor(tensor, name, device, dtypes)
        if name.startswith("step of"):
            if tensor.dim() != 0:
                raise TypeError(
                    f"{name} must be a 0-d float32 tensor, got the shape {tuple(tensor.shape)}"
                )
        elif name.startswith("scales of"):
            if tensor.shape != (count := count_scales(t.params[0][i].numel()),):
                raise ValueError(
                    f"{name} has the shape {tuple(tensor.shape)}, it must be {(count,)}: one for "
                    "each block of codes"
                )
        else:
            check_same_shape(tensor, t.params[0][i], name, f"parameter {i}")
    _check_codes(t)
    for prefix, columns in (("", t.params), ("master of ", t.masters or [])):
        for k, column in enumerate(columns):
            _check_alike(column, columns[0], prefix, k)
    if t.masters is not None:
        _check_masters(t.params[0], t.masters[0], 0, replicas)
    check_apart((name, tensor) for _, name, tensor, _ in named)


def _check_lengths(t: StepTensors, count: int) -> None:
    rule = RULES[t.rule]
    columns = [(name, getattr(t, name)) for name in ("groups", "steps", "ids")]
    for name in ("moments", "scales"):
        sets = getattr(t, name)
        if sets is not None and len(sets) != len(rule.moments):
            raise ValueError(
                f"{name} has {len(sets)} lists, but {t.rule} keeps {', '.join(rule.moments)}"
            )
        of = "" if name == "moments" else "scales of "
        columns += [(of + one, c) for one, c in zip(rule.moments, sets or (), strict=False)]
    for name in ("params", "masters"):
        sets = getattr(t, name)
        if sets is not None and len(sets) != t.num_replicas:
            raise ValueError(f"{name} has {len(sets)} lists for {t.num_replicas} replicas")
        columns += [(f"{name} of replica {k}", column) for k, column in enumerate(sets or [])]
    for name, column in columns:
        if column is not None and len(column) != count:
            raise ValueError(f"{name} has {len(column)} entries, but there are {count} parameters")
    if sorted(set(t.groups)) != list(range(len(set(t.groups)))):
        raise ValueError(
            f"groups must number the settings from 0 without a gap, got {sorted(set(t.groups))}"
        )
    for name, column in zip(rule.moments, t.moments, strict=True):
        absent = [i for i in range(count) if column[i] is None]
        if absent and rule.kept_if is None:  # else: see check_settings
            raise ValueError(f"{name} of parameter {absent[0]} is missing; {t.rule} needs it")


def _step_parts(t: StepTensors) -> Iterable[tuple[int, str, Tensor, Sequence[torch.dtype]]]:
    """(number of its parameter, name, tensor, allowed dtypes) of every tensor a step writes."""
    exact = RULES[t.rule].exact
    whose = "parameter {}" + " of replica {}" * (t.num_replicas > 1)
    columns: list[tuple[str, int, Column, Sequence[torch.dtype]]] = [
        *((whose, k, column, FLOATS) for k, column in enumerate(t.params)),
        *(
            (f"master of {whose}", k, column, MASTER_TYPES)
            for k, column in enumerate(t.masters or [])
        ),
        *(
            (f"{name} of parameter {{}}", 0, column, MOMENTS if name not in exact else FLOATS[:1])
            for name, column in zip(RULES[t.rule].moments, t.moments, strict=True)
        ),
        *(
            (f"scales of {name} of parameter {{}}", 0, column, (torch.float32,))
            for name, column in zip(RULES[t.rule].moments, t.scales or (), strict=False)
        ),
        ("step of parameter {}", 0, t.steps, (torch.float32,)),
    ]
    for name, k, column, dtypes in columns:
        for i, tensor in enumerate(column):
            if (
                tensor is not None or column is t.params[k] or column is t.steps
            ):  # which none may lack
                yield i, name.format(i, k), tensor, dtypes  # type: ignore[misc]


def _check_codes(t: StepTensors) -> None:
    """Codes have scales, nothing else has, and all moments of a tensor are codes or none is, but
    for exact ones."""
    rule = RULES[t.rule]
    names = [name for name in rule.moments if name not in rule.exact]
    all_coded = set(t.coded())
    for j, (name, moments) in enumerate(zip(rule.moments, t.moments, strict=True)):
        scales, coded = t.scales_of(j), all_coded if name in names else set()
        for i, moment in enumerate(moments):
            if moment is None:
                continue
            if (moment.dtype == CODES) != (i in coded):
                raise TypeError(
                    f"{' and '.join(names)} of parameter {i} must all be {CODES}, or none of them"
                )
            if (i in coded) != (scales[i] is not None):
                raise ValueError(
                    f"{name} of parameter {i} ({moment.dtype}) must have scales if it is {CODES}, "
                    "and none else"
                )


def _check_alike(column: Column, first: Column, prefix: str, k: int) -> None:
    """One format speaks for all replicas."""
    for i, (dtype, like) in enumerate(zip(_dtypes(column), _dtypes(first), strict=True)):
        if dtype != like:
            raise TypeError(
                f"{prefix}tensor {i} of replica {k} has the dtype {dtype}, but that of replica 0 "
                f"has {like}; replicas are alike"
            )


def _dtypes(column: Column) -> list[torch.dtype | None]:
    return [None if tensor is None else tensor.dtype for tensor in column]


def _check_masters(params: Sequence[Tensor], masters: Column, k: int, num_replicas: int) -> None:
    for i, (param, master) in enumerate(zip(params, masters, strict=True)):
        if master is not None and master.dtype not in MASTERS[param.dtype]:
            remedy = (
                _listed(MASTERS[param.dtype])
                if MASTERS[param.dtype]
                else "None: the parameter is its own master"
            )
            raise TypeError(
                f"master of {_of(i, k, num_replicas)} ({param.dtype}) has the dtype "
                f"{master.dtype}; it must be {remedy}"
            )


def check_gradients(gradients: Sequence[object], params: Sequence[Tensor]) -> None:
    """For each parameter None, or a gradient: float32, bfloat16 or float16 of the parameter's
    shape, dense, contiguous, on its device."""
    if len(gradients) != len(params):
        raise ValueError(f"{len(gradients)} gradients for {len(params)} parameters")
    for i, (gradient, param) in enumerate(zip(gradients, params, strict=True)):
        name = f"the gradient of parameter {i}"
        if gradient is None:
            continue
        check_tensor(gradient, name, param.device)
        check_same_shape(gradient, param, name, "the parameter")  # type: ignore[arg-type]


def check_replicas(
    params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None = None
) -> None:
    """K equally long lists of tensors of equal shapes and dtypes at equal places, and their
    masters, none sharing memory."""
    first = params[0]
    if masters is not None and len(masters) != len(params):
        raise ValueError(f"masters has {len(masters)} lists for {len(params)} replicas")
    named: list[tuple[str, Tensor]] = []
    for k, row in enumerate(params):
        if len(row) != len(first):
            raise ValueError(f"replica {k} has {len(row)} tensors, but replica 0 has {len(first)}")
        for i, tensor in enumerate(row):
            name = f"tensor {i} of replica {k}"
            check_tensor(tensor, name, device_of(first[0], "tensor 0 of replica 0"))
            check_same_shape(tensor, first[i], name, "replica 0")
            named.append((name, tensor))
        _check_alike(row, first, "", k)
        if masters is not None:
            named += _check_master_column(row, masters[k], k, len(params))
            _check_alike(masters[k], masters[0], "master of ", k)
    check_apart(named)


def _check_master_column(
    params: Sequence[Tensor], masters: Column, k: int, num_replicas: int, any_strides: bool = False
) -> list[tuple[str, Tensor]]:
    if len(masters) != len(params):
        whose = f"masters of replica {k}" if num_replicas > 1 else "masters (or lower halves)"
        raise ValueError(f"{whose} has {len(masters)} entries, but there are {len(params)} tensors")
    named = [
        (i, f"master of {_of(i, k, num_replicas)}", master)
        for i, master in enumerate(masters)
        if master is not None
    ]
    for i, name, master in named:
        check_tensor(master, name, params[i].device, MASTER_TYPES, any_strides)
        check_same_shape(master, params[i], name, "the parameter")
    _check_masters(params, masters, k, num_replicas)
    return [(name, master) for _, name, master in named]


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
            elif (
                not device_of(tensor, name)
                or tensor.layout != torch.strided
                or not tensor.is_floating_point()
            ):
                raise TypeError(
                    f"{name} ({tensor.dtype}, {tensor.layout}) must be a dense tensor of floating "
                    "point: use .to_dense()"
                )
        check_same_shape(destination, source, f"destination {i}", "its source")
    written = [(f"destination {i}", tensor) for i, tensor in enumerate(destinations)]
    if masters is not None:
        written += _check_master_column(destinations, masters, 0, 1, any_layout)
    read = [(f"source {i}", tensor) for i, tensor in enumerate(sources)]
    if source_lowers is not None:
        read += _check_master_column(sources, source_lowers, 0, 1, any_layout)
        for i, lower in enumerate(source_lowers):
            if lower is not None and lower.dtype != torch.int16:
                raise TypeError(
                    f"lower half of source {i} has the dtype {lower.dtype}; it must be "
                    "torch.int16: pass a float32 master as the source"
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
                f"{kept_if} is {value}, but {RULES[tensors.rule].moments[0]} of parameter {i} is "
                "missing: plan again with one"
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
