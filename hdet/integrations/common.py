"""What the adapters of all frameworks have in common: `Adapter`, their contract."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.controller import Controller
from ..ensemble import Ensemble
from ..logging import scalars
from ..trial.auto import AutoLR


class Adapter:
    """The Ensembles of a run inside a framework, one for each optimizer.

    The first members are what an adapter says of its framework. The others are what it calls: it
    makes the Ensembles when model and optimizers are as they will be (`begin`), computes inside
    ``enter("explore")``, gives the losses and micro-batches of a step (`observe`, `parts`) and ends
    it (`end_step`), calls `converge` where others look, and saves `save_states` and logs `metrics`
    with what the framework does.

    Args:
        tell: writes a line to the framework's log, at level INFO.
    """

    scaler: Any = None
    """The run's GradScaler."""
    owner: Any = None
    """What counts and collects for the framework's log while a loss is computed: put back where one
    is computed again."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__()
        self.tell = tell
        self.ensembles: list[Ensemble] = []
        """One for each optimizer, from `begin` on."""
        self.parts: list[Any] = []
        """Micro-batches of the running step, for a trial; empty where none can be made."""
        self.saved_states: Sequence[Mapping[str, Any]] = ()
        """States from a checkpoint, until `begin` loads them."""
        self.without_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Surrounds all of them but the last: gradients are all-reduced once."""
        self._told: set[tuple[int, str, float]] = set()

    @property
    def ensemble(self) -> Ensemble | None:
        """The first optimizer's; None before training begins."""
        return self.ensembles[0] if self.ensembles else None

    # -- what an adapter says of its framework -----------------------------------------------------

    def find_obstacle(self) -> str | None:
        """Say why an AutoLR can make no trial here, in a sentence that goes on after its name."""
        return None

    def compute_loss(self, part: Any) -> torch.Tensor | None:
        """Compute the loss of a micro-batch again, as the part that it is of the step's: the step
        trains on their sum. Where gradients are on, with a graph, or with its gradients and
        without one. None for one that the run leaves out."""
        raise NotImplementedError

    def backward(self, loss: torch.Tensor) -> None:
        """Do with a loss that has a graph what the framework does."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip_gradients(self) -> None:
        """Do what the framework does between backward and step, also in an arm of a trial."""

    def prepare_step(self, own: Callable[[], object] | None) -> None:
        """`clip_gradients` of an arm, then the search's ``own`` ``before_step``."""
        self.clip_gradients()
        if own is not None:
            own()

    def begin_averages(self) -> None:
        """Begin averages of weights that the framework keeps with those that are in place."""

    # -- beginning ---------------------------------------------------------------------------------

    def begin(
        self,
        optimizers: Sequence[Optimizer],
        settings: Sequence[Mapping[str, Any]],
        model: nn.Module,
        *,
        logs: bool,
    ) -> None:
        """Make the Ensembles, and load `saved_states`.

        Args:
            settings: for each optimizer, see `complete_settings`. Search, controller and replicas
                may be functions of ``model``, which is as the framework calls it.
            logs: is this the process whose ``log`` is called?

        Raises:
            ValueError: one search or controller for several optimizers; the trial of an AutoLR,
                where none can be made; states of other optimizers. `begin` can be called again
                then.
        """
        self._model, self._logs, self._settings = model, logs, settings
        self.ensembles = []
        with ExitStack() as refused:
            refused.callback(self.ensembles.clear)
            refused.callback(self.close)
            for optimizer, of in zip(optimizers, settings, strict=True):
                self.ensembles.append(self._make(optimizer, of))
            self.load_states(self.saved_states)
            refused.pop_all()
        self.saved_states = ()

    def _make(self, optimizer: Optimizer, settings: Mapping[str, Any]) -> Ensemble:
        count = len(self._settings)
        for name, kind in (("search", AutoLR), ("controller", Controller)):
            if count > 1 and isinstance(settings.get(name), kind):
                raise ValueError(
                    f"there are several optimizers, each with a {name} of its own: pass a function "
                    "that makes one"
                )
        made = {**settings, "log": settings.get("log") if self._logs else None}
        for name in ("search", "controller", "replicas"):
            if callable(made.get(name)):
                made[name] = made[name](self._model)
        given = made.get("search")
        search = given if isinstance(given, AutoLR) else None  # the Ensemble refuses anything else
        if search is not None and search.budget != 0:  # it may train copies of the run
            obstacle = self.find_obstacle()
            if count > 1:
                obstacle = (
                    f"trains copies of a run with one optimizer, and there are {count}: train all "
                    "parameters with one, or leave the search out"
                )
            if obstacle is not None:
                raise ValueError(f"AutoLR {obstacle}")
        with ExitStack() as refused:
            if search is not None:
                refused.callback(setattr, search, "framework", search.framework)
                search.framework = self
            ensemble = Ensemble(optimizer, **made)
            refused.pop_all()
        ensemble.report_to(self.tell)
        return ensemble

    def add_group(self, number: int, group: dict[str, Any]) -> None:
        """Add a parameter group to the optimizer in mid-run, on all ranks alike: replicas are
        averaged, and a new Ensemble goes on where the old one was.

        The values in ``group`` are the schedule's, which the corrections in use correct. What a
        way of averaging keeps beside the weights, such as an outer momentum, begins again.

        Raises:
            ValueError: the search is an object, and no function that makes one.
        """
        if isinstance(self._settings[number].get("search"), AutoLR):
            raise ValueError(
                "add_group: the new Ensemble needs an AutoLR of its own: pass a function that "
                "makes one, such as search=hdet.AutoLR"
            )
        old = self.ensembles[number]
        old.converge()
        state = old.state_dict()
        old.close()
        old.optimizer.add_param_group(group)
        new = self._make(old.optimizer, self._settings[number])
        for name, values in new.state_dict()["scheduled"].items():
            state["scheduled"][name] += values[len(state["scheduled"][name]) :]
        new.load_state_dict(state)
        self.ensembles[number] = new

    # -- a step ------------------------------------------------------------------------------------

    def enter(self, context: str) -> ExitStack:
        """Enter `Ensemble.explore`, around forward and backward, or `Ensemble.rescheduling`, around
        schedules that the framework steps: by name, of all Ensembles."""
        stack = ExitStack()
        for ensemble in self.ensembles:
            stack.enter_context(getattr(ensemble, context)())
        return stack

    def observe(self, loss: torch.Tensor | float, weight: torch.Tensor | float = 1.0) -> None:
        """See `Ensemble.observe`: a loss of this replica in the running step."""
        for ensemble in self.ensembles:
            ensemble.observe(loss, weight)

    def end_step(self) -> None:
        """See `Ensemble.step`: after the optimizer's."""
        parts, self.parts = self.parts, []
        closure = partial(self.compute_again, parts) if parts else None
        for ensemble in self.ensembles:
            ensemble.step(closure=closure)

    def compute_again(self, parts: Sequence[Any]) -> torch.Tensor | None:
        """Compute the loss of a step of micro-batches again: its closure. While an arm trains, its
        gradients too."""
        total: torch.Tensor | None = None
        with keep_attributes(self.owner):
            for number, part in enumerate(parts, 1):
                waits = torch.is_grad_enabled() and number < len(parts)
                with self.without_sync() if waits else nullcontext():
                    loss = self.compute_loss(part)
                    if loss is None:
                        continue
                    if loss.requires_grad:
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
            for knob, correction in ensemble.corrections.items():
                if correction != 1 and (number, knob, correction) not in self._told:
                    self._told.add((number, knob, correction))
                    self.tell(
                        f"hdet, step {ensemble.steps_done}: saved with the correction "
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

    def metrics(self) -> dict[str, float]:
        """Give base values, corrections and this replica's multipliers for the framework's log, by
        the names of `hdet.logging`."""
        numbers: dict[str, float] = {}
        for number, ensemble in enumerate(self.ensembles):
            prefix = f"optimizer {number}/hdet/" if len(self.ensembles) > 1 else "hdet/"
            by_kind: dict[str, Any] = {"cycle": ensemble.cycle, "values": ensemble.values()}
            by_kind |= {kind: getattr(ensemble, kind) for kind in ("corrections", "multipliers")}
            numbers |= scalars(by_kind, prefix)
        return numbers

    def close(self) -> None:
        """See `Ensemble.close`."""
        for ensemble in self.ensembles:
            ensemble.close()


class StandIn:
    """In the place of a framework's object: what is not here is the object's own."""

    inner: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def require(name: str, package: str = "") -> Any:
    """Import the framework. Raises ImportError that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"this adapter of hdet needs {name}, which cannot be imported here ({error}): pip "
            f"install {package or name.split('.')[0]}"
        ) from error


def complete_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give the settings of an Ensemble, to which the framework adds the optimizer and the
    scheduler. Where nothing says what is searched, an `AutoLR` looks how far the first steps move
    the weights, which costs nothing.

    Raises:
        TypeError: one that an Ensemble does not have.
    """
    inspect.signature(Ensemble).bind(None, None, **settings)
    if settings.keys() & {"search", "controller", "knobs", "sync", "design"}:
        return settings
    return {**settings, "search": lambda model: AutoLR(model, budget=0)}


def skip_backward() -> AbstractContextManager[Any]:
    """Around a framework's pass through a batch, which calls ``backward`` also where gradients are
    off, as they are when an arm is scored."""
    is_training = torch.is_grad_enabled()
    return nullcontext() if is_training else mock.patch.object(torch.Tensor, "backward")


@contextmanager
def keep_attributes(owner: Any) -> Iterator[None]:
    """Whatever plain data ``owner`` counts or collects inside (a trainer's metrics, say) is
    afterwards what it was."""
    own = {} if owner is None else vars(owner)
    before = {name: copy.deepcopy(value) for name, value in own.items() if _is_plain(value)}
    try:
        yield
    finally:
        own.update(before)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple, set)):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (bool, int, float, str, type(None)))
