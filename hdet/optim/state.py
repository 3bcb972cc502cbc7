"""What an optimizer keeps for each parameter: made, moved, converted and loaded here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from hdet.kernels import numbers
from hdet.kernels.numbers import CODES
from hdet.rules import Facts, Rule, is_signed
from hdet.tensors import dtensor as shards
from hdet.tensors import strides

from . import lists
from . import moment_storage as stored
from .masters import (
    BESIDE_KEYS,
    EMA_KEYS,
    LAST_NORM,
    MASTER_DTYPES,
    MASTER_KEYS,
    REPLICA_KEYS,
    kept_beside,
    kept_masters,
    like_first,
    make_master,
    regain,
)

_RELAY = (
    "load through torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which lays "
    "states out as their parameters are"
)


@dataclass(frozen=True)
class Layout:
    """How the state of a parameter is stored.

    moment_dtype: of 8 bits that of the codes; exact moments are float32 in any case.
    emas: the names of the averages over time that are kept.
    """

    rule: Facts
    moment_dtype: torch.dtype
    master_weights: str | None
    emas: Sequence[str] = ()

    def dtypes(self) -> dict[str, torch.dtype]:
        """Of the moments, by name."""
        exact = dict.fromkeys(self.rule.exact, torch.float32)
        return {**dict.fromkeys(self.rule.moments, self.moment_dtype), **exact}

    def master_key(self, param: Tensor) -> str | None:
        """The state's name for this parameter's master, or None: a float32 parameter is its own."""
        if self.master_weights is None or param.dtype == torch.float32:
            return None
        return "remainder" if self.master_dtype(param) in numbers.LOWER else "master_param"

    def master_dtype(self, param: Tensor) -> torch.dtype:
        # a float16 parameter cannot be half of a float32 number
        is_half = param.dtype == torch.bfloat16
        return MASTER_DTYPES[self.master_weights] if is_half else torch.float32

    def missing(
        self, state: Mapping[str, Any], sets: Sequence[Tensor], moments: bool
    ) -> dict[str, Any]:
        """The entries to add to a parameter's state, or to replace in it, before it can be stepped;
        None: the entry must go.

        `sets` is the parameter in all its replicas, the parameter itself first. `moments`: are
        moments to be kept? The state of a DTensor is made of DTensors that are laid out as it is.
        """
        param = sets[0]
        if shards.is_sharded(param):
            _check_layouts(state, param, self.rule)
        kept, own = shards.local_state(state, param), shards.locals_of(sets)
        made = self._moments(kept, own) if moments else {}
        made |= self._counter(kept, own[0], moments)
        for name in self.emas:
            made |= _beside(kept, own, name)
        if self.emas and not _counts(seen := kept.get("ema_step", 0.0), own[0]):
            name = f"ema_step of a parameter of shape {tuple(param.shape)}"
            made["ema_step"] = _counted(seen, name, own[0])
        made |= self._masters(kept, own)
        entries = shards.state_like(made, param)
        if len(sets) > 1 and not lists.same(state.get("replica_params") or [], list(sets[1:])):
            entries["replica_params"] = list(sets[1:])
        return entries

    def _moments(self, state: Mapping[str, Any], sets: Sequence[Tensor]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        param = sets[0]
        for name, dtype in self.dtypes().items():
            if name in self.rule.weights:
                entries |= _beside(state, sets, name)
            elif state.get(name) is None:
                entries |= stored.zeros(name, param, dtype)
            elif not stored.fits(name, state, param, dtype):
                signed = is_signed(name)
                values = stored.values_of(name, state, signed).detach().to(param.device)
                entries |= stored.entries(name, strides.like(values, param), dtype, signed)
        return entries

    def _counter(self, state: Mapping[str, Any], param: Tensor, moments: bool) -> dict[str, Tensor]:
        kept, step = [state.get(name) for name in self.rule.moments], state.get("step")
        if moments and kept[0] is None:
            step = 0.0  # moments that begin at zero need the corrections of a first step
        elif step is None:  # torch's SGD does not count; a buffer that is there has seen a step
            step = any(moment is not None for moment in kept)
        if _counts(step, param):
            return {}
        return {"step": _counted(step, f"step of a parameter of shape {tuple(param.shape)}", param)}

    def _masters(self, state: Mapping[str, Any], sets: Sequence[Tensor]) -> dict[str, Any]:
        key, kept = self.master_key(sets[0]), kept_masters(state)
        made: list[Tensor] = []
        if key is None:
            for param, master in zip(sets, kept, strict=False):
                regain(param, master)
        else:
            dtype = self.master_dtype(sets[0])
            fit = [_fits(m, p, dtype) for m, p in zip(kept, sets, strict=False)]
            if state.get(key) is not None and fit == [True] * len(sets):
                return {}
            known: Sequence[Tensor | None] = kept or [None]
            pairs = zip(sets, known, strict=False)
            made = [make_master(param, master, dtype) for param, master in pairs]
            made += [like_first(param, sets[0], made[0]) for param in sets[len(made) :]]
            made = [strides.like(m, p) for m, p in zip(made, sets, strict=True)]
        entries: dict[str, Any] = {
            name: None for name in (*MASTER_KEYS, "replica_masters") if name in state
        }
        if key is not None:
            entries[key] = made[0]
        if len(made) > 1:
            entries["replica_masters"] = made[1:]
        return entries

    def loaded(self, values: Mapping[str, Any], param: Tensor, name: str) -> dict[str, Any]:
        """A loaded state of one parameter on its device and in this layout's dtypes, without a
        detour through the parameter's.

        Large tensors that fit are taken as they are, as torch does; the step counter is copied.
        """
        moments = self.dtypes()
        halves = values.get("remainder")
        if getattr(halves, "dtype", None) == torch.bfloat16:
            values = _with_halves(values, torch.int16)
        lower = torch.int8 if getattr(halves, "dtype", None) == torch.int8 else torch.int16
        dtypes = {
            **{key: torch.float32 if d == CODES else d for key, d in moments.items()},
            "master_param": torch.float32,
            "remainder": lower,
            "replica_params": param.dtype,
            "replica_masters": torch.float32 if halves is None else lower,
            **{f"replica_{key}": torch.float32 for key in BESIDE_KEYS},
            **dict.fromkeys(EMA_KEYS, torch.float32),
        }
        placed: dict[str, Any] = {}
        for key, value in values.items():
            if value is None:  # torch's SGD before its first momentum
                continue
            if key in ("step", "ema_step", LAST_NORM):
                # a number, float64 or a tensor anywhere, depending on torch's version and options
                placed[key] = _counted(value, f"the loaded {key} of {name}", param)
            elif key in REPLICA_KEYS:
                placed[key] = [_checked(v, param, dtypes[key], f"{key} of {name}") for v in value]
            elif key in moments and getattr(value, "dtype", None) == CODES:
                raise ValueError(
                    f"the loaded {key} of {name} is {CODES}, codes as they are in a running "
                    "optimizer: save its state_dict()"
                )
            elif key in dtypes:
                placed[key] = _checked(value, param, dtypes[key], f"{key} of {name}")
            else:
                placed[key] = value
        for key, dtype in moments.items():
            if dtype == CODES and key in placed:
                made = stored.entries(key, shards.local(placed[key]), dtype, is_signed(key))
                placed.update(shards.state_like(made, param))
        theirs = [key for key in EMA_KEYS if key in placed]
        if not self.emas:
            for key in (*theirs, *(f"replica_{key}" for key in theirs), "ema_step"):
                placed.pop(key, None)
        elif theirs and (theirs != list(self.emas) or "ema_step" not in placed):
            raise ValueError(
                f"the loaded state of {name} has {len(theirs)} averages over time, this optimizer "
                f"{len(self.emas)}: construct it with as many (ema=)"
            )
        absent = [key for key in self.rule.required if key not in placed]
        if absent and placed.keys() - set(REPLICA_KEYS):
            raise ValueError(
                f"the loaded state of {name} lacks {', '.join(absent)}: it is that of another "
                "optimizer"
            )
        return placed

    def saved(self, state: Mapping[str, Any], param: Tensor) -> Mapping[str, Any]:
        """The state as it is handed out. Loading it gives the same bits.

        Codes are float32 values, as long as what is returned lives. Lower halves of 16 bits are
        seen as bfloat16: neither gloo nor NCCL knows int16, and both move bits as they are."""
        if getattr(state.get("remainder"), "dtype", None) == torch.int16:
            state = _with_halves(state, torch.bfloat16)
        coded = [name for name in self.rule.moments if stored.scale_key(name) in state]
        if not coded:
            return state
        own = shards.local_state(state, param)
        values = {name: stored.values_of(name, own, is_signed(name)) for name in coded}
        scales = {stored.scale_key(name) for name in coded}
        return {
            **{key: value for key, value in state.items() if key not in scales},
            **shards.state_like(values, param),
        }


def _with_halves(state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A state whose masters are lower halves, with these seen in another type."""
    keys = state.keys() & {"remainder", "replica_masters"}
    return {key: _seen_as(v, dtype) if key in keys else v for key, v in state.items()}


