"""RunState: model, optimizer, Ensemble and what else a run has, as a Stateful of torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..ensemble import Ensemble
from ..optim.state import MASTER_KEYS, REPLICA_KEYS
from ..tensors.dtensor import is_sharded, like, local
from .keys import Inventory, Keys, bare
from .plain_data import check_extra, check_fits, give_back, pack, take, unpack


class RunState:
    """All that a run needs to go on, as tensors under keys of which none stands for two different things.

    Args:
        model: the module, wrapped or not (DDP, FSDP2, torch.compile); of a pipeline this rank's stages in one module.
        ensemble: the `Ensemble` that drives its optimizer.
        extra: a Stateful, or a dict of what else the run needs: values with state_dict and load_state_dict (a stateful data loader, a
            torch.amp.GradScaler) and torch.Generators take their state over when it is loaded; plain data and tensors are replaced in the
            dict. Of each rank its own: each gets its own back, and with another number of replicas, rank r that of replica r mod the
            saved number.

    `save` and `load` of this package use it; so can ``torch.distributed.checkpoint.save(state.state_dict(), ...)``.

    Guarantees: nothing here communicates or steps the optimizer. Parameters and what else the Ensemble averages are stored once,
    under the model's names ("model.<name>"); so is the optimizer's state ("optimizer.state.<name>.<entry>"), and that of each replica
    by itself where replicas have their own (``ensemble.private_state``). Buffers that the Ensemble does not average are each rank's own.

    Raises:
        TypeError: another kind of argument.
        ValueError: the optimizer steps a parameter that is not in ``model``; or a value of ``extra``, which is named, cannot be saved.
    """

    def __init__(self, model: nn.Module, ensemble: Ensemble, extra: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(ensemble, Ensemble):
            inner = ": pass its .ensemble" if isinstance(getattr(ensemble, "ensemble", None), Ensemble) else ""
            raise TypeError(f"ensemble must be an hdet.Ensemble, got {type(ensemble).__name__}{inner}")
        check_extra(extra)
        self.model, self.ensemble, self.extra = model, ensemble, extra
        self._check_outside_use("state_dict")
        self.optimizer = ensemble.optimizer
        self.keys = Keys(model, ensemble.replicas)
        known = {id(p) for p in model.parameters()}
        for g, group in enumerate(self.optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) not in known:
                    raise ValueError(f"parameter {i} of group {g} of the optimizer is not in model: pass the module that holds all of them")

    def _check_outside_use(self, name: str) -> None:
        self.ensemble._check_outside_use(name, "a checkpoint is of all replicas: call it after")

    # -- torch's Stateful ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts with strings as keys, tensors (live ones) and bytes as values. No communication.

        In the middle of a cycle the parameters are ``ensemble.mean()`` where this rank has it; such a state continues from the mean.

        Raises:
            ValueError: the replicas have parted and the mean is not known here; or ``extra`` holds what cannot be given back.
        """
        mean = self.mean()
        return {
            "model": self.model_tensors(mean),
            "optimizer": self._optimizer_tree(mean is not None),
            **self._converge_part(),
            **self.plain_parts(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError or CheckpointError for what does not fit."""
        self.load_plain(state)
        self.load_tensors(state)

    # -- the model -------------------------------------------------------------------------------------------------------

    def model_tensors(self, mean: Mapping[int, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Key -> tensor (detached, live), or its ``mean`` (by id); tied ones once."""
        averaged = {id(t) for t in self.ensemble.parameters}
        tensors = {}
        for name, tensor in Inventory(self.model).tensors.items():
            common = id(tensor) in averaged or isinstance(tensor, nn.Parameter) or is_sharded(tensor)
            prefix = self.keys.shared(tensor) if common else self.keys.of_rank()
            tensors[prefix + name] = (mean or {}).get(id(tensor), tensor).detach()
        return tensors

    def mean(self) -> dict[int, torch.Tensor] | None:
        """By id of what the Ensemble averages, its mean; None: the tensors themselves are. Raises ValueError if it is not known here."""
        ensemble = self.ensemble
        self._check_outside_use("state_dict")
        begun = ensemble.parted or ensemble.engine.position or ensemble._fan_out.stepped or not ensemble.weights.average.idle
        if ensemble.in_sync or not begun:  # before the first step there is nothing to average
            return None
        mean = ensemble.mean()
        if mean is None:
            raise ValueError(
                "in the middle of a cycle the replicas' parameters differ, and a checkpoint of them would be a mixture: "
                "call ensemble.converge() on all ranks before, or use hdet.checkpoint.save, which does"
            )
        return {id(t): m if is_sharded(m) else like(m, t) for t, m in zip(ensemble.parameters, mean, strict=True)}

    def averaged_keys(self) -> dict[str, torch.Tensor]:
        """Of the optimizer's parameters, in the order of the average."""
        names = Inventory(self.model).name_of
        own = {id(p) for p in listed(self.optimizer)}
        return {self.keys.shared(p) + names[id(p)]: p for p in self.ensemble.parameters if id(p) in own}

    def _converge_part(self) -> dict[str, Any]:
        """What the way of averaging keeps of each parameter from one cycle to the next, if it does."""
        kept = self.ensemble.weights.average.state()
        return (
            {"converge": {key: like(value, p) for (key, p), value in zip(self.averaged_keys().items(), kept, strict=True)}} if kept else {}
        )

    # -- the optimizer ---------------------------------------------------------------------------------------------------

    def parameter_names(self) -> list[str]:
        """Of the optimizer's parameters, in its order."""
        names = Inventory(self.model).name_of
        return [names[id(p)] for p in listed(self.optimizer)]

    def _key_of_entry(self, name: str, param: torch.Tensor, key: str, value: Any) -> str:
        """Local gradients: each replica has its own moments, unless they have just been made equal; only counters are never averaged."""
        ensemble = self.ensemble
        policy = ensemble.weights.moments.policy  # None under shared gradients
        counts = key == "step" or not isinstance(value, torch.Tensor) or value.shape != param.shape
        own = {None: False, "keep": True, "average": counts, "reset": ensemble.engine.position > 0 or ensemble.parted}[policy]
        return (self.keys.of_replica(param) if own and ensemble.replicas.count > 1 else self.keys.shared(param)) + name

    def _optimizer_tree(self, mean: bool) -> dict[str, Any]:
        saved, params = self.optimizer.state_dict(), listed(self.optimizer)
        groups = [group for group in self.optimizer.param_groups for _ in group["params"]]
        state: dict[str, dict[str, Any]] = {}
        unstarted = []
        for i, (name, param, group) in enumerate(zip(self.parameter_names(), params, groups, strict=True)):
            entries = _of_one_replica(saved["state"].get(i, {}), name, mean)
            if not entries and param.requires_grad:
                entries = _blank_state(self.optimizer, group, param)
                unstarted.append(name)
            for key, value in entries.items():
                state.setdefault(self._key_of_entry(name, param, key, value), {})[key] = value
        names = iter(self.parameter_names())
        settings = [{**group, "params": [next(names) for _ in group["params"]]} for group in saved["param_groups"]]
        rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
        about = {"groups": settings, "unstarted": unstarted, "rest": rest}
        replicas = self.ensemble.replicas
        key = self.about_keys(replicas.index)[0 if self.ensemble.sync.gradients == "local" and replicas.count > 1 else 1]
        return {"state": state, "about": {key: pack(about, "the optimizer's settings")}}

    def about_keys(self, replica: int) -> list[str]:
        """Where the settings of the parameter groups are: that replica's under local gradients (which parameters have had a gradient may
        differ), else everyone's; of a member, if some member has parameters of its own. The last one is that of shared gradients."""
        prefixes = {self.keys.shared(p) for p in listed(self.optimizer)}
        of_all = "all" if prefixes <= {""} else f"member{self.ensemble.replicas.member}"
        return [f"replica{replica}/{of_all}", of_all]

    def check_groups(self, about: Mapping[str, Any]) -> None:
        """Raises ValueError if the saved parameter groups have other parameters than these."""
        names = iter(self.parameter_names())
        ours = [[next(names) for _ in group["params"]] for group in self.optimizer.param_groups]
        theirs = [group["params"] for group in about["groups"]]
        if ours != theirs:
            sizes = [[len(group) for group in groups] for groups in (theirs, ours)]
            what = f"the saved optimizer has parameter groups of {sizes[0]} parameters, this one of {sizes[1]}"
            if sizes[0] == sizes[1]:
                a, b = next((a, b) for a, b in zip(chain(*theirs), chain(*ours), strict=True) if a != b)
                what += f"; the first that differs is {a!r} there and {b!r} here"
            raise ValueError(f"{what}: build the optimizer as the saved run did")

    # -- plain data ------------------------------------------------------------------------------------------------------

    def plain_parts(self) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of moments that are not fit for saving, which this class has checked
            parts: dict[str, Any] = {"ensemble": pack(self.ensemble.state_dict(), "the Ensemble's state")}
        own = (self.keys.of_rank() or "all").rstrip("/")
        if others := Inventory(self.model).others:
            parts["modules"] = {own: pack(others, "the extra state of a module")}
        if self.extra is not None:
            parts["extra"] = {own: take(self.extra)}
        return parts

    def load_plain(self, state: Mapping[str, Any]) -> None:
        """The parts without tensors, whose state is checked before anything is changed."""
        self._check_outside_use("load_state_dict")
        self.check_groups(unpack(_only(state["optimizer"]["about"])))
        loaded = None if self.extra is None else unpack(_only(state["extra"]))
        if self.extra is not None:
            check_fits(self.extra, loaded)
        self.ensemble.load_state_dict(unpack(state["ensemble"]))
        if self.extra is not None:
            give_back(self.extra, loaded)

    @torch.no_grad()
    def load_tensors(self, state: Mapping[str, Any]) -> None:
        """Model, then optimizer; where their tensors came from (the prefixes of the keys) no longer matters."""
        loaded = {bare(key): tensor for key, tensor in state["model"].items()}
        if "modules" in state:
            loaded |= unpack(_only(state["modules"]))
        self.model.load_state_dict({raw: loaded[name] for raw, name in Inventory(self.model).first_name.items()})
        about = unpack(_only(state["optimizer"]["about"]))
        entries: dict[str, dict[str, Any]] = {}
        for key, values in state["optimizer"]["state"].items():
            entries.setdefault(bare(key), {}).update(values)
        numbered: dict[int, dict[str, Any]] = {}
        further = getattr(self.optimizer, "num_replicas", 1) - 1
        for i, (name, param) in enumerate(zip(self.parameter_names(), listed(self.optimizer), strict=True)):
            if entries.get(name) and name not in about["unstarted"]:
                numbered[i] = dict(entries[name])
                if further and param.requires_grad:  # the other replicas on this device begin as copies of the loaded model
                    numbered[i]["replica_params"] = [param.detach()] * further
        numbers = iter(range(len(listed(self.optimizer))))
        groups = []
        for saved, present in zip(about["groups"], self.optimizer.param_groups, strict=True):
            settings = {key: _on_the_device_of(value, present.get(key)) for key, value in saved.items()}
            groups.append({**settings, "params": [next(numbers) for _ in present["params"]]})
        self.optimizer.load_state_dict({**about["rest"], "state": numbered, "param_groups": groups})
        if "converge" in state:
            self.ensemble.weights.average.load_state([local(tensor) for tensor in state["converge"].values()])


# -- an optimizer's state, without a step of the optimizer ---------------------------------------------------------------


def listed(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters in the order in which a state_dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def _blank_state(optimizer: Optimizer, group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """What the optimizer keeps for a parameter: names, shapes and dtypes, as a place to load into; the values mean nothing.

    Libraries find this out by a step of the optimizer itself with rate 0, which counts in Adam's correction, runs hooks, and can turn
    -0 into 0. Here a stand-in of the same class steps a tensor of zeros.
    """
    image = torch.nn.Parameter(torch.zeros_like(param.detach()))
    image.grad = torch.zeros_like(param.detach())
    rates = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0.0 for key, value in group.items() if key == "lr"}
    stand_in: Any = object.__new__(type(optimizer))
    # Wrappers of the instance's methods stay behind, and what a GradScaler has left on it.
    left_out = {name for name in vars(optimizer) if callable(getattr(type(optimizer), name, None))} | {"grad_scale", "found_inf"}
    stand_in.__dict__.update({name: value for name, value in vars(optimizer).items() if name not in left_out})
    stand_in.__dict__.update(
        {name: OrderedDict() for name in vars(optimizer) if name.startswith("_optimizer_") and name.endswith("_hooks")}
    )
    stand_in.state, stand_in.param_groups = defaultdict(dict), [{**group, **rates, "params": [image]}]
    if hasattr(stand_in, "set_replicas"):  # hdet's: no plan of the original's, one replica
        stand_in.num_replicas, stand_in._sets, stand_in.multipliers = 1, {}, [[1.0]]
        stand_in._forget()
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # without torch's wrapper, which runs the hooks that are registered for all optimizers
    try:
        step(stand_in)
    except Exception:  # noqa: BLE001 - one that needs more than gradients, such as LBFGS: what it keeps is known after its first step
        return {}
    held = stand_in.saved_state(image) if hasattr(stand_in, "saved_state") else stand_in.state[image]
    return {key: value for key, value in held.items() if value is not None and key not in REPLICA_KEYS}


def _on_the_device_of(loaded: Any, present: Any) -> Any:
    """A loaded group setting where the present one lies: torch moves states to the parameters' devices, but not settings."""
    return loaded.to(present.device) if isinstance(loaded, torch.Tensor) and isinstance(present, torch.Tensor) else loaded


def _of_one_replica(entries: Mapping[str, Any], name: str, mean: bool) -> dict[str, Any]:
    """Without further replicas on this device, which are equal; or, of a ``mean`` that the optimizer steps beside, with its master."""
    kept = {key: value for key, value in entries.items() if value is not None and key not in REPLICA_KEYS}
    master = next((key for key in MASTER_KEYS if key in kept), None)
    if mean and master is not None:
        beside = entries.get("replica_masters") or []
        if len(beside) != 1:
            raise ValueError(f"the mean of {name}'s master weights is not known here: call ensemble.converge() on all ranks before")
        kept[master] = beside[0]
    return kept


# -- small things --------------------------------------------------------------------------------------------------------


def _only(values: Mapping[str, Any]) -> Any:
    (value,) = values.values()
    return value
