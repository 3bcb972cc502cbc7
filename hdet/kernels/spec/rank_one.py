"""What every backend's rank-one plan refuses: replicas that would leave the line (csrc/core/rank_one.h)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import arguments as checks
from .interface import COUPLED, RankOneTensors, StepOptions, StepSettings

Step = Callable[[Sequence[Tensor], Sequence[StepSettings], StepOptions], None]
Upload = Callable[[Sequence[StepSettings], StepOptions], None]


def check_rank_one_tensors(tensors: RankOneTensors) -> None:
    """Everything a plan relies on for as long as it is used."""
    step = tensors.as_step()
    checks.check_step_tensors(step)
    count = len(step.params[0])
    named = [
        (f"{name} {i}", t)
        for name, column in (("exp_avg", step.exp_avgs), ("exp_avg_sq", step.exp_avg_sqs))
        for i, t in enumerate(column or [])
        if t is not None
    ]
    named += [(f"output {i} of replica {k}", t) for k, outputs in enumerate(tensors.outputs) for i, t in enumerate(outputs)]
    for name, column in (("base", tensors.bases), ("displacement", tensors.displacements)):
        if len(column) != count:
            raise ValueError(f"{name}s has {len(column)} entries, but there are {count} outputs in a replica")
        for i, tensor in enumerate(column):
            checks.check_tensor(tensor, f"{name} {i}", step.params[0][0].device, (torch.float32,))
            checks.check_same_shape(tensor, step.params[0][i], f"{name} {i}", "the output")
            named.append((f"{name} {i}", tensor))
    checks.check_apart(named)


class Line:
    """Whether the replicas are apart, and with which multipliers: while they are, no other multipliers can describe them."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.apart = False
        self.multipliers: list[Sequence[float]] = []

    def check(self, settings: Sequence[StepSettings], options: StepOptions) -> None:
        """Raises ValueError for what would take a replica off the line."""
        if options.finish == "pack" or options.average_weight != 0:
            raise ValueError(
                f"finish={options.finish!r} with average_weight={options.average_weight} is not for rank one; "
                'use finish="store" or "mean" and average_weight 0, or plan a step with stored sets'
            )
        for row, s in enumerate(settings):
            if s.weight_decay != 0 and (self.rule in COUPLED or not s.decay_at_base):
                remedy = "use adamw or lion, or set it to 0" if self.rule in COUPLED else "set decay_at_base, or weight_decay to 0"
                raise ValueError(f"weight_decay={s.weight_decay} of row {row} takes replicas off their line (rank one): {remedy}")
        multipliers = [tuple(s.multipliers) for s in settings]
        if self.apart and multipliers != self.multipliers:
            raise ValueError(
                f"multipliers changed from {self.multipliers} to {multipliers} while the replicas are apart: "
                'change them after converge() (the end of a cycle, or average_replicas of an optimizer) or after a step with finish="mean"'
            )

    def step(self, step: Step, gradients: Sequence[Tensor], settings: Sequence[StepSettings], options: StepOptions) -> None:
        """A step that keeps the replicas on the line."""
        self.check(settings, options)
        step(gradients, settings, options)
        self._moved(settings, apart=options.finish != "mean")

    def upload(self, upload: Upload, settings: Sequence[StepSettings], options: StepOptions) -> None:
        self.check(settings, options)
        upload(settings, options)
        self._moved(settings, apart=True)  # by the replay that this is for

    def _moved(self, settings: Sequence[StepSettings], apart: bool) -> None:
        self.multipliers = [tuple(s.multipliers) for s in settings]
        self.apart = apart