def _seen_as(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_seen_as(one, dtype) for one in value]
    return shards.like(shards.local(value).view(dtype), value)


def _beside(state: Mapping[str, Any], sets: Sequence[Tensor], key: str) -> dict[str, Any]:
    """One of BESIDE_KEYS of all replicas, if it does not fit: of another number of them the first
    one's; where there is none, each replica's own value."""
    kept = kept_beside(state, key)
    fit = [_fits(one, param, torch.float32) for one, param in zip(kept, sets, strict=False)]
    if len(kept) == len(sets) and all(fit):
        return {}
    if kept:
        made = of_each(kept, len(sets))
    else:
        pairs = zip_longest(sets, kept_masters(state)[: len(sets)])
        made = [numbers.value_of(param.detach(), master).clone() for param, master in pairs]
    made = [
        strides.like(one.detach().to(param.device, torch.float32), param)
        for one, param in zip(made, sets, strict=True)
    ]
    return {key: made[0], **({f"replica_{key}": made[1:]} if len(made) > 1 else {})}


def of_each(kept: Sequence[Tensor], count: int) -> list[Tensor]:
    """One for each replica: of another number of them the first one, which counts for all."""
    if len(kept) == count:
        return list(kept)
    return [kept[0], *(kept[0].clone() for _ in range(count - 1))]


