"""Arms: copies of a run that train for some steps at other rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..knobs.cells import content, put
from ..optim.snapshot import Snapshot, attach_hook
from ..replicas.agreement import reachable
from ..replicas.process_groups import own_group
from ..tensors.dtensor import gradient_norm, local_parts
from ..tensors.eval_mode import modes_kept, random_states_kept
from ..tensors.profiling import ranged
from .communication import Communication
from .displacement import Displacement
from .in_place import InPlace
from .searched import Closure, Searched, losses_by, mean_of

__all__ = ["Arms", "Beginning"]

NO_GRADIENTS = "gradients were 0 in most of the first steps: is the loss masked, or its weight 0?"


class Beginning:
    """The first weights of a run, how far they have moved since, and steps before the first
    gradient that is not 0: weight decay alone moves the weights there. (After it, gradients of 0
    say that the rate is too high.)

    Args:
        place: "device" or "host", where the first weights are kept.
    """

    def __init__(self, run: Searched, place: str) -> None:
        self._run, self._steps = run, 0
        self._have_begun: Any = False  # perhaps a tensor on the device
        self._idle: Any = 0.0
        self.close = attach_hook(run.optimizer.register_step_post_hook, self.note_gradients)
        self.weights, self.displacement = run.take_snapshot(place), Displacement(run.weights)

    def note_gradients(self, *_: Any) -> None:
        """Of a step of the run (as a hook of the optimizer) or of an arm, as they are now."""
        if any(p.grad is not None for p in self._run.parameters):  # else they are kept elsewhere
            self._steps += 1
            self._have_begun = self._have_begun | (gradient_norm(self._run.parameters) != 0)
            self._idle = self._idle + (~self._have_begun).double()

    def why_given_up(self) -> str:
        """Where that were most of the steps, on all ranks together: one collective."""
        row = torch.tensor([self._steps, float(self._idle)], dtype=torch.float64)
        steps, idle = self._run.replicas.sum_rows(row, purpose="gradients").sum(0).tolist()
        return NO_GRADIENTS if idle > steps / 2 else ""


class Arms:
    """Trains copies of a run in its place, inside of `keep_run`. Each begins with its first
    weights, and holds all that is trained: parameters, masters, the optimizer's state, buffers.

    Args:
        begun: since when it has the arms' first weights.
        in_place: knows when an arm is in the run's place.
        before_step, scaler, place: as of `AutoLR`.
        communication: notices what closure, before_step and the optimizer's step send.
    """

    spread = False
    """Does each replica train arms of its own?"""

    def __init__(
        self,
        run: Searched,
        begun: Beginning,
        in_place: InPlace,
        before_step: Callable[[], object],
        scaler: Any,
        place: str,
        communication: Communication | None = None,
    ) -> None:
        self.run, self.begun, self._in_place = run, begun, in_place
        self._before_step, self.scaler, self._place = before_step, scaler, place
        # Are gradients averaged here? None: not if the loop, and so before_step, does it.
        self._averages: bool | None = None
        self._averaged, self._averagers = list[torch.Tensor](), run.replicas.peer_group
        is_alone = run.replicas.count == 1 or run.replicas.peer_group is None
        self._is_shared = not is_alone and run.shares_gradients
        if not self._is_shared:
            self._averages = False
        elif isinstance(run.model, DistributedDataParallel):
            self._averages = run.leaves_gradients
        self._needs_closure = False  # the optimizer's step, as SAM's
        self._own = Snapshot(run.parameters, run.optimizer, place, run.module)
        self.communication = communication
        self._watch = communication.watch if communication else nullcontext

    def spread_over_replicas(self, sharers: Sequence[int]) -> None:
        """From now on each replica trains arms of its own. ``sharers``: the replicas that train
        the same ones as this one, with which gradients are averaged as before."""
        self.spread = True
        if self._averages and len(sharers) > 1:
            peers = dist.get_process_group_ranks(self.run.replicas.peer_group)
            self._averagers = own_group([peers[replica] for replica in sharers])
        else:
            self._is_shared, self._averages, self._averaged = False, False, []

    @contextmanager
    def keep_run(self) -> Iterator[None]:
        """Afterwards the run, its gradients and modes are bitwise what they were."""
        with self._in_place.hold(), self.run.keep_gradients(), _without_reduction(self.run):
            self._own.take()
            try:
                with modes_kept(self.run.module):
                    yield
            finally:
                self._own.restore()
                self.run.forget_gathered()

    def begin(self) -> Snapshot:
        """A new arm. It has the first weights."""
        self.run.restore(self.begun.weights)
        return self.run.take_snapshot(self._place)

    def num_bytes(self, arms: Iterable[Snapshot | None]) -> int:
        """What these take here, with the first weights and the run's own."""
        held = [self.begun.weights, self._own, *(arm for arm in arms if arm is not None)]
        return sum(snapshot.num_bytes for snapshot in held)

    @ranged("hdet.trial.train")
    def train(
        self,
        arm: Snapshot,
        closure: Closure,
        factor: float,
        may_skip: bool = False,
        is_kept: bool = True,
    ) -> torch.Tensor | None:
        """Makes one step of an arm on the current batch. Returns the mean loss before it; None
        where this rank sees none.

        Args:
            factor: its rates, as a part of the peak of each group.
            may_skip: without a loss and gradients there is no step, as in a loop that leaves a
                batch out.
            is_kept: does the arm go on from here?
        """
        run = self.run
        run.restore(arm)
        with random_states_kept(run.module):
            with self._watch():
                losses = self._backward(closure)
            gradients = self._gradients(can_lack=may_skip and losses is None)
            if self._unscale(gradients) and gradients:
                self.begun.note_gradients()
                with self._watch():
                    self._before_step()
                    with _rates_in_force(run, factor), run.aside():
                        self._step(arm, closure)
        run.clear_gradients()
        if is_kept:
            arm.take()
        return mean_of(losses)

    def share(self, arm: Snapshot | None, owner: int) -> Snapshot:
        """The weights and buffers of an arm on every replica; ``arm`` is None on all but its
        owner."""
        run = self.run
        if arm is not None:
            run.restore(arm)
        for tensor in local_parts([*run.parameters, *run.module.buffers()]):
            dist.broadcast(tensor, group_src=owner, group=run.replicas.peer_group)
        return run.take_snapshot(self._place) if arm is None else arm

    # -- a step ------------------------------------------------------------------------------------

    def _step(self, arm: Snapshot, closure: Closure) -> None:
        """An optimizer that asks for a closure gets one that computes the arm's gradients again."""

        def compute_again() -> torch.Tensor | None:
            losses = self._backward(closure)
            self._gradients(can_lack=losses is None)
            return mean_of(losses)

        step: Any = self.run.optimizer.step
        try:
            step(*[compute_again] * self._needs_closure)
        except Exception as error:
            if not isinstance(error, TypeError) and "closure" not in repr(error).lower():
                raise
            self.run.restore(arm)
            compute_again()
            step(compute_again)
            self._needs_closure = True

    def _backward(self, closure: Closure) -> torch.Tensor | None:
        """Losses of the current batch, and their gradients in place."""
        run = self.run
        run.clear_gradients()
        with torch.enable_grad():
            losses = losses_by(closure)
            called_backward = any(p.grad is not None for p in run.parameters)
            if self._is_shared and self._averages is False:  # the backward pass communicates
                has = losses is not None or called_backward
                run.replicas.meet("losses of an arm" if has else "an arm without losses")
            if losses is None or not losses.requires_grad or called_backward:
                return losses
            loss = losses.mean()
            try:
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):
                    raise
                raise ValueError(
                    "the closure returned the loop's own losses, whose graph is gone: compute the "
                    "losses of the batch again inside it"
                ) from error
        return losses

    def _gradients(self, can_lack: bool) -> list[torch.Tensor]:
        """Averaged, if it is for us to do that: then a rank that sees no loss sends zeros."""
        replicas, parameters = self.run.replicas, self.run.parameters
        if self._averages is None:
            own = gradient_norm(parameters).square().reshape(1)
            squares = replicas.sum_rows(own, purpose="gradients of an arm").flatten().tolist()
            self._averages = max(squares) > 1.002 * min(squares)
        lacks = not can_lack and all(p.grad is None for p in parameters)
        if self._averages and not self._averaged:  # on every rank the same ones
            own = torch.tensor([lacks, *(p.grad is not None for p in parameters)]).double()
            own = own.to(reachable(self._averagers, local_parts(parameters[:1])[0].device))
            dist.all_reduce(own, group=self._averagers)
            lacks, *counts = own.tolist()
            self._averaged = [p for p, n in zip(parameters, counts, strict=True) if n]
        if lacks:
            if not any(p.requires_grad for p in parameters):
                raise ValueError(
                    "each parameter of the optimizer is frozen (requires_grad=False): no rate "
                    "trains it"
                )
            raise ValueError(
                "the closure gave losses without a graph, and left no gradients (is a return "
                "missing?): compute the losses of the batch again inside it, without no_grad "
                "or detach, or call backward inside"
            )
        for parameter in self._averaged:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            [gradient] = local_parts([parameter.grad])
            dist.all_reduce(gradient, group=self._averagers)
            gradient.div_(dist.get_world_size(self._averagers))
        return [p.grad for p in parameters if p.grad is not None]

    def _unscale(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Returns whether all gradients are finite, on every rank alike: a step that overflows is
        skipped."""
        if self.scaler is None or not self.scaler.is_enabled():
            return True
        bad = torch.zeros(1, dtype=torch.float64)
        for part in local_parts(gradients):
            part.div_(self.scaler.get_scale())
            bad += float(not part.isfinite().all())
        return not self.run.replicas.sum_rows(bad, purpose="gradients of an arm").sum().item()


@contextmanager
def _without_reduction(run: Searched) -> Iterator[None]:
    """DDP reduces nothing in an arm's backward pass (`Arms._gradients` does), so that neither its
    buckets nor the memory of a communication hook see it; and sends no buffers. With
    find_unused_parameters it has to: it remembers which ones were used."""
    if not run.leaves_gradients:
        yield
        return
    model: Any = run.model
    before = model.require_forward_param_sync
    try:
        model.require_forward_param_sync = False
        # in its second forward pass, which a rank without losses does not make, all communicate
        if model.reducer._rebuild_buckets():
            model._has_rebuilt_buckets = True
        with model.no_sync():
            yield
    finally:
        model.require_forward_param_sync = before


@contextmanager
def _rates_in_force(run: Searched, factor: float) -> Iterator[None]:
    """Inside, groups have these parts of their peaks, and a schedule-free optimizer has no warm-up
    of its own; a tensor is written to, so that a captured step sees it."""
    groups = [(run.optimizer.param_groups[number], peak) for number, peak in run.peaks()]
    keys = ("lr", "warmup_steps")
    before = [{key: content(group[key]) for key in keys if key in group} for group, _ in groups]
    try:
        for group, peak in groups:
            group["lr"] = put(group["lr"], peak * factor)
            if "warmup_steps" in group:
                group["warmup_steps"] = 0
        yield
    finally:
        for (group, _), own in zip(groups, before, strict=True):
            group.update({key: put(group[key], value) for key, value in own.items()})
