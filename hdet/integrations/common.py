"""What adapters of frameworks have in common: Ensembles and their settings, the closure of a step of micro-batches, and what is logged."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.controller import Controller
from ..ensemble import Ensemble
from ..trial.auto import AutoLR

__all__ = [
    "attributes_kept", "check_settings", "converge", "inside", "load", "losses_anew", "make", "numbers", "require", "states", "step", "wants_trial",
    "with_controller",
]  # fmt: skip


def require(name: str) -> Any:
    """The framework. Raises ImportError that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"this adapter of hdet needs {name}, which cannot be imported here ({error}): pip install {name.split('.')[0]}"
        ) from error


def check_settings(settings: Mapping[str, Any]) -> None:
    """Before anything is made. Raises TypeError for what are no settings, and for one that an Ensemble does not have, or that the framework gives
    it."""
    if not isinstance(settings, Mapping):
        name = settings.__name__ if isinstance(settings, type) else type(settings).__name__
        raise TypeError(f"the settings of an hdet.Ensemble must be a dict by name, such as {{'controller': hdet.AutoLR}}, got {name}")
    known = inspect.signature(Ensemble).parameters.keys() - {"optimizer", "scheduler"}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise TypeError(f"an hdet.Ensemble has no setting {unknown[0]!r} here, only {', '.join(sorted(known))}")


def make(
    optimizers: Sequence[Optimizer],
    settings: Sequence[Mapping[str, Any]],
    model: nn.Module,
    *,
    tell: Callable[[str], object],
    first: bool,
    states: Sequence[Mapping[str, Any]] = (),
    no_copies: Mapping[str, bool] | None = None,
    clip: Callable[[], object] | None = None,
    scaler: Any = None,
) -> list[Ensemble]:
    """An Ensemble for each optimizer. What they need is checked before there is any.

    Args:
        settings: of each Ensemble, the framework's defaults among them. The controller and the replicas may be functions of ``model``. Where
            nothing says what is searched, an `AutoLR` looks how far the first steps move the weights, which costs nothing.
        tell: the framework's log.
        first: is this the process whose ``log`` is called?
        states: what was saved of each, or nothing.
        no_copies: why no copies of this run can be trained, which the trial of an `AutoLR` does, and whether it is so.
        clip: what the framework does between backward and step, also in an arm.
        scaler: the run's GradScaler, by which the closure's backward pass is scaled, too.

    Raises:
        ValueError: one controller for several optimizers; a controller that trains copies, where that cannot be; states of other optimizers.
    """
    several = f"trains copies of a run with one optimizer, and there are {len(optimizers)}: {_ONE}"
    found = [_asked(of, model, len(optimizers)) for of in settings]
    for controller in (of["controller"] for of in found if wants_trial(of.get("controller"))):
        for why, wrong in {several: len(optimizers) > 1, **(no_copies or {})}.items():
            if wrong:
                raise ValueError(f"AutoLR {why}")
        own = controller.search.before_step
        controller.search.before_step = partial(_in_turn, clip, own) if clip and own else own or clip
        controller.search.scaler = controller.search.scaler or scaler
    ensembles = [
        Ensemble(optimizer, **{**of, "log": of.get("log") if first else None}) for optimizer, of in zip(optimizers, found, strict=True)
    ]
    for ensemble in ensembles:
        ensemble.tell = tell
    load(ensembles, states)
    return ensembles


_ONE = "train all parameters with one, or leave the controller out"
_SEARCHED = ("controller", "knobs", "sync", "design")
"""Settings that say what is searched."""


def _in_turn(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


def with_controller(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where nothing says what is searched, with an `AutoLR` that makes no trial."""
    return settings if settings.keys() & set(_SEARCHED) else {**settings, "controller": lambda model: AutoLR(model, budget=0)}


def _asked(settings: Mapping[str, Any], model: nn.Module, optimizers: int) -> dict[str, Any]:
    """Functions of the model are asked now."""
    if optimizers > 1 and isinstance(settings.get("controller"), Controller):
        raise ValueError("there are several optimizers, each with a controller of its own: pass a function that makes one")
    settings = with_controller(settings)
    asked = {name: settings[name](model) for name in ("controller", "replicas") if callable(settings.get(name))}
    return {**settings, **asked}


def load(ensembles: Sequence[Ensemble], states: Sequence[Mapping[str, Any]], before: Callable[[], object] = lambda: None) -> None:
    """What was saved of each; nothing of a run without hdet. ``before``: called when their number is known to be right."""
    if states and len(states) != len(ensembles):
        raise ValueError(f"the state is of {len(states)} optimizers, and there are {len(ensembles)}: make the same ones")
    before()
    for ensemble, state in zip(ensembles, states, strict=False):
        ensemble.load_state_dict(state)


@contextmanager
def inside(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """All of them, such as each Ensemble's ``explore()``."""
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        yield


def wants_trial(controller: object) -> bool:
    """May it train copies of the run, for which it asks for losses of the current batch? What is no controller an Ensemble refuses."""
    return isinstance(controller, Controller) and controller.search is not None and controller.search.budget != 0


def losses_anew(
    parts: Sequence[Any],
    loss_of: Callable[[Any], torch.Tensor | None],
    *,
    backward: Callable[[torch.Tensor], object],
    no_sync: Callable[[], AbstractContextManager[Any]],
) -> torch.Tensor | None:
    """The closure of a step of micro-batches: its loss, computed again. While an arm trains, its gradients too, as the framework makes them.

    Args:
        parts: the micro-batches.
        loss_of: the loss of one of them, with a graph, or None for one that is left out; the sum over all is what the step trains on.
        backward: what the framework does with such a loss.
        no_sync: around all micro-batches but the last: gradients are all-reduced once.
    """
    total: torch.Tensor | None = None
    for number, part in enumerate(parts, 1):
        waits = torch.is_grad_enabled() and number < len(parts)
        with no_sync() if waits else nullcontext():
            loss = loss_of(part)
            if loss is None:
                continue
            if torch.is_grad_enabled():
                backward(loss)
        total = loss.detach() if total is None else total + loss.detach()
    return total


@contextmanager
def attributes_kept(owner: Any) -> Iterator[None]:
    """Whatever plain data ``owner`` counts or collects inside (a trainer's metrics, say) is afterwards what it was."""
    before = {name: copy.deepcopy(value) for name, value in vars(owner).items() if _is_plain(value)}
    try:
        yield
    finally:
        vars(owner).update(before)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value, dict) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))