def replicas_for(entries: dict[str, Any], param: Tensor, ours: Sequence[Tensor]) -> list[Tensor]:
    """Fits the loaded entries of a parameter to its further replicas `ours`.

    Returns what is to be copied into these; empty: nothing.
    """
    kept = {"replica_masters": kept_masters(entries)}
    kept |= {f"replica_{key}": kept_beside(entries, key) for key in BESIDE_KEYS}
    theirs = entries.pop("replica_params", [])
    for key in kept:
        entries.pop(key, None)
    if not ours:
        return []
    if theirs and len(theirs) != len(ours):
        # The first replica is in the model's state, which may be loaded later: it is asked only
        # where nothing else can tell.
        alone = len(theirs) == 1 and len(kept["replica_masters"]) < 2
        first = [param] if alone else []
        if not all(map(_same_bits, ([*theirs, *first], *kept.values()))):
            raise ValueError(
                f"the loaded state has {len(theirs) + 1} replicas that are not equal, this "
                f"optimizer {len(ours) + 1}: construct as many, or call ensemble.converge() before "
                f"saving{' and load the model before the optimizer' if alone else ''}"
            )
        theirs = theirs[:1] * len(ours)
        kept = {key: tensors[:1] for key, tensors in kept.items()}
    entries["replica_params"] = list(ours)
    for key, tensors in kept.items():
        if tensors:
            entries[key] = of_each(tensors, 1 + len(ours))[1:]
    return theirs


def _fits(tensor: Tensor, param: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.device == param.device and strides.alike(tensor, param)


def _counts(step: Any, param: Tensor) -> bool:
    """Is it a counter as kernels count it?"""
    form = (0, torch.float32, param.device)
    return isinstance(step, Tensor) and (step.dim(), step.dtype, step.device) == form


def _counted(step: Any, name: str, param: Tensor) -> Tensor:
    """A counter of the parameter's, in a new tensor."""
    if isinstance(step, Tensor) and step.numel() != 1:
        raise ValueError(f"{name} has the shape {tuple(step.shape)}: it must be one number")
    return torch.tensor(float(step), dtype=torch.float32, device=param.device)


def _check_layouts(state: Mapping[str, Any], param: Tensor, rule: Facts) -> None:
    whose = f"a parameter of shape {tuple(param.shape)}"
    dims = shards.sharding_dims(param, whose)  # refuses sums that have not been taken
    if dims and isinstance(rule, Rule) and rule.trace.sums:
        raise ValueError(
            f"{rule.optimizer} needs sums over whole parameters, and {whose} is "
            f"{shards.described(param)}: keep it whole (DDP), or use another optimizer"
        )
    for key, value in state.items():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, Tensor) and not shards.is_plain(key):
                shards.check_alike(tensor, param, f"{key} of {whose}", _RELAY)


def _checked(value: Any, param: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(
            f"the loaded {name} is a {type(value).__name__}, not a tensor: the state is damaged"
        )
    if value.shape != param.shape:
        raise ValueError(
            f"the loaded {name} has the shape {tuple(value.shape)}, the parameter "
            f"{tuple(param.shape)}: it is of another model"
        )
    shards.check_alike(value, param, f"the loaded {name}", _RELAY)
    own = shards.local(param)
    placed = shards.local(value).detach().to(device=own.device, dtype=dtype)
    return shards.like(strides.like(placed, own), param)


def _same_bits(tensors: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(tensor, tensors[0]) and torch.equal(tensor.signbit(), tensors[0].signbit())
        for tensor in tensors[1:]
    )
