"""What the adapters of all frameworks have in common: `Adapter`, their contract."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.controller import Controller
from ..ensemble import Ensemble
from ..trial.auto import AutoLR

__all__ = ["Adapter", "attributes_kept", "check_settings", "require", "wants_trial"]


class Adapter:
    """The Ensembles of a run inside a framework, one for each optimizer.

    The first methods are what an adapter says of its framework. The others are what it calls: it
    makes the Ensembles when model and optimizers are as they will be (`begin`), computes inside
    `explore`, gives the losses of a step (`observe`) and ends it (`end_step`), calls `converge`
    where others look, and saves `save_states` and logs `metrics` with what the framework does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ensembles: list[Ensemble] = []
        """One for each optimizer, from `begin` on."""
        self._told_corrections: dict[int, dict[str, float]] = {}

    @property
    def ensemble(self) -> Ensemble | None:
        """The first optimizer's; None before training begins."""
        return self.ensembles[0] if self.ensembles else None

    # -- what an adapter says of its framework -----------------------------------------------------

    scaler: Any = None
    """The run's GradScaler, which scales the losses of `backward`, too."""

    def tell(self, line: str) -> None:
        """Write a line to the framework's log, at level INFO."""
        raise NotImplementedError

    def find_obstacle(self) -> str | None:
        """Say why an AutoLR can make no trial here, in a sentence that goes on after its name."""
        return None

    def compute_loss(self, part: Any) -> torch.Tensor | None:
        """Compute the loss of a micro-batch of the step again, with a graph, as the part that it is
        of the step's: the step trains on their sum. None for one that the run leaves out."""
        raise NotImplementedError

    def backward(self, loss: torch.Tensor) -> None:
        """Do with such a loss what the framework does."""
        raise NotImplementedError

    def without_sync(self) -> AbstractContextManager[Any]:
        """Surround all micro-batches but the last: gradients are all-reduced once."""
        return nullcontext()

    def clip_gradients(self) -> None:
        """Do what the framework does between backward and step, also in an arm of a trial."""

    # -- beginning ---------------------------------------------------------------------------------

    def begin(
        self,
        optimizers: Sequence[Optimizer],
        settings: Sequence[Mapping[str, Any]],
        model: nn.Module,
        *,
        logs: bool,
        states: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Make the Ensembles. What they need is checked before there is any.

        Args:
            settings: for each optimizer. The controller and the replicas may be functions of
                ``model``. Where nothing says what is searched, an `AutoLR` looks how far the first
                steps move the weights, which costs nothing.
            model: as the framework calls it.
            logs: is this the process whose ``log`` is called?
            states: what was saved of each, or nothing.

        Raises:
            ValueError: one controller for several optimizers; the trial of an AutoLR, where none
                can be made; states of other optimizers.
        """
        self._model, self._logs, self._settings = model, logs, list(settings)
        controllers = [of.get("controller") for of in settings]
        if len(optimizers) > 1 and any(isinstance(of, Controller) for of in controllers):
            raise ValueError(
                "there are several optimizers, each with a controller of its own: pass a function "
                "that makes one"
            )
        resolved = [self._resolve(of, len(optimizers)) for of in settings]
        self.ensembles = [
            self._make(optimizer, of) for optimizer, of in zip(optimizers, resolved, strict=True)
        ]
        self.load_states(states)

    def _resolve(self, settings: Mapping[str, Any], optimizers: int) -> dict[str, Any]:
        """Ask functions of the model, and give a trial what the framework does in a step."""
        settings = with_controller(settings)
        asked = {
            name: settings[name](self._model)
            for name in ("controller", "replicas")
            if callable(settings.get(name))
        }
        resolved = {**settings, **asked}
        controller: Any = resolved.get("controller")
        if wants_trial(controller):
            several = (
                f"trains copies of a run with one optimizer, and there are {optimizers}: train all "
                "parameters with one, or leave the controller out"
            )
            obstacle = several if optimizers > 1 else self.find_obstacle()
            if obstacle is not None:
                raise ValueError(f"AutoLR {obstacle}")
            search = controller.search
            search.before_step = partial(_call_in_turn, self.clip_gradients, search.before_step)
            search.scaler = search.scaler or self.scaler
        return resolved

    def _make(self, optimizer: Optimizer, settings: Mapping[str, Any]) -> Ensemble:
        log = settings.get("log") if self._logs else None
        ensemble = Ensemble(optimizer, **{**settings, "log": log})
        ensemble.tell = self.tell
        return ensemble

    def add_group(self, number: int, group: dict[str, Any]) -> None:
        """Add a parameter group to the optimizer in mid-run, on all ranks alike: replicas are
        averaged, and a new Ensemble goes on where the old one was.

        The values in ``group`` are the schedule's, which the corrections in force correct. What a
        way of averaging keeps beside the weights, such as an outer momentum, begins again.

        Raises:
            ValueError: the controller is an AutoLR, and no function that makes one.
        """
        old = self.ensembles[number]
        optimizer, controller = old.optimizer, self._settings[number].get("controller")
        if isinstance(controller, Controller) and controller.search is not None:
            raise ValueError(
                "a parameter group is added in mid-run, and an AutoLR belongs to the run that it "
                "began: pass a function that makes one, such as controller=hdet.AutoLR"
            )
        old.converge()
        state = old.state_dict()
        old.close()
        optimizer.add_param_group(group)
        resolved = self._resolve(self._settings[number], len(self.ensembles))
        self.ensembles[number] = new = self._make(optimizer, resolved)
        added = new.state_dict()["scheduled"]
        scheduled = {
            name: [*values, *added[name][len(values) :]]
            for name, values in state["scheduled"].items()
        }
        new.load_state_dict({**state, "scheduled": scheduled})

    # -- a step ------------------------------------------------------------------------------------

    def explore(self) -> AbstractContextManager[None]:
        """See `Ensemble.explore`: around forward and backward."""
        return _entered([ensemble.explore() for ensemble in self.ensembles])

    def rescheduling(self) -> AbstractContextManager[None]:
        """See `Ensemble.rescheduling`: around schedules that the framework steps."""
        return _entered([ensemble.rescheduling() for ensemble in self.ensembles])

    def observe(self, loss: torch.Tensor | float, weight: torch.Tensor | float = 1.0) -> None:
        """See `Ensemble.observe`: a loss of this replica in the running step."""
        for ensemble in self.ensembles:
            ensemble.observe(loss, weight)

    def end_step(self, closure: Callable[[], torch.Tensor | None] | None) -> None:
        """See `Ensemble.step`: after the optimizer's. A move that a cycle's end brings is told,
        unless the controller does so itself."""
        for ensemble in self.ensembles:
            before = ensemble.history
            ensemble.step(closure=closure)
            record = ensemble.history
            if record is not None and record is not before:
                self._tell_moves(record)

    def _tell_moves(self, record: Mapping[str, Any]) -> None:
        decisions = record["record"]["decisions"]
        for (knob, value), decision in zip(record["values"].items(), decisions, strict=True):
            has_moved = decision["factor"] != 1 or decision["value"] is not None
            if has_moved and not any(note.startswith(f"{knob}: ") for note in record["notes"]):
                times = f"times {decision['factor']:.4g}, " if decision["factor"] != 1 else ""
                self.tell(
                    f"hdet, step {record['step']}: {knob}: {times}base value {value:.4g}, "
                    f"correction {record['corrections'][knob]:.4g}"
                )

    def compute_again(self, parts: Sequence[Any]) -> torch.Tensor | None:
        """Compute the loss of a step of micro-batches again: its closure. While an arm trains, its
        gradients too."""
        total: torch.Tensor | None = None
        for number, part in enumerate(parts, 1):
            waits = torch.is_grad_enabled() and number < len(parts)
            with self.without_sync() if waits else nullcontext():
                loss = self.compute_loss(part)
                if loss is None:
                    continue
                if torch.is_grad_enabled():
                    self.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        return total

    # -- where others look -------------------------------------------------------------------------

    def converge(self) -> None:
        """Average the replicas, unless they are known to be equal: before an evaluation, before a
        checkpoint and at the end, on every rank."""
        for ensemble in self.ensembles:
            if not ensemble.in_sync:
                ensemble.converge()

    def save_states(self) -> list[dict[str, Any]]:
        """Give the states for the framework's checkpoint. A run that goes on from it without hdet
        cannot be warned, so the log says once what it will lack."""
        for number, ensemble in enumerate(self.ensembles):
            told = self._told_corrections.get(number, {})
            self._told_corrections[number] = ensemble.corrections
            for knob, correction in ensemble.corrections.items():
                if correction not in (1, told.get(knob)):
                    self.tell(
                        f"hdet, step {ensemble.engine.step}: saved with the correction "
                        f"{correction:.6g} of {knob}, which only hdet reads. To go on without "
                        f"hdet, multiply your {knob} by it"
                    )
        return [ensemble.state_dict() for ensemble in self.ensembles]

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load what was saved; nothing where that was a run without hdet.

        Raises:
            ValueError: they are of other optimizers, or what `Ensemble.load_state_dict` refuses.
        """
        if states and len(states) != len(self.ensembles):
            raise ValueError(
                f"the state is of {len(states)} optimizers, and there are {len(self.ensembles)}: "
                "make the same ones"
            )
        for ensemble, state in zip(self.ensembles, states, strict=False):
            ensemble.load_state_dict(state)

    def metrics(self, *, with_values: bool = False) -> dict[str, float]:
        """Give corrections and this replica's multipliers for the framework's log, by the names of
        `hdet.logging`; ``with_values``: base values, too, where the framework does not log them."""
        numbers: dict[str, float] = {}
        for number, ensemble in enumerate(self.ensembles):
            prefix = f"optimizer {number}/" if len(self.ensembles) > 1 else ""
            by_kind = {"corrections": ensemble.corrections, "multipliers": ensemble.multipliers}
            if with_values:
                by_kind["values"] = ensemble.values()
            for kind, by_knob in by_kind.items():
                for knob, value in by_knob.items():
                    numbers[f"{prefix}hdet/{kind}/{knob}"] = float(value)
            numbers[f"{prefix}hdet/cycle"] = float(ensemble.cycle)
        return numbers

    def close(self) -> None:
        """See `Ensemble.close`."""
        for ensemble in self.ensembles:
            ensemble.close()


def require(name: str) -> Any:
    """Import the framework. Raises ImportError that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"this adapter of hdet needs {name}, which cannot be imported here ({error}): pip "
            f"install {name.split('.')[0]}"
        ) from error


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises TypeError for what are no settings, and for one that an Ensemble does not have, or
    that the framework gives it."""
    if not isinstance(settings, Mapping):
        name = settings.__name__ if isinstance(settings, type) else type(settings).__name__
        raise TypeError(
            f"the settings of an hdet.Ensemble must be a dict by name, such as {{'controller': "
            f"hdet.AutoLR}}, got {name}"
        )
    known = inspect.signature(Ensemble).parameters.keys() - {"optimizer", "scheduler"}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise TypeError(
            f"an hdet.Ensemble has no setting {unknown[0]!r} here, only {', '.join(sorted(known))}"
        )


def with_controller(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where nothing says what is searched, with an `AutoLR` that makes no trial."""
    if settings.keys() & {"controller", "knobs", "sync", "design"}:
        return settings
    return {**settings, "controller": lambda model: AutoLR(model, budget=0)}


def wants_trial(controller: object) -> bool:
    """May it train copies of the run, for which it asks for losses of the current batch?"""
    search = controller.search if isinstance(controller, Controller) else None
    return search is not None and search.budget != 0


@contextmanager
def attributes_kept(owner: Any) -> Iterator[None]:
    """Whatever plain data ``owner`` counts or collects inside (a trainer's metrics, say) is
    afterwards what it was."""
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


def _call_in_turn(*calls: Callable[[], object] | None) -> None:
    for call in filter(None, calls):
        call()


@contextmanager
def _entered(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