# -- a step, and what is logged ----------------------------------------------------------------------------------------------

_FOUND: WeakKeyDictionary[Ensemble, dict[str, float]] = WeakKeyDictionary()
"""What the last cycle that has measured something has found, as `numbers` gives it: a framework logs when it likes."""
_SAVED: WeakKeyDictionary[Ensemble, dict[str, float]] = WeakKeyDictionary()
"""The corrections with which it was last saved."""


def step(ensemble: Ensemble, *args: Any, **kwargs: Any) -> None:
    """`Ensemble.step`. Each move that a cycle's end brings is told, unless the controller does so itself."""
    before = ensemble.history
    ensemble.step(*args, **kwargs)
    record = ensemble.history
    if record is None or record is before:
        return
    by_knob = {f"hdet/{kind}/{knob}": x for kind in _MEASURED for knob, x in record[kind].items() if x is not None}
    if by_knob:
        _FOUND[ensemble] = {name: float(x) for name, x in by_knob.items()}
    for knob, decision in zip(record["values"], record["record"]["decisions"], strict=True):
        moved = decision["factor"] != 1 or decision["value"] is not None
        if moved and not any(note.startswith(f"{knob}: ") for note in record["notes"]):
            ensemble.tell(f"hdet, step {record['step']}: {_moved(record, knob, decision)}")


_MEASURED = ("slopes", "errors", "t")
"""Of a record, by knob; None where the cycle has not measured."""


def _moved(record: Mapping[str, Any], knob: str, decision: Mapping[str, Any]) -> str:
    """In words."""
    slope, error, t = (record[kind][knob] for kind in _MEASURED)
    why = [f"slope {slope:.3g}"] if slope is not None else []
    why += [f"error {error:.3g}"] if error is not None else []
    why += [f"t {t:.3g}"] if t is not None else []
    how = f"times {decision['factor']:.4g}, " if decision["factor"] != 1 else ""
    found = f" ({', '.join(why)})" if why else ""
    return f"{knob}: {how}base value {record['values'][knob]:.4g}, correction {record['corrections'][knob]:.4g}{found}"


def numbers(*ensembles: Ensemble, values: bool = False) -> dict[str, float]:
    """For a framework's log, by the names of `hdet.logging`, of one optimizer or of several: what a base value is corrected by, and this replica's
    multiplier of it; what the controller has measured last; with ``values`` the base value in force, too, where the framework does not log it."""
    found: dict[str, float] = {}
    for number, ensemble in enumerate(ensembles):
        several = f"optimizer {number}/" if len(ensembles) > 1 else ""
        by_kind = {
            "corrections": ensemble.corrections,
            "multipliers": ensemble.multipliers,
            **({"values": ensemble.values()} if values else {}),
        }
        found |= {f"{several}hdet/{kind}/{knob}": float(value) for kind, of in by_kind.items() for knob, value in of.items()}
        found |= {f"{several}{name}": value for name, value in _FOUND.get(ensemble, {}).items()}
        found[f"{several}hdet/cycle"] = float(ensemble.cycle)
    return found


def converge(ensembles: Iterable[Ensemble]) -> None:
    """Replicas are averaged, unless they are known to be equal."""
    for ensemble in ensembles:
        if not ensemble.in_sync:
            ensemble.converge()


def states(ensembles: Iterable[Ensemble]) -> list[dict[str, Any]]:
    """For a framework's checkpoint. A run that goes on from it without hdet cannot be warned, so this says what it will lack, once."""
    found = []
    for ensemble in ensembles:
        told, _SAVED[ensemble] = _SAVED.get(ensemble, {}), ensemble.corrections
        for knob, correction in ensemble.corrections.items():
            if correction not in (1, told.get(knob)):
                ensemble.tell(
                    f"hdet, step {ensemble.engine.step}: saved with the correction {correction:.6g} of {knob}, which only hdet reads. To go on without "
                    f"hdet, multiply your {knob} by it"
                )
        found.append(ensemble.state_dict())
    return found
