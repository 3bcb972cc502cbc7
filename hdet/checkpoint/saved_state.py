"""What a checkpoint holds for this rank: read and checked whole, then taken over."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..tensors.dtensor import is_sharded, like, local
from .folder import STATE
from .inventory import Inventory, optimizer_parameters
from .plain_data import check_extra_fits, decode, give_extra
from .run_state import RunState
from .tensor_files import TensorFiles


class SavedState:
    """Reads a verified checkpoint for a run; making it and `check` change nothing in the run.

    Rank m of replica r takes what rank m of replica r held, modulo the saved numbers. Under shared
    gradients all take the optimizer's state of replica 0.

    Raises:
        ValueError: it is of another model, optimizer or layout.
        CheckpointError: its index has gaps.
    """

    def __init__(self, run: RunState, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.run, self._content = run, json.loads((folder / STATE).read_bytes())
        count, members = manifest["replicas"], manifest["members"]
        place = run.ensemble.replicas
        member = place.member % members
        own = place.index % count * members + member
        of_optimizer = own if run.ensemble.sync.gradients == "local" else member
        self._is_same_size = place.members == members
        index = self._content["tensors"]
        self._files = {r: TensorFiles(folder, index, r, members) for r in (own, of_optimizer)}

        self.model = self._read_model(own)
        self.modules = self._part("modules", own) or {}
        self.optimizer = self._read_optimizer(of_optimizer)
        self.average = self._read_average(own)
        self.ensemble = self._part("ensemble", own)
        self.extra = None
        if run.extra is not None:
            self.extra = self._part("extra", own)
            if self.extra is None:
                raise ValueError("it has no extra: make the RunState as the saved run did")

    def check(self) -> None:
        """Raise ValueError for what the Ensemble, the optimizer or ``extra`` would refuse."""
        self.run.check_outside_use()
        self.run.ensemble.check_state(self.ensemble)
        if self.run.extra is not None:
            check_extra_fits(self.run.extra, self.extra)
        rehearse_load(self.run.optimizer, self.optimizer)

    # -- taking over ------------------------------------------------------------------------------

    def give_extra(self) -> None:
        if self.run.extra is not None:
            give_extra(self.run.extra, self.extra)

    def load_ensemble(self) -> None:
        self.run.ensemble.load_state_dict(self.ensemble)

    @torch.no_grad()
    def load_model_and_optimizer(self) -> None:
        inventory = Inventory(self.run.model)
        for name, tensor in inventory.tensors.items():
            local(tensor.detach()).copy_(self.model[name])
        # By the model's own way as well, which has hooks and extra states.
        whole = {**{name: t.detach() for name, t in inventory.tensors.items()}, **self.modules}
        self.run.model.load_state_dict({r: whole[name] for r, name in inventory.first_name.items()})
        optimizer = self.run.optimizer
        further = getattr(optimizer, "num_replicas", 1) - 1
        for i, param in enumerate(optimizer_parameters(optimizer)):
            if further and param.requires_grad and i in self.optimizer["state"]:
                # The other replicas on this device begin as copies of the loaded model.
                self.optimizer["state"][i]["replica_params"] = [param.detach()] * further
        optimizer.load_state_dict(self.optimizer)
        if self.average is not None:
            self.run.ensemble.weights.average.load_state(self.average)

    # -- reading ----------------------------------------------------------------------------------

    def _raw(self, part: str, rank: int) -> Any:
        """A part of the saved rank's state, as JSON; None where it has none."""
        stored = self._content["parts"].get(part)
        return None if stored is None else stored["values"][stored["of_rank"][rank]]

    def _part(self, part: str, rank: int) -> Any:
        return decode(self._raw(part, rank), self._files[rank].read)

    def _read_model(self, rank: int) -> dict[str, torch.Tensor]:
        """By name, what this rank holds of it."""
        saved, ours = self._raw("model", rank), Inventory(self.run.model).tensors
        missing = [name for name in ours if name not in saved]
        unknown = [name for name in saved if name not in ours]
        if missing or unknown:
            raise ValueError(
                f"it lacks {_shorten(missing)} and has {_shorten(unknown)} which the model has "
                "not: it is of another model, or of replicas of other ranks"
            )
        files, own_buffers = self._files[rank], self.run.own_buffers()
        for name, tensor in ours.items():
            stored = saved[name]["$tensor"]
            if not (self._is_same_size or files.is_whole(stored) or name in own_buffers):
                raise ValueError(
                    f"it was saved with other numbers of ranks in a replica, and {name!r}, which "
                    "differs between these, is not a DTensor that can be cut anew: use the saved "
                    "layout"
                )
            there, here = files.kind(stored), (tuple(tensor.shape), tensor.dtype)
            if there != here:
                kinds = " there and ".join(
                    f"{dtype} of shape {shape}" for shape, dtype in (there, here)
                )
                raise ValueError(f"{name!r} is {kinds} here")
        return {name: files.read(saved[name]["$tensor"], like=t) for name, t in ours.items()}

    def _read_optimizer(self, rank: int) -> dict[str, Any]:
        """A state_dict of the optimizer."""
        saved, names = self._raw("optimizer", rank), self.run.parameter_names()
        read = self._files[rank].read
        groups = decode(saved["groups"], read)
        _check_groups(groups, self.run)
        state = decode(saved["others"], read)
        for i, param in enumerate(optimizer_parameters(self.run.optimizer)):
            if names[i] in saved["state"]:
                laid_out = partial(self._read_entry, param, rank)
                state[i] = decode(saved["state"][names[i]], laid_out)
        numbers = iter(range(len(names)))
        for group, present in zip(groups, self.run.optimizer.param_groups, strict=True):
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and isinstance(present.get(key), torch.Tensor):
                    # torch moves states to where the parameters are, but not settings
                    group[key] = value.to(present[key].device)
            group["params"] = [next(numbers) for _ in present["params"]]
        return {**decode(saved["rest"], read), "state": state, "param_groups": groups}

    def _read_entry(self, param: torch.Tensor, rank: int, key: str) -> torch.Tensor:
        """An entry of a parameter's state, sharded like the parameter if it has its shape."""
        files = self._files[rank]
        if is_sharded(param) and files.kind(key)[0] == tuple(param.shape):
            return like(files.read(key, like=param), param)
        return files.read(key)

    def _read_average(self, rank: int) -> list[torch.Tensor] | None:
        """What the way of averaging keeps; of a run without it nothing, and it begins anew."""
        saved, params = self._raw("average", rank) or {}, self.run.averaged_parameters()
        if not all(name in saved for name in params):
            return None
        files = self._files[rank]
        return [files.read(saved[name]["$tensor"], like=p) for name, p in params.items()]


def rehearse_load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state into a stand-in: raise what the optimizer would raise, and change nothing."""
    stand_in: Any = object.__new__(type(optimizer))
    hooks = [n for n in vars(optimizer) if n.startswith("_optimizer_") and n.endswith("_hooks")]
    stand_in.__dict__.update({**vars(optimizer), **{name: OrderedDict() for name in hooks}})
    type(optimizer).load_state_dict(stand_in, state)


def _check_groups(groups: list[dict[str, Any]], run: RunState) -> None:
    names = iter(run.parameter_names())
    ours = [[next(names) for _ in group["params"]] for group in run.optimizer.param_groups]
    theirs = [group["params"] for group in groups]
    if ours == theirs:
        return
    there, here = [len(names) for names in theirs], [len(names) for names in ours]
    what = f"the saved optimizer has parameter groups of {there} parameters, this one of {here}"
    if there == here:
        pairs = zip(chain(*theirs), chain(*ours), strict=True)
        a, b = next((a, b) for a, b in pairs if a != b)
        what += f"; the first that differs is {a!r} there and {b!r} here"
    raise ValueError(f"{what}: build the optimizer as the saved run did")


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more if names else "nothing"
