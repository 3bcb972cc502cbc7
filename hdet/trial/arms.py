"""Arms: copies of a run that train for some steps at other rates, and are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..profiling import ranged
from ..run.snapshot import Snapshot
from ..tensors.dtensor import gradient_norm, local_parts
from ..tensors.eval_mode import modes_kept, random_states_kept
from .displacement import Displacement, Ratios
from .in_place import InPlace
from .searched import Closure, Scorer, Searched, keep_gradients, mean_of

__all__ = ["Arms"]


class Arms:
    """Trains and scores copies of a run.

    A copy holds all that is trained: parameters, masters, the optimizer's state and the model's
    buffers. Run, gradients, modes and random states are bitwise as before after `keep_run`, inside
    of which the other methods are called.

    Args:
        run: what is copied.
        first: its first weights, with which arms begin.
        before_step: called between an arm's backward pass and its step.
        scaler: the run's GradScaler; it is asked for its scale, and not changed.
        place: "device" or "host", where copies live.
        averages: are gradients averaged over the replicas? None: as the run does.
    """

    def __init__(
        self,
        run: Searched,
        first: Snapshot,
        *,
        before_step: Callable[[], object] | None = None,
        scaler: Any = None,
        place: str = "device",
        averages: bool | None = None,
    ) -> None:
        self.run, self.first = run, first
        self._before_step, self._scaler, self._place = before_step, scaler, place
        self._averages = averages
        self.in_place = InPlace(run.module, run.optimizer)
        self._own = Snapshot(run.parameters, run.optimizer, place, run.module)
        self._scorer = Scorer(run)

    @contextmanager
    def keep_run(self) -> Iterator[None]:
        """Around arms: afterwards the run is in its place again, with its gradients."""
        with self.in_place(), keep_gradients(self.run), _without_reduction(self.run):
            self._own.take()
            try:
                with modes_kept(self.run.module):
                    yield
            finally:
                self._own.restore()
                self.run.forget_gathered()

    def begin(self) -> Snapshot:
        """A new arm. It has the first weights."""
        self.run.restore(self.first)
        return self.run.take_snapshot(self._place)

    @ranged("hdet.trial.train")
    def train(
        self, arm: Snapshot, closure: Closure, factor: float, may_skip: bool = False
    ) -> torch.Tensor | None:
        """Makes one step of an arm on the current batch.

        Args:
            factor: its rates, as a part of the peak of each group.
            may_skip: without a loss and gradients there is no step, as in a loop that leaves a
                batch out.

        Returns:
            Its mean loss before the step, 0-d float64; None where this rank sees none.
        """
        run = self.run
        run.restore(arm)
        with random_states_kept(run.module):
            losses = self._backward(closure)
            gradients = [p.grad for p in run.parameters if p.grad is not None]
            if not gradients and not (may_skip and losses is None):
                raise ValueError(
                    "the closure gave losses without a graph, and left no gradients: compute the "
                    "losses of the batch again inside it, without no_grad or detach, or call "
                    "backward inside"
                    + (" (it returned None: is a return missing?)" if losses is None else "")
                )
            self._average(gradients)
            if self._unscale(gradients) and gradients:
                if self._before_step is not None:
                    self._before_step()
                with _rates_in_force(run, factor), run.aside():
                    run.optimizer.step()
        run.clear_gradients()
        arm.take()
        return mean_of(losses)

    @ranged("hdet.trial.score")
    def score(self, arm: Snapshot, closure: Closure) -> torch.Tensor | None:
        """`Scorer.loss` of an arm on the current batch."""
        self.run.restore(arm)
        return self._scorer.loss(closure)

    def ratios(self, arm: Snapshot, displacement: Displacement) -> Ratios:
        """`Displacement.ratios` of an arm."""
        self.run.restore(arm)
        return displacement.ratios()

    def share(self, arm: Snapshot | None, owner: int) -> Snapshot:
        """The arm of one replica, on every replica: its weights and buffers, to be scored."""
        run = self.run
        if arm is not None:
            run.restore(arm)
        for tensor in local_parts([*run.parameters, *run.module.buffers()]):
            dist.broadcast(tensor, group_src=owner, group=run.replicas.peer_group)
        return run.take_snapshot(self._place) if arm is None else arm

    # -- a step --------------------------------------------------------------------------------

    def _backward(self, closure: Closure) -> torch.Tensor | None:
        """Losses of the current batch, and their gradients in place."""
        run = self.run
        run.clear_gradients()
        with torch.enable_grad():
            losses = self._scorer.losses(closure)
            called_backward = any(p.grad is not None for p in run.parameters)
            if losses is None or not losses.requires_grad or called_backward:
                return losses
            loss = losses.mean()
            try:
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):
                    raise
                raise ValueError(
                    "the closure returned the loop's own losses, whose graph is gone: compute the "
                    "losses of the batch again inside it"
                ) from error
        return losses

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        """Gradients that are this rank's own: under DDP, and where the loop reduces them itself."""
        run, group = self.run, self.run.replicas.peer_group
        if run.replicas.count == 1 or group is None or not run.shares_gradients:
            return
        if self._averages is None:
            self._averages = run.leaves_gradients
            if not isinstance(run.model, DistributedDataParallel):
                own = gradient_norm(run.parameters).square().reshape(1)
                squares = run.replicas.sum_rows(own).flatten().tolist()
                self._averages = max(squares) > 1.002 * min(squares)
        for gradient in local_parts(gradients) if self._averages else ():
            dist.all_reduce(gradient, group=group)
            gradient.div_(run.replicas.count)

    def _unscale(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Divides by the GradScaler's scale. Returns whether all gradients are finite, on every
        rank alike: a step that overflows is skipped."""
        if self._scaler is None or not self._scaler.is_enabled():
            return True
        bad = torch.zeros(1, dtype=torch.float64)
        for part in local_parts(gradients):
            part.div_(self._scaler.scale(torch.ones((), device=part.device)))
            bad += float(not part.isfinite().all())
        return not self.run.replicas.sum_rows(bad).sum().item()


@contextmanager
def _without_reduction(run: Searched) -> Iterator[None]:
    """DDP reduces nothing in an arm's backward pass (`Arms._average` does), so that neither its
    buckets nor the memory of a communication hook see it; and sends no buffers. With
    find_unused_parameters it has to: it remembers which ones were used."""
    if not run.leaves_gradients:
        yield
        return
    model: Any = run.model
    before = model.require_forward_param_sync
    try:
        model.require_forward_param_sync = False
        with model.no_sync():
            yield
    finally:
        model.require_forward_param_sync = before


@contextmanager
def _rates_in_force(run: Searched, factor: float) -> Iterator[None]:
    """Inside, groups have these parts of their peaks; a tensor is written to, so that a captured
    step sees it."""
    groups = [(run.optimizer.param_groups[number], peak) for number, peak in run.peaks()]
    before = [group["lr"].clone() if isinstance(group["lr"], torch.Tensor) else group["lr"]
              for group, _ in groups]  # fmt: skip
    try:
        for group, peak in groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor
        yield
    finally:
        for (group, _), rate in zip(groups, before, strict=True):
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
