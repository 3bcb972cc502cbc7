"""load: all is read and checked on all ranks, then taken over by all of them, or by none."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..core.validate import whole
from ..optim.fused import FusedOptimizer
from ..tensors.buffers import refill
from ..tensors.dtensor import like, local
from .folder import STATE, open_checkpoint, verify_files
from .plain_data import decode
from .run_state import Inventory, RunState, state_methods
from .tensor_files import SavedRank
from .together import Together
from .undo import Undo


def load(root: str | os.PathLike[str], state: RunState, *, missing: int | None = None) -> int:
    """Continue from a checkpoint: a folder ``step-XXXXXXXX``, or the latest of a root.

    Every rank calls it. All of it is read and checked before anything in the run is changed:
    checksums, names, shapes, dtypes and the Ensemble's state. Then model, optimizer, ``extra`` and
    Ensemble take it over. If one of them refuses, on any rank, or the load is interrupted, all get
    back what they had. The number of replicas may be another: base values, corrections and
    velocities go on. DTensors may be sharded in another way.

    Args:
        missing: the step to begin at, such as 0, where ``root`` holds no checkpoint. The first rank
            looks and tells all. None: that is an error. A damaged checkpoint is one in any case.

    Returns:
        The step that was given to `save`; or ``missing``, and nothing has been changed.

    Raises:
        ValueError: ``missing`` is negative.
        CheckpointError: on every rank alike, in one line: there is none, it is damaged (the one
            before is named, never taken silently), of another format, or does not fit the run.
    """
    if missing is not None:
        whole(missing, "missing", 0)
    with state.ensemble.guard("checkpoint"):
        together = Together(state.ensemble.replicas)
        opened = together.first(lambda: open_checkpoint(Path(root), missing is None))
        if opened is None:
            assert missing is not None
            return missing
        folder, manifest = opened
        verify_files(folder, manifest["files"], together)
        problem = f"checkpoint {str(folder)!r} does not fit this run: "
        saved = SavedState(state, folder, manifest)
        together.all(saved.read, problem)
        with Undo() as undo:
            for load_part in (saved.load_model, saved.load_optimizer, saved.load_extra):
                together.all(partial(load_part, undo), problem)
            ensemble = state.ensemble.taken_over(saved.parts["ensemble"])
            together.all(lambda: undo.enter_context(ensemble), problem)
        return saved.step


class SavedState:
    """What a verified checkpoint holds for this rank.

    Rank m of replica r takes what rank m of replica r held, modulo the saved numbers. Where all
    replicas share one state of the optimizer, they take that of replica 0.
    """

    def __init__(self, run: RunState, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.run, self.folder, self.manifest = run, folder, manifest

    def read(self) -> None:
        """Read and check all of it; raise for what does not fit. The run is not changed."""
        run, content = self.run, json.loads((self.folder / STATE).read_bytes())
        self.step: int = whole(self.manifest["step"], "step", 0)
        replicas, members = run.ensemble.replicas, self.manifest["members"]
        member = replicas.member % members
        number = replicas.index % self.manifest["replicas"] * members + member
        place = self.folder, self.manifest["files"], content
        own = SavedRank(*place, number, members)
        holders = dict.fromkeys(own.parts, own)
        if run.extra is None:
            holders.pop("extra", None)
        self.ours = Inventory(run)
        self._check_model(own, is_cut_alike=replicas.members == members)
        ensemble = decode(own.parts["ensemble"], partial(self._read_tensor, own))
        if run.ensemble.shares_moments_after(ensemble):
            holders["optimizer"] = SavedRank(*place, member, members)
        self.parts = {
            part: decode(rank.parts[part], partial(self._read_tensor, rank))
            for part, rank in holders.items()
        }
        self.extra = self.parts.get("extra") or {}
        for key in run.extra or ():
            if key not in self.extra:
                raise ValueError(
                    f"it has no extra[{key!r}]: make the RunState as the saved run did"
                )
        self.optimizer = self._numbered(self.parts["optimizer"])
        run.ensemble.check_state(self.parts["ensemble"])

    def _read_tensor(self, rank: SavedRank, name: str) -> torch.Tensor:
        """Of what is laid out as a tensor of the model, what this rank holds; else all of it."""
        prefix = re.match(r"(model|average|optimizer\.state)\.", name)
        path = name[prefix.end() :] if prefix else ""
        while path and path not in self.ours.tensors:
            path = path.rpartition(".")[0]
        tensor = self.ours.tensors.get(path)
        if tensor is None or rank.kind(name)[0] != tuple(tensor.shape):
            return rank.read(name)
        shard = rank.read(name, like=tensor)
        return like(shard, tensor) if name.startswith("optimizer") else shard

    def _check_model(self, rank: SavedRank, is_cut_alike: bool) -> None:
        stored = decode(rank.parts["model"], str)
        theirs = {name: "{1} of shape {0}".format(*rank.kind(key)) for name, key in stored.items()}
        ours = {n: f"{t.dtype} of shape {tuple(t.shape)}" for n, t in self.ours.tensors.items()}
        wrong = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
        if wrong:
            there, here = (kinds.get(wrong[0], "nothing") for kinds in (theirs, ours))
            raise ValueError(
                f"{wrong[0]!r} is {there} there and {here} here, and {len(wrong) - 1} more tensors "
                "differ: it is of another model, or of replicas of other ranks"
            )
        for name, key in stored.items():
            if not (is_cut_alike or rank.is_whole(key) or name in self.ours.own_buffers):
                raise ValueError(
                    f"it was saved with other numbers of ranks in a replica, and {name!r}, which "
                    "differs between these, is not a DTensor that can be cut again: use the saved "
                    "layout"
                )

    def _numbered(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A state_dict of the optimizer."""
        groups, ours = saved["groups"], self.ours.groups
        theirs = [group["params"] for group in groups]
        if theirs != ours:
            raise ValueError(
                f"the saved optimizer has parameter groups of {[*map(len, theirs)]} parameters, "
                f"this one of {[*map(len, ours)]}, or in another order: build the optimizer as the "
                "saved run did"
            )
        number = {name: i for i, name in enumerate(chain(*ours))}
        for group, present in zip(groups, self.run.optimizer.param_groups, strict=True):
            group["params"] = [number[name] for name in group["params"]]
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and isinstance(present.get(key), torch.Tensor):
                    # torch moves states to where the parameters are, but not settings
                    group[key] = value.to(present[key].device)
        state = {number.get(key, key): entries for key, entries in saved["state"].items()}
        return {**saved["rest"], "state": state, "param_groups": groups}

    # -- taking over ------------------------------------------------------------------------------

    def load_model(self, undo: Undo) -> None:
        ours, model = self.ours, self.run.model

        def load(modules: dict[str, Any]) -> None:
            """By the model's own way as well, which has hooks and extra states."""
            whole = {name: tensor.detach() for name, tensor in ours.tensors.items()} | modules
            model.load_state_dict({raw: whole[name] for raw, name in ours.names.items()})

        counted = tuple(t for t in ours.tensors.values() if not t.is_inference())
        versions = tuple(t._version for t in counted)  # by which writes are noticed
        undo.on_error(torch._C._autograd._unsafe_set_version_counter, counted, versions)
        undo.on_error(load, copy.deepcopy(ours.modules))
        for name, tensor in ours.tensors.items():
            undo.keep(tensor, writes=True)
            local(tensor.detach()).copy_(self.parts["model"].pop(name))
        load(self.parts["modules"] or {})

    def load_optimizer(self, undo: Undo) -> None:
        """And what the Ensemble keeps for its averages."""
        optimizer, ensemble, ours = self.run.optimizer, self.run.ensemble, self.ours
        ways = Optimizer.load_state_dict, FusedOptimizer.load_state_dict
        further = getattr(optimizer, "num_replicas", 1) - 1
        # These make new tensors; those of others may write into those that there are.
        undo.keep(optimizer, writes=bool(further) or type(optimizer).load_state_dict not in ways)
        for follower in (ensemble.replicas, ensemble.averager):  # by hooks on it
            undo.keep(vars(follower), writes=True)
        params = chain(*(group["params"] for group in optimizer.param_groups))
        for i, param in enumerate(params):
            if further and param.requires_grad and i in self.optimizer["state"]:
                # The other replicas on this device begin as copies of the loaded model.
                self.optimizer["state"][i]["replica_params"] = [param.detach()] * further
        optimizer.load_state_dict(self.optimizer)
        average = self.parts.get("average") or {}
        if ours.averaged.keys() <= average.keys():  # of a run without it nothing: it begins again
            rows = zip(*(average[name] for name in ours.averaged), strict=True)
            ensemble.averager.load_state([*chain(*rows)])

    def load_extra(self, undo: Undo) -> None:
        """Objects load their state; plain values are replaced."""
        extra = self.run.extra
        if extra is None:
            return
        owners = {key: value for key, value in extra.items() if state_methods(value)}
        for value in owners.values():
            undo.keep_state(value)
        undo.on_error(refill, extra, extra.copy())
        for key, value in owners.items():
            state_methods(value)[1](self.extra[key])  # type: ignore[index]
        extra.clear()
        extra.update({**self.extra, **owners})
