"""Problems as people train them: a model, data, an optimizer, a schedule, and the rate that one would write first.

Rules and constants are found on the workloads of the development half. Those of the test half are run once a rule is frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import hdet

from ..problems import PROBLEMS, Batch, Problem
from .eighth import BOTH, CENSORED, COORDINATES, MATCHED, RARE, RECALLED, SPELT, UNSCALED
from .fifth import FLOW, GATED, MASKED, NEIGHBOURS, RETOLD, SHAPES, SPOKEN
from .finetuning import ADAPTERS, FINETUNING
from .fourth import GRAPHS, HEAT, LETTERS_ANEW, MARKED, RETRAINED
from .generated import BRACKETS, CLUSTERS, PAIRS, SERIES, SETS, TRANSFER
from .harder import CURRICULUM, FADING, SWELLING
from .images import AUTOENCODER, DIFFUSION, MIXER, RESNET, VIT
from .language import EXPERTS, LLAMA, RECURRENT
from .misleading import BITS_UNTOLD, BLOCKS, CLICKS, KINDS, QUANTIZED, STRETCHED
from .ninth import AWAITED, CLAIMS, CROSSED, ENERGIES, GRATINGS, RATED, TURNED, WORDED
from .sequences import CONVOLUTIONS, SORTING
from .seventh import DEEP, ECHOED, HEAVY, QUANTILES, RANKED, THREES
from .sixth import BINARY, COUNTED, DISTILLED, FORKED, HALVED, PAINTED, PARITY, SWUNG, TRANSLATED
from .tables import REGRESSION, SMALL, flipped, small_judge
from .tenth import GRADED, LINKED, MOVED, STATED, TAGGED, WON

__all__ = ["DEVELOPMENT", "HARDER", "HIGH", "MISLEADING", "OPTIMIZERS", "REPEATED", "SCHEDULES", "TEST", "WORKLOADS", "ZERO", "Workload"]

OPTIMIZERS: dict[str, Callable[[Any, float], Optimizer]] = {
    "adamw-0.999": lambda groups, rate: hdet.FusedAdamW(groups, lr=rate, betas=(0.9, 0.999)),
    "adamw-0.95": lambda groups, rate: hdet.FusedAdamW(groups, lr=rate, betas=(0.9, 0.95)),
    "sgd": lambda groups, rate: hdet.FusedSGD(groups, lr=rate, momentum=0.9),
    "lion": lambda groups, rate: hdet.FusedLion(groups, lr=rate),
    "muon": lambda groups, rate: torch.optim.Muon(groups, lr=rate),
    "fused-muon": lambda groups, rate: hdet.FusedMuon(groups, lr=rate, adamw_lr=rate, adjust_lr_fn="match_rms_adamw"),
}
WARMUP = 0.05


def _shape(name: str, part: float) -> float:
    """Of the peak, at a part of the run in [0, 1)."""
    if part < WARMUP:
        return part / WARMUP
    if name == "constant":
        return 1.0
    if name == "wsd":
        return min(1.0, (1 - part) / 0.2)
    after = (part - WARMUP) / (1 - WARMUP)
    cosine = 0.5 * (1 + math.cos(math.pi * after))
    again = 0.5 * (1 + math.cos(math.pi * (3 * after % 1)))
    return {"linear": 1 - after, "cosine": cosine, "tenth": 0.1 + 0.9 * cosine, "restarts": again}[name]


def _schedule(name: str) -> Callable[[Optimizer, int], LRScheduler]:
    return lambda optimizer, steps: LambdaLR(optimizer, lambda step: max(_shape(name, (step + 1) / (steps + 1)), 0.0))


def _one_cycle(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Torch's defaults: the momentum, or beta1, falls while the rate rises."""
    return OneCycleLR(optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=steps)


def _from_zero(optimizer: Optimizer, steps: int) -> LRScheduler:
    """As transformers' cosine with warm-up, and Megatron's: the first step is at rate 0."""
    return LambdaLR(optimizer, lambda step: max(_shape("cosine", step / steps), 0.0))


