"""Problems as people train them: model, data, optimizer, schedule, and a usual learning rate.

A name says the model or the method, then the data. Fields are in modules of their own.
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
from . import finetuning, generative, graphs, language, sequences, tables, unseen, vision

__all__ = [
    "CHANGING",
    "DEVELOPMENT",
    "FROM_ZERO",
    "MISLEADING",
    "NOT_TO_ZERO",
    "OPTIMIZERS",
    "REPEATED",
    "SCHEDULES",
    "TEST",
    "WORKLOADS",
    "Workload",
]

OPTIMIZERS: dict[str, Callable[[Any, float], Optimizer]] = {
    "adamw-0.999": lambda groups, rate: hdet.FusedAdamW(groups, lr=rate, betas=(0.9, 0.999)),
    "adamw-0.95": lambda groups, rate: hdet.FusedAdamW(groups, lr=rate, betas=(0.9, 0.95)),
    "sgd": lambda groups, rate: hdet.FusedSGD(groups, lr=rate, momentum=0.9),
    "lion": lambda groups, rate: hdet.FusedLion(groups, lr=rate),
    "muon": lambda groups, rate: torch.optim.Muon(groups, lr=rate),
    "fused-muon": lambda groups, rate: hdet.FusedMuon(
        groups, lr=rate, adamw_lr=rate, adjust_lr_fn="match_rms_adamw"
    ),
}
WARMUP = 0.05
"""Part of a run in which every schedule but one-cycle rises."""


def _shape(name: str, part: float) -> float:
    """The multiple of the peak at a part of the run in [0, 1)."""
    if part < WARMUP:
        return part / WARMUP
    if name == "constant":
        return 1.0
    if name == "wsd":
        return min(1.0, (1 - part) / 0.2)
    after = (part - WARMUP) / (1 - WARMUP)
    cosine = 0.5 * (1 + math.cos(math.pi * after))
    again = 0.5 * (1 + math.cos(math.pi * (3 * after % 1)))
    return {"linear": 1 - after, "cosine": cosine, "tenth": 0.1 + 0.9 * cosine, "restarts": again}[
        name
    ]


def _schedule(name: str) -> Callable[[Optimizer, int], LRScheduler]:
    return lambda optimizer, steps: LambdaLR(
        optimizer, lambda step: max(_shape(name, (step + 1) / (steps + 1)), 0.0)
    )


def _one_cycle(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Torch's defaults: the momentum, or beta1, falls while the rate rises."""
    return OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=steps
    )


