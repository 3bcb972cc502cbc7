"""Equal compute against search: what random search and successive halving would have found, played through from recorded trials."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence

from .curves import Record, by, of_one_kind
from .tables import table

TRIAL = "trial"
"""the method of a fixed run whose rate was drawn"""
RUN = ("method", "draw", "seed")
"""what makes two lines of a problem the same run"""
ORDERS = 20
"""in which the trials of a seed are played through, at random"""
FIRST_RUNGS = {1: "5 %", 4: "20 %"}
"""Points of a curve, and of a run, before which successive halving ends nothing: at the first WSD is still warming up."""

Points = list[tuple[float, float]]
"""(examples seen, held-out loss)"""


def final(line: Record) -> float:
    """Loss at the end of a run; an untrained model's if it crashed or ended above it."""
    values = [loss for loss in (line["validation"], line["curve"][0][1]) if loss is not None]
    return float(min(values))


def expected_minimum(losses: Sequence[float], k: int) -> float:
    """Mean, over all subsets of ``k``, of the lowest loss: the i-th lowest is the lowest in C(n - 1 - i, k - 1) of C(n, k)."""
    if not 1 <= k <= len(losses):
        raise ValueError(f"k={k} is not one of 1 .. {len(losses)}, the number of losses")
    lowest = enumerate(sorted(losses)[: len(losses) - k + 1])
    return sum(loss * math.comb(len(losses) - 1 - i, k - 1) for i, loss in lowest) / math.comb(len(losses), k)


def trials_needed(losses: Sequence[Sequence[float]], target: float) -> int | None:
    """The fewest trials whose expected best, over the pools, is ``target`` or lower; None: more than there are."""
    for k in range(1, min(map(len, losses)) + 1):
        if statistics.mean(expected_minimum(pool, k) for pool in losses) <= target:
            return k
    return None


def halved(trials: Sequence[Record], first: int = 1) -> list[int]:
    """How many points of each trial's curve are trained under Optuna's successive halving, one trial after the other.

    The rungs are at ``first``, 4 and 16 times it of the curve's 20 points: Optuna's default factor.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=4))
    lengths = []
    for line in trials:
        trial, length = study.ask(), len(line["curve"])
        for point, (_, loss) in enumerate(line["curve"][1:], 1):
            trial.report(math.nan if loss is None else loss, point)
            if trial.should_prune():
                length = point + 1
                break
        pruned = length < len(line["curve"]) or line["validation"] is None
        study.tell(trial, None if pruned else line["validation"], optuna.trial.TrialState.PRUNED if pruned else None)
        lengths.append(length)
    return lengths


def played(trials: Sequence[Record], lengths: Sequence[int]) -> tuple[Points, float]:
    """All points of a search that trains so many of each trial, and the lowest loss of the trials that it let end."""
    spent, curve = 0.0, []
    for line, length in zip(trials, lengths, strict=True):
        curve += [(spent + samples, math.inf if loss is None else loss) for samples, loss in line["curve"][:length]]
        spent = curve[-1][0]
    ends = [final(line) for line, length in zip(trials, lengths, strict=True) if length == len(line["curve"])]
    return curve, min(ends, default=final(trials[0]))


def best_so_far(curve: Points, at: Sequence[float]) -> list[float]:
    """The lowest loss after at most so many examples; ``at`` rises, and both begin at 0."""
    found, best, i = [], math.inf, 0
    for samples in at:
        while i < len(curve) and curve[i][0] <= samples:
            best, i = min(best, curve[i][1]), i + 1
        found.append(best)
    return found


def searches(lines: Sequence[Record]) -> dict[str, list[tuple[Points, float]]]:
    """Name -> (points, final loss) of each time it was done; the searches are played through in `ORDERS` orders for each seed."""
    found: dict[str, list[tuple[Points, float]]] = {}
    for seed, pool in pools(lines).items():
        rng = random.Random(seed)
        for _ in range(ORDERS):
            order = rng.sample(pool, len(pool))
            found.setdefault(f"random search, {len(pool)} trials", []).append(played(order, [len(line["curve"]) for line in order]))
            for first, part in FIRST_RUNGS.items():
                name = f"successive halving from {part} on, {len(pool)} trials"
                found.setdefault(name, []).append(played(order, halved(order, first)))
    for line in lines:
        if line["method"] != TRIAL:
            found.setdefault(line["method"], []).append(played([line], [len(line["curve"])]))
    return found


def pools(lines: Sequence[Record]) -> dict[int, list[Record]]:
    """The trials of each seed, in the order of their draws."""
    return by(sorted((line for line in lines if line["method"] == TRIAL), key=lambda line: (line["seed"], line["draw"])), "seed")


def run_length(lines: Sequence[Record]) -> int:
    """Examples that a trial trains on."""
    return int(lines[0]["steps"] * lines[0]["batch"])


def search_tables(records: Sequence[Record]) -> str:
    """Markdown, for each problem: how many examples a method has seen, in runs, and where it ended."""
    return (
        "# Equal compute against search\n\n![](search.png)\n\nMeans over seeds and starts that are drawn; a run is the training of one trial. "
        "A run that crashed counts as an untrained model.\nThe last column: so many trials of random search are as good on average.\n\n"
        + table(
            ["problem", "method", "examples seen, in runs", "final loss", "best ... worst", "random search needs"],
            [[problem, *row] for problem, lines in of_one_kind(records, RUN).items() for row in _rows(lines)],
        )
    )


def _rows(lines: Sequence[Record]) -> Iterator[list[str]]:
    losses = [[final(line) for line in pool] for pool in pools(lines).values()]
    fewest = min(map(len, losses), default=0)
    for k in (k for k in (1, 2, 4, 8) if k < fewest):
        mean = statistics.mean(expected_minimum(pool, k) for pool in losses)
        yield [f"random search, {k} trial{'s' * (k > 1)}", str(k), f"{mean:.4f}", "", ""]
    for name, results in searches(lines).items():
        ends = [loss for _, loss in results]
        samples = statistics.mean(points[-1][0] for points, _ in results) / run_length(lines)
        needs = ""
        if losses and "trials" not in name:
            needed = trials_needed(losses, statistics.mean(ends))
            needs = f"k > {fewest}" if needed is None else f"k = {needed}"
        yield [name, f"{samples:.3g}", f"{statistics.mean(ends):.4f}", f"{min(ends):.4f} ... {max(ends):.4f}", needs]
