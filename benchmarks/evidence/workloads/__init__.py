"""Problems as people train them: model, data, optimizer, schedule, and a usual learning rate.

A name says the model or the method, then the data. Fields are in modules of their own, where
a `kit.Field` makes a workload of each function that draws examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from . import finetuning, generative, graphs, language, sequences, tables, unseen, vision
from .kit import ALL, Workload

_FIELDS = (language, vision, sequences, tables, generative, graphs, finetuning)
FIELDS = [module.FIELD.name for module in _FIELDS]


def _named(names: str) -> dict[str, Workload]:
    return {name: ALL[name] for name in names.split()}


def _with_schedule(schedule: str, suffix: str, names: Sequence[str]) -> dict[str, Workload]:
    found = {}
    for name in names:
        problem = replace(ALL[name].problem, name=f"{name}-{suffix}")
        found[problem.name] = replace(ALL[name], problem=problem, schedule=schedule)
    return found


DEVELOPMENT = _named("""
    llama-bytes gru-bytes gpt-python cnn-digits recommender-clicks mlp-friedman mlp-breast-cancer
    resnet-digits-sgd gpt-finetuned-bytes gpt-lora-bytes vit-digits diffusion-digits moe-bytes
    mixer-digits tcn-bytes transformer-sorting vae-digits lstm-oscillators deep-sets-curves
    two-towers-views mlp-clusters mlp-finetuned-clusters transformer-brackets gru-adding
    gnn-triangles mlp-heat cnn-strokes cnn-finetuned-strokes gated-linear-rnn-python
    masked-lm-markov unet-shapes flow-spirals skipgram-words gru-ctc-signs
    transformer-finetuned-phrases distillation-points siren-picture poisson-counts
    seq2seq-translation mixture-density-branches mlp-pendulum binary-cnn-digits mlp-parity-20
    mlp-bytes-bf16 bradley-terry-points cnn-dereverberation quantile-mlp-sines triplet-mlp-views
    deep-mlp-sines huber-mlp-heavy-tails survival-mlp-months clip-views mlp-unscaled-targets
    cnn-ctc-symbols transformer-recall fourier-mlp-picture multitask-mlp-sines focal-mlp-rare-class
    matrix-factorization-ratings factorization-machine-clicks tweedie-claims transformer-grammar
    cnn-textures gnn-molecules gru-hawkes mlp-rotations complex-knowledge-graph bradley-terry-games
    mlp-word-tags ordinal-mlp-grades crf-states flownet-shifts
""")
"""Workloads on which rules and constants are found. The order is part of what is measured: a seed
draws from it."""
TEST = {name: one for name, one in ALL.items() if one.field == unseen.FIELD.name}
"""Workloads that no rule has been fitted to.

Made by somebody who did not know the rule of `AutoLR`.
"""
_SEVEN = (
    "mlp-friedman", "vae-digits", "mlp-clusters", "mlp-finetuned-clusters", "mlp-heat",
    "two-towers-views", "gnn-triangles",
)  # fmt: skip
NOT_TO_ZERO = {
    **_with_schedule("constant", "constant", _SEVEN),
    **_with_schedule("tenth", "to-tenth", _SEVEN),
}
"""Schedules that do not fall to zero: one stays at its peak, one is a cosine to a tenth of it."""
FROM_ZERO = _with_schedule(
    "zero",
    "from-zero",
    ("two-towers-views", "gnn-triangles", "gru-adding", "cnn-strokes", "skipgram-words"),
)
"""Warm-ups that begin at 0: the first step has rate 0."""
CHANGING = _named("rnn-memory-rising-length cnn-strokes-rising-noise mlp-heat-rising-waves")
"""Data that becomes harder during training, in four stages."""
MISLEADING = _named("""
    mlp-domain-blocks vqvae-mixture mlp-parity-150 linear-idle-inputs mlp-zipf-classes
    embedding-mlp-clicks
""")
"""Workloads whose early losses mislead: blocks of data, a loss that rises at first, plateaus, and
first steps that learn the frequencies of classes only."""
REPEATED = _named("""
    mlp-breast-cancer mlp-rows-256 mlp-rows-4096 mlp-noisy-labels embedding-bag-mixtures cnn-knocks
    matrix-factorization-ratings embedding-mlp-clicks transformer-grammar
""")
"""Data that a run of 10 000 steps sees many times, seven to 1 250; some of it has wrong labels.

Four of them are also in `DEVELOPMENT` or in `MISLEADING`.
"""
WORKLOADS = {
    **DEVELOPMENT, **TEST, **NOT_TO_ZERO, **REPEATED, **CHANGING, **FROM_ZERO, **MISLEADING,
}  # fmt: skip