def _from_zero(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Cosine with warm-up as in transformers and Megatron: the first step has rate 0."""
    return LambdaLR(optimizer, lambda step: max(_shape("cosine", step / steps), 0.0))


SCHEDULES = {
    **{
        name: _schedule(name)
        for name in ("cosine", "wsd", "linear", "constant", "tenth", "restarts")
    },
    "one-cycle": _one_cycle,
    "zero": _from_zero,
}


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
    """The peak that people would try first."""
    val_batches: Callable[[], list[Batch]] | None = None
    """Held-out mini-batches, other than those of `Problem.validate`."""

    @property
    def name(self) -> str:
        return self.problem.name


def _spare(problem: Problem, batches: int = 8) -> Callable[[], list[Batch]]:
    """Mini-batches of examples that are neither in the training data nor in the validation."""
    return lambda: [problem.spare(0, 0, number) for number in range(batches)]


def _named(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


DEVELOPMENT = _named(
    Workload(language.LLAMA_BYTES, "the next byte of English", "adamw-0.999", "cosine", 1e-3),
    Workload(language.GRU_BYTES, "the next byte of English", "adamw-0.999", "cosine", 1e-3),
    Workload(
        PROBLEMS["gpt-python"], "the next byte of Python's sources", "adamw-0.95", "wsd", 1e-3
    ),
    Workload(PROBLEMS["cnn-digits"], "digits with noise", "adamw-0.95", "wsd", 1e-3),
    Workload(PROBLEMS["recommender-clicks"], "clicks that drift", "adamw-0.95", "wsd", 1e-3),
    Workload(tables.MLP_FRIEDMAN, "Friedman's function", "adamw-0.999", "cosine", 1e-3),
    Workload(
        tables.MLP_BREAST_CANCER,
        "256 rows, 15 % of the labels wrong, seen 1 250 times",
        "adamw-0.999",
        "linear",
        1e-3,
        val_batches=tables.cell_val_batches,
    ),
    Workload(vision.RESNET_DIGITS_SGD, "digits with noise", "sgd", "cosine", 0.1),
    Workload(
        finetuning.GPT_FINETUNED_BYTES,
        "from Python's sources to English",
        "adamw-0.999",
        "linear",
        1e-4,
    ),
    Workload(finetuning.GPT_LORA_BYTES, "from Python's sources to English", "lion", "linear", 1e-4),
    Workload(vision.VIT_DIGITS, "digits with noise", "adamw-0.999", "cosine", 1e-3),
    Workload(generative.DIFFUSION_DIGITS, "digits, a denoiser", "adamw-0.999", "wsd", 1e-3),
    Workload(language.MOE_BYTES, "the next byte of English", "adamw-0.95", "cosine", 1e-3),
    Workload(vision.MIXER_DIGITS, "digits with noise", "muon", "one-cycle", 0.02),
    Workload(language.TCN_BYTES, "the next byte of English", "adamw-0.999", "one-cycle", 1e-3),
    Workload(sequences.TRANSFORMER_SORTING, "sorting twelve numbers", "lion", "linear", 1e-4),
    Workload(generative.VAE_DIGITS, "digits", "adamw-0.95", "cosine", 1e-3),
    Workload(
        sequences.LSTM_OSCILLATORS,
        "the next values of two oscillators",
        "adamw-0.999",
        "cosine",
        1e-3,
    ),
    Workload(graphs.DEEP_SETS_CURVES, "which curve points are from", "adamw-0.95", "linear", 1e-3),
    Workload(
        tables.TWO_TOWERS_VIEWS,
        "which views are of the same point",
        "adamw-0.999",
        "one-cycle",
        1e-3,
    ),
    Workload(tables.MLP_CLUSTERS, "clusters, 10 % of the labels random", "sgd", "wsd", 0.1),
    Workload(
        finetuning.MLP_FINETUNED_CLUSTERS, "from clusters to moved ones", "lion", "linear", 1e-4
    ),
    Workload(
        sequences.TRANSFORMER_BRACKETS,
        "nested brackets of four kinds",
        "adamw-0.95",
        "cosine",
        1e-3,
    ),
    Workload(sequences.GRU_ADDING, "the sum of two marked numbers", "adamw-0.999", "cosine", 1e-3),
    Workload(graphs.GNN_TRIANGLES, "the number of triangles in a graph", "adamw-0.95", "wsd", 1e-3),
    Workload(tables.MLP_HEAT, "the heat equation", "adamw-0.999", "linear", 1e-3),
    Workload(vision.CNN_STROKES, "strokes under noise", "sgd", "one-cycle", 0.1),
    Workload(
        finetuning.CNN_FINETUNED_STROKES,
        "from strokes to other strokes",
        "adamw-0.999",
        "linear",
        1e-4,
    ),
    Workload(
        language.GATED_LINEAR_RNN_PYTHON, "the next byte, as in Mamba-2", "adamw-0.95", "wsd", 1e-3
    ),
    Workload(
        language.MASKED_LM_MARKOV, "hidden symbols of a Markov chain", "fused-muon", "cosine", 1e-3
    ),
    Workload(vision.UNET_SHAPES, "segmentation of discs and bars", "sgd", "linear", 0.1),
    Workload(
        generative.FLOW_SPIRALS, "a density in eight dimensions", "adamw-0.999", "one-cycle", 1e-3
    ),
    Workload(language.SKIPGRAM_WORDS, "word vectors of English", "adamw-0.999", "linear", 1e-3),
    Workload(
        sequences.GRU_CTC_SIGNS, "signs in a sound, no alignment", "adamw-0.999", "cosine", 1e-3
    ),
    Workload(
        finetuning.TRANSFORMER_FINETUNED_PHRASES,
        "from phrases to permuted labels",
        "adamw-0.95",
        "linear",
        1e-4,
    ),
    Workload(
        tables.DISTILLATION_POINTS, "the answers of a larger network", "adamw-0.999", "cosine", 1e-3
    ),
    Workload(vision.SIREN_PICTURE, "brightness at coordinates", "adamw-0.999", "linear", 1e-3),
    Workload(tables.POISSON_COUNTS, "counts of what people do", "lion", "wsd", 1e-4),
    Workload(language.SEQ2SEQ_TRANSLATION, "artificial phrases", "fused-muon", "linear", 1e-3),
    Workload(
        generative.MIXTURE_DENSITY_BRANCHES,
        "one of three functions",
        "adamw-0.95",
        "one-cycle",
        1e-3,
    ),
    Workload(sequences.MLP_PENDULUM, "a driven pendulum", "adamw-0.95", "wsd", 1e-3),
    Workload(vision.BINARY_CNN_DIGITS, "digits with noise, one-bit weights", "sgd", "cosine", 0.1),
    Workload(tables.MLP_PARITY_20, "the parity of three bits of 20", "adamw-0.999", "linear", 1e-3),
    Workload(
        language.MLP_BYTES_BF16, "the next byte, bf16 parameters", "adamw-0.95", "cosine", 1e-3
    ),
    Workload(
        tables.BRADLEY_TERRY_POINTS,
        "which of two points is preferred",
        "adamw-0.999",
        "cosine",
        1e-3,
    ),
    Workload(
        sequences.CNN_DEREVERBERATION, "a sound without its echoes", "adamw-0.95", "wsd", 1e-3
    ),
    Workload(tables.QUANTILE_MLP_SINES, "quantiles of a value", "lion", "linear", 1e-4),
    Workload(
        tables.TRIPLET_MLP_VIEWS, "which views are of the same thing", "sgd", "one-cycle", 0.1
    ),
    Workload(tables.DEEP_MLP_SINES, "14 layers without normalisation", "sgd", "cosine", 0.01),
    Workload(tables.HUBER_MLP_HEAVY_TAILS, "a value with heavy tails", "fused-muon", "wsd", 1e-3),
    Workload(
        tables.SURVIVAL_MLP_MONTHS, "the month of an event, or none", "adamw-0.999", "cosine", 1e-3
    ),
    Workload(tables.CLIP_VIEWS, "which views are of the same point", "lion", "linear", 1e-4),
    Workload(tables.MLP_UNSCALED_TARGETS, "targets far from 0", "adamw-0.95", "wsd", 1e-3),
    Workload(
        sequences.CNN_CTC_SYMBOLS,
        "symbols in a sound, no alignment",
        "adamw-0.999",
        "one-cycle",
        1e-3,
    ),
    Workload(
        sequences.TRANSFORMER_RECALL,
        "the value that belongs to a key",
        "adamw-0.95",
        "linear",
        1e-3,
    ),
    Workload(vision.FOURIER_MLP_PICTURE, "colours at coordinates", "fused-muon", "linear", 1e-3),
    Workload(tables.MULTITASK_MLP_SINES, "a class and a value at once", "sgd", "cosine", 0.1),
    Workload(
        tables.FOCAL_MLP_RARE_CLASS, "a class of one row in fifty", "adamw-0.999", "restarts", 1e-3
    ),
    Workload(
        tables.MATRIX_FACTORIZATION_RATINGS,
        "ratings of films, seen 11 times",
        "adamw-0.999",
        "wsd",
        1e-3,
    ),
    Workload(
        tables.FACTORIZATION_MACHINE_CLICKS,
        "clicks by categories, seen twice",
        "adamw-0.999",
        "cosine",
        1e-3,
    ),
    Workload(
        tables.TWEEDIE_CLAIMS, "insurance claims, seen 3 times", "adamw-0.999", "linear", 1e-3
    ),
    Workload(
        language.TRANSFORMER_GRAMMAR, "the next word, seen 7 times", "adamw-0.95", "cosine", 1e-3
    ),
    Workload(
        vision.CNN_TEXTURES, "20 % of the labels random, seen 5 times", "sgd", "one-cycle", 0.1
    ),
    Workload(
        graphs.GNN_MOLECULES, "the energy of 8 atoms, seen 9 times", "fused-muon", "linear", 1e-3
    ),
    Workload(sequences.GRU_HAWKES, "the next event and its time", "adamw-0.95", "one-cycle", 1e-3),
    Workload(graphs.MLP_ROTATIONS, "the rotation of a body", "lion", "wsd", 1e-4),
    Workload(graphs.COMPLEX_KNOWLEDGE_GRAPH, "facts, seen 3 times", "adamw-0.999", "cosine", 1e-3),
    Workload(tables.BRADLEY_TERRY_GAMES, "who wins, seen 8 times", "adamw-0.95", "linear", 1e-3),
    Workload(language.MLP_WORD_TAGS, "the tag of a word among three", "lion", "wsd", 1e-4),
    Workload(
        tables.ORDINAL_MLP_GRADES, "20 % of the grades random, seen 6 times", "sgd", "cosine", 0.1
    ),
    Workload(sequences.CRF_STATES, "the states of a machine", "adamw-0.999", "one-cycle", 1e-3),
    Workload(vision.FLOWNET_SHIFTS, "how far a picture has moved", "fused-muon", "linear", 1e-3),
)
"""Workloads on which rules and constants are found."""
TEST = _named(*(Workload(*one) for one in unseen.UNSEEN))
"""Workloads that no rule has been fitted to.

Made by somebody who did not know the rule of `AutoLR`.
"""
NOT_TO_ZERO = _named(
    *(
        replace(
            DEVELOPMENT[name],
            problem=replace(DEVELOPMENT[name].problem, name=f"{name}-{suffix}"),
            schedule=schedule,
        )
        for suffix, schedule in (("constant", "constant"), ("to-tenth", "tenth"))
        for name in (
            "mlp-friedman",
            "vae-digits",
            "mlp-clusters",
            "mlp-finetuned-clusters",
            "mlp-heat",
            "two-towers-views",
            "gnn-triangles",
        )
    )
)
"""Schedules that do not fall to zero: one stays at its peak, one is a cosine to a tenth of it."""
FROM_ZERO = _named(
    *(
        replace(
            DEVELOPMENT[name],
            problem=replace(DEVELOPMENT[name].problem, name=f"{name}-from-zero"),
            schedule="zero",
        )
        for name in (
            "two-towers-views",
            "gnn-triangles",
            "gru-adding",
            "cnn-strokes",
            "skipgram-words",
        )
    )
)
"""Warm-ups that begin at 0: the first step has rate 0."""
CHANGING = _named(
    Workload(
        sequences.RNN_MEMORY_RISING_LENGTH,
        "three bits over ever longer times",
        "adamw-0.999",
        "cosine",
        1e-3,
    ),
    Workload(
        vision.CNN_STROKES_RISING_NOISE,
        "strokes under ever more noise",
        "adamw-0.999",
        "cosine",
        1e-3,
    ),
    Workload(tables.MLP_HEAT_RISING_WAVES, "ever more waves", "adamw-0.999", "cosine", 1e-3),
)
"""Data that becomes harder during training, in four stages."""
MISLEADING = _named(
    Workload(
        tables.MLP_DOMAIN_BLOCKS, "data in blocks of one domain", "adamw-0.999", "cosine", 1e-3
    ),
    Workload(generative.VQVAE_MIXTURE, "the loss rises at first", "adamw-0.999", "cosine", 1e-3),
    Workload(tables.MLP_PARITY_150, "the parity of three bits of 150", "sgd", "cosine", 0.2),
    Workload(tables.LINEAR_IDLE_INPUTS, "most inputs say nothing", "sgd", "wsd", 0.0096),
    Workload(
        tables.MLP_ZIPF_CLASSES, "100 classes with Zipf's frequencies", "lion", "cosine", 1e-3
    ),
    Workload(
        tables.EMBEDDING_MLP_CLICKS, "clicks, seen about 11 times", "adamw-0.95", "cosine", 3e-4
    ),
)
"""Workloads whose early losses mislead: blocks of data, a loss that rises at first, plateaus, and
first steps that learn the frequencies of classes only."""
REPEATED = _named(
    DEVELOPMENT["mlp-breast-cancer"],
    *(
        Workload(
            tables.mlp_rows(rows),
            f"{rows} rows, 15 % of the labels wrong, seen {times} times",
            "adamw-0.999",
            "cosine",
            1e-3,
        )
        for rows, times in ((256, "1 250"), (4096, "78"))
    ),
    Workload(
        tables.MLP_NOISY_LABELS,
        "ten classes, 30 % of the labels random, seen 60 times",
        "adamw-0.95",
        "cosine",
        1e-3,
        val_batches=_spare(tables.MLP_NOISY_LABELS),
    ),
    Workload(
        tables.EMBEDDING_BAG_MIXTURES,
        "the taste of a mixture of spices, seen 40 times",
        "sgd",
        "wsd",
        0.1,
        val_batches=_spare(tables.EMBEDDING_BAG_MIXTURES),
    ),
    Workload(
        sequences.CNN_KNOCKS,
        "which knock is in a recording, 10 % of the labels random, seen 15 times",
        "lion",
        "linear",
        1e-4,
        val_batches=_spare(sequences.CNN_KNOCKS),
    ),
    DEVELOPMENT["matrix-factorization-ratings"],
    MISLEADING["embedding-mlp-clicks"],
    DEVELOPMENT["transformer-grammar"],
)
"""Data that a run of 10 000 steps sees many times, seven to 1 250; some of it has wrong labels.

Four of them are also in `DEVELOPMENT` or in `MISLEADING`.
"""
WORKLOADS = {
    **DEVELOPMENT,
    **TEST,
    **NOT_TO_ZERO,
    **REPEATED,
    **CHANGING,
    **FROM_ZERO,
    **MISLEADING,
}