SCHEDULES = {
    **{name: _schedule(name) for name in ("cosine", "wsd", "linear", "constant", "tenth", "restarts")}, "one-cycle": _one_cycle, "zero": _from_zero,
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A problem, and how it is trained."""

    problem: Problem
    optimizer: str
    schedule: str
    rate: float
    """The peak that people would write first."""
    judge: Callable[[], list[Batch]] | None = None
    """Held-out mini-batches other than those of the validation, where examples are seen many times."""

    @property
    def name(self) -> str:
        return self.problem.name


def _named(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


DEVELOPMENT = _named(
    Workload(LLAMA, "adamw-0.999", "cosine", 1e-3),
    Workload(RECURRENT, "adamw-0.999", "cosine", 1e-3),
    Workload(PROBLEMS["transformer"], "adamw-0.95", "wsd", 1e-3),
    Workload(PROBLEMS["digits"], "adamw-0.95", "wsd", 1e-3),
    Workload(PROBLEMS["recsys"], "adamw-0.95", "wsd", 1e-3),
    Workload(REGRESSION, "adamw-0.999", "cosine", 1e-3),
    Workload(SMALL, "adamw-0.999", "linear", 1e-3, judge=small_judge),
    Workload(RESNET, "sgd", "cosine", 0.1),
    Workload(FINETUNING, "adamw-0.999", "linear", 1e-4),
    Workload(ADAPTERS, "lion", "linear", 1e-4),
    Workload(VIT, "adamw-0.999", "cosine", 1e-3),
    Workload(DIFFUSION, "adamw-0.999", "wsd", 1e-3),
    Workload(EXPERTS, "adamw-0.95", "cosine", 1e-3),
    Workload(MIXER, "muon", "one-cycle", 0.02),
    Workload(CONVOLUTIONS, "adamw-0.999", "one-cycle", 1e-3),
    Workload(SORTING, "lion", "linear", 1e-4),
    Workload(AUTOENCODER, "adamw-0.95", "cosine", 1e-3),
    Workload(SERIES, "adamw-0.999", "cosine", 1e-3),
    Workload(SETS, "adamw-0.95", "linear", 1e-3),
    Workload(PAIRS, "adamw-0.999", "one-cycle", 1e-3),
    Workload(CLUSTERS, "sgd", "wsd", 0.1),
    Workload(TRANSFER, "lion", "linear", 1e-4),
    Workload(BRACKETS, "adamw-0.95", "cosine", 1e-3),
    Workload(MARKED, "adamw-0.999", "cosine", 1e-3),
    Workload(GRAPHS, "adamw-0.95", "wsd", 1e-3),
    Workload(HEAT, "adamw-0.999", "linear", 1e-3),
    Workload(LETTERS_ANEW, "sgd", "one-cycle", 0.1),
    Workload(RETRAINED, "adamw-0.999", "linear", 1e-4),
    Workload(GATED, "adamw-0.95", "wsd", 1e-3),
    Workload(MASKED, "fused-muon", "cosine", 1e-3),
    Workload(SHAPES, "sgd", "linear", 0.1),
    Workload(FLOW, "adamw-0.999", "one-cycle", 1e-3),
    Workload(NEIGHBOURS, "adamw-0.999", "linear", 1e-3),
    Workload(SPOKEN, "adamw-0.999", "cosine", 1e-3),
    Workload(RETOLD, "adamw-0.95", "linear", 1e-4),
    Workload(DISTILLED, "adamw-0.999", "cosine", 1e-3),
    Workload(PAINTED, "adamw-0.999", "linear", 1e-3),
    Workload(COUNTED, "lion", "wsd", 1e-4),
    Workload(TRANSLATED, "fused-muon", "linear", 1e-3),
    Workload(FORKED, "adamw-0.95", "one-cycle", 1e-3),
    Workload(SWUNG, "adamw-0.95", "wsd", 1e-3),
    Workload(BINARY, "sgd", "cosine", 0.1),
    Workload(PARITY, "adamw-0.999", "linear", 1e-3),
    Workload(HALVED, "adamw-0.95", "cosine", 1e-3),
    Workload(RANKED, "adamw-0.999", "cosine", 1e-3),
    Workload(ECHOED, "adamw-0.95", "wsd", 1e-3),
    Workload(QUANTILES, "lion", "linear", 1e-4),
    Workload(THREES, "sgd", "one-cycle", 0.1),
    Workload(DEEP, "sgd", "cosine", 0.01),
    Workload(HEAVY, "fused-muon", "wsd", 1e-3),
    Workload(CENSORED, "adamw-0.999", "cosine", 1e-3),
    Workload(MATCHED, "lion", "linear", 1e-4),
    Workload(UNSCALED, "adamw-0.95", "wsd", 1e-3),
    Workload(SPELT, "adamw-0.999", "one-cycle", 1e-3),
    Workload(RECALLED, "adamw-0.95", "linear", 1e-3),
    Workload(COORDINATES, "fused-muon", "linear", 1e-3),
    Workload(BOTH, "sgd", "cosine", 0.1),
    Workload(RARE, "adamw-0.999", "restarts", 1e-3),
    Workload(RATED, "adamw-0.999", "wsd", 1e-3),
    Workload(CROSSED, "adamw-0.999", "cosine", 1e-3),
    Workload(CLAIMS, "adamw-0.999", "linear", 1e-3),
    Workload(WORDED, "adamw-0.95", "cosine", 1e-3),
    Workload(GRATINGS, "sgd", "one-cycle", 0.1),
    Workload(ENERGIES, "fused-muon", "linear", 1e-3),
    Workload(AWAITED, "adamw-0.95", "one-cycle", 1e-3),
    Workload(TURNED, "lion", "wsd", 1e-4),
)
"""The three old problems, those of which facts were known before, and former test halves: none of them can judge a rule."""
TEST = _named(
    Workload(LINKED, "adamw-0.999", "cosine", 1e-3),
    Workload(WON, "adamw-0.95", "linear", 1e-3),
    Workload(TAGGED, "lion", "wsd", 1e-4),
    Workload(GRADED, "sgd", "cosine", 0.1),
    Workload(STATED, "adamw-0.999", "one-cycle", 1e-3),
    Workload(MOVED, "fused-muon", "linear", 1e-3),
)
"""Made after the rule was frozen, and run once with it (docs/evidence/autolr.md tells of former halves): a rule that is changed again needs
others."""
HIGH = {
    f"{name}-{schedule}": replace(DEVELOPMENT[name], schedule=schedule)
    for schedule in ("constant", "tenth")
    for name in ("regression", "autoencoder", "clusters", "transfer", "heat", "pairs", "graphs")
}
"""Some of them with a schedule that does not fall to zero: one that stays at its peak, and a cosine to a tenth of it."""
REPEATED = _named(
    Workload(replace(SMALL, name="small-unjudged"), "adamw-0.999", "linear", 1e-3),
    *(Workload(flipped(rows), "adamw-0.999", "cosine", 1e-3) for rows in (256, 4096, 16_384, 32_768)),
)
"""Examples that a run of 10 000 steps sees 1 250 to 10 times, some with wrong labels; and nobody gives a judge."""
HARDER = _named(
    Workload(CURRICULUM, "adamw-0.999", "cosine", 1e-3),
    Workload(FADING, "adamw-0.999", "cosine", 1e-3),
    Workload(SWELLING, "adamw-0.999", "cosine", 1e-3),
)
"""Data that changes after the trials. On the first one the rule was mended; the others were run once, afterwards."""
ZERO = {f"{name}-zero": replace(DEVELOPMENT[name], schedule="zero") for name in ("pairs", "graphs", "marked", "letters", "neighbours")}
"""Some of them with a warm-up that begins at 0, in which all arms of a scan once were at rate 0."""
MISLEADING = _named(
    Workload(BLOCKS, "adamw-0.999", "cosine", 1e-3),
    Workload(QUANTIZED, "adamw-0.999", "cosine", 1e-3),
    Workload(BITS_UNTOLD, "sgd", "cosine", 0.2),
    Workload(STRETCHED, "sgd", "wsd", 0.0096),
    Workload(KINDS, "lion", "cosine", 1e-3),
    Workload(CLICKS, "adamw-0.95", "cosine", 3e-4),
)
"""Three adversaries'. On the likes of them the rule was mended."""
WORKLOADS = {**DEVELOPMENT, **TEST, **HIGH, **REPEATED, **HARDER, **ZERO, **MISLEADING}
