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
from .eleventh import DOUBTED, KNOCKED, TASTED
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

__all__ = [
    "DEVELOPMENT",
    "HARDER",
    "HIGH",
    "JUDGED",
    "MISLEADING",
    "OPTIMIZERS",
    "REPEATED",
    "SCHEDULES",
    "TEST",
    "WORKLOADS",
    "ZERO",
    "Workload",
]

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
    what: str
    """What is learned, in a few words."""
    optimizer: str
    """One of `OPTIMIZERS`."""
    schedule: str
    """One of `SCHEDULES`."""
    rate: float
    """The peak that people would write first."""
    judge: Callable[[], list[Batch]] | None = None
    """Held-out mini-batches other than those of the validation, where examples are seen many times."""

    @property
    def name(self) -> str:
        return self.problem.name


def _spared(problem: Problem, batches: int = 8) -> Callable[[], list[Batch]]:
    """A judge's mini-batches, of examples that neither train nor validate."""
    return lambda: [problem.spare(0, 0, number) for number in range(batches)]


def _named(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


DEVELOPMENT = _named(
    Workload(LLAMA, "a llama-style language model, bytes of English", "adamw-0.999", "cosine", 1e-3),
    Workload(RECURRENT, "a GRU, bytes of English", "adamw-0.999", "cosine", 1e-3),
    Workload(PROBLEMS["transformer"], "a small GPT, bytes of Python's sources", "adamw-0.95", "wsd", 1e-3),
    Workload(PROBLEMS["digits"], "convolutions, scikit-learn's digits with noise", "adamw-0.95", "wsd", 1e-3),
    Workload(PROBLEMS["recsys"], "a recommender with embeddings (dense gradients), clicks that drift", "adamw-0.95", "wsd", 1e-3),
    Workload(REGRESSION, "Friedman's function, whose loss falls by orders of magnitude", "adamw-0.999", "cosine", 1e-3),
    Workload(SMALL, "256 rows, some labels wrong, seen 1 250 times", "adamw-0.999", "linear", 1e-3, judge=small_judge),
    Workload(RESNET, "a residual network with BatchNorm, digits", "sgd", "cosine", 0.1),
    Workload(FINETUNING, "a byte model of Python's sources, on English", "adamw-0.999", "linear", 1e-4),
    Workload(ADAPTERS, "the same with low-rank adapters", "lion", "linear", 1e-4),
    Workload(VIT, "a vision transformer, digits", "adamw-0.999", "cosine", 1e-3),
    Workload(DIFFUSION, "a diffusion denoiser, digits", "adamw-0.999", "wsd", 1e-3),
    Workload(EXPERTS, "a mixture of experts, bytes of English", "adamw-0.95", "cosine", 1e-3),
    Workload(MIXER, "an MLP-Mixer, digits", "muon", "one-cycle", 0.02),
    Workload(CONVOLUTIONS, "dilated convolutions, bytes of English", "adamw-0.999", "one-cycle", 1e-3),
    Workload(SORTING, "an encoder that sorts numbers", "lion", "linear", 1e-4),
    Workload(AUTOENCODER, "a variational autoencoder, digits", "adamw-0.95", "cosine", 1e-3),
    Workload(SERIES, "the next values of two oscillators with noise", "adamw-0.999", "cosine", 1e-3),
    Workload(SETS, "which curve points are of", "adamw-0.95", "linear", 1e-3),
    Workload(PAIRS, "which two views are of one point", "adamw-0.999", "one-cycle", 1e-3),
    Workload(CLUSTERS, "twenty classes, some labels wrong", "sgd", "wsd", 0.1),
    Workload(TRANSFER, "other clusters, from weights trained on those", "lion", "linear", 1e-4),
    Workload(BRACKETS, "the next of four kinds of brackets", "adamw-0.95", "cosine", 1e-3),
    Workload(MARKED, "the sum of two marked numbers of twenty, a GRU", "adamw-0.999", "cosine", 1e-3),
    Workload(GRAPHS, "how many triangles a graph has, by messages", "adamw-0.95", "wsd", 1e-3),
    Workload(HEAT, "a temperature later on, whose loss falls by orders of magnitude", "adamw-0.999", "linear", 1e-3),
    Workload(LETTERS_ANEW, "strokes under noise, convolutions", "sgd", "one-cycle", 0.1),
    Workload(RETRAINED, "other letters, from weights trained on those", "adamw-0.999", "linear", 1e-4),
    Workload(GATED, "linear recurrences with gates (Mamba-2), bytes of Python's sources", "adamw-0.95", "wsd", 1e-3),
    Workload(MASKED, "the hidden third of a text", "fused-muon", "cosine", 1e-3),
    Workload(SHAPES, "which dots are of discs and bars, segmentation", "sgd", "linear", 0.1),
    Workload(FLOW, "a density in eight dimensions, a normalising flow", "adamw-0.999", "one-cycle", 1e-3),
    Workload(NEIGHBOURS, "word vectors, skip-gram", "adamw-0.999", "linear", 1e-3),
    Workload(SPOKEN, "signs that were sounded, CTC", "adamw-0.999", "cosine", 1e-3),
    Workload(RETOLD, "what a phrase says, from weights trained on another rule", "adamw-0.95", "linear", 1e-4),
    Workload(DISTILLED, "what a larger network thinks of points", "adamw-0.999", "cosine", 1e-3),
    Workload(PAINTED, "a picture by its coordinates, a sine network", "adamw-0.999", "linear", 1e-3),
    Workload(COUNTED, "how often people do things, Poisson", "lion", "wsd", 1e-4),
    Workload(TRANSLATED, "phrases, an encoder and a decoder", "fused-muon", "linear", 1e-3),
    Workload(FORKED, "one of several functions, a mixture density network", "adamw-0.95", "one-cycle", 1e-3),
    Workload(SWUNG, "a driven pendulum, step by step", "adamw-0.95", "wsd", 1e-3),
    Workload(BINARY, "weights of one bit, digits", "sgd", "cosine", 0.1),
    Workload(PARITY, "of three bits of twenty", "adamw-0.999", "linear", 1e-3),
    Workload(HALVED, "the next byte of English, bf16 parameters", "adamw-0.95", "cosine", 1e-3),
    Workload(RANKED, "which of two is preferred, Bradley-Terry", "adamw-0.999", "cosine", 1e-3),
    Workload(ECHOED, "a sound without its echoes", "adamw-0.95", "wsd", 1e-3),
    Workload(QUANTILES, "of a value whose spread depends on the place", "lion", "linear", 1e-4),
    Workload(THREES, "nearer to the same thing than to another, triplets", "sgd", "one-cycle", 0.1),
    Workload(DEEP, "fourteen layers without normalisation", "sgd", "cosine", 0.01),
    Workload(HEAVY, "rows some of which are far off, Huber's loss", "fused-muon", "wsd", 1e-3),
    Workload(CENSORED, "in which month something happens, survival", "adamw-0.999", "cosine", 1e-3),
    Workload(MATCHED, "which picture belongs to which text, CLIP's loss", "lion", "linear", 1e-4),
    Workload(UNSCALED, "values in their own units, far from 0", "adamw-0.95", "wsd", 1e-3),
    Workload(SPELT, "four symbols of a sound, CTC", "adamw-0.999", "one-cycle", 1e-3),
    Workload(RECALLED, "what came after this key, attention", "adamw-0.95", "linear", 1e-3),
    Workload(COORDINATES, "the colours of a picture at places", "fused-muon", "linear", 1e-3),
    Workload(BOTH, "a class and a value of one body", "sgd", "cosine", 0.1),
    Workload(RARE, "one case in fifty, the focal loss", "adamw-0.999", "restarts", 1e-3),
    Workload(RATED, "ratings of films, seen eleven times", "adamw-0.999", "wsd", 1e-3),
    Workload(CROSSED, "clicks by pairs of names, a factorisation machine", "adamw-0.999", "cosine", 1e-3),
    Workload(CLAIMS, "what an insurance will pay, Tweedie's deviance", "adamw-0.999", "linear", 1e-3),
    Workload(WORDED, "the next word of a short text, read seven times", "adamw-0.95", "cosine", 1e-3),
    Workload(GRATINGS, "which texture, one name in five wrong", "sgd", "one-cycle", 0.1),
    Workload(ENERGIES, "of eight atoms by their distances", "fused-muon", "linear", 1e-3),
    Workload(AWAITED, "what happens next, and when, a Hawkes process", "adamw-0.95", "one-cycle", 1e-3),
    Workload(TURNED, "how a body is turned", "lion", "wsd", 1e-4),
)
"""The three old problems, those of which facts were known before, and former test halves: none of them can judge a rule."""
TEST = _named(
    Workload(LINKED, "facts of a graph, complex embeddings", "adamw-0.999", "cosine", 1e-3),
    Workload(WON, "which of two players wins", "adamw-0.95", "linear", 1e-3),
    Workload(TAGGED, "tags of three words", "lion", "wsd", 1e-4),
    Workload(GRADED, "in which of five grades rows are, some wrong", "sgd", "cosine", 0.1),
    Workload(STATED, "hidden states that follow one another, a conditional random field", "adamw-0.999", "one-cycle", 1e-3),
    Workload(MOVED, "how far a picture has moved", "fused-muon", "linear", 1e-3),
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
    replace(DEVELOPMENT["small"], problem=replace(SMALL, name="small-unjudged"), what="*small*, without a judge", judge=None),
    replace(
        DEVELOPMENT["rated"],
        problem=replace(RATED, name="rated-judged"),
        what="*rated*, with a judge of eight mini-batches",
        judge=_spared(RATED),
    ),
    *(
        Workload(flipped(rows), f"{rows} rows, 15 % of the labels wrong", "adamw-0.999", "cosine", 1e-3)
        for rows in (256, 4096, 16_384, 32_768)
    ),
)
"""Examples that a run of 10 000 steps sees 1 250 to 10 times, some with wrong labels; and nobody gives a judge, but for one."""
JUDGED = _named(
    Workload(DOUBTED, "ten kinds, three names in ten at random, seen 60 times", "adamw-0.95", "cosine", 1e-3, judge=_spared(DOUBTED)),
    Workload(TASTED, "which taste a mixture has, seen 40 times", "sgd", "wsd", 0.1, judge=_spared(TASTED)),
    Workload(
        KNOCKED, "which knock is in a recording, one name in ten at random, seen 15 times", "lion", "linear", 1e-4, judge=_spared(KNOCKED)
    ),
)
"""Sets that are seen many times, with a judge. Made after the judge's rule was frozen, and run once with it."""
HARDER = _named(
    Workload(CURRICULUM, "bits to be remembered over ever longer times", "adamw-0.999", "cosine", 1e-3),
    Workload(FADING, "letters under ever more noise", "adamw-0.999", "cosine", 1e-3),
    Workload(SWELLING, "heat of ever more waves", "adamw-0.999", "cosine", 1e-3),
)
"""Data that changes after the trials. On the first one the rule was mended; the others were run once, afterwards."""
ZERO = {f"{name}-zero": replace(DEVELOPMENT[name], schedule="zero") for name in ("pairs", "graphs", "marked", "letters", "neighbours")}
"""Some of them with a warm-up that begins at 0, in which all arms of a scan once were at rate 0."""
MISLEADING = _named(
    Workload(BLOCKS, "a regression, data in blocks of one domain", "adamw-0.999", "cosine", 1e-3),
    Workload(QUANTIZED, "a quantizer's loss, which rises at first", "adamw-0.999", "cosine", 1e-3),
    Workload(BITS_UNTOLD, "a parity with a noisy plateau", "sgd", "cosine", 0.2),
    Workload(STRETCHED, "a regression of which most inputs say nothing", "sgd", "wsd", 0.0096),
    Workload(KINDS, "a hundred kinds, as frequent as words are", "lion", "cosine", 1e-3),
    Workload(CLICKS, "clicks on things with numbers of their own, seen again", "adamw-0.95", "cosine", 3e-4),
)
"""Three adversaries'. On the likes of them the rule was mended."""
WORKLOADS = {**DEVELOPMENT, **TEST, **HIGH, **REPEATED, **JUDGED, **HARDER, **ZERO, **MISLEADING}
