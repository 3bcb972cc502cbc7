"""Equal compute against search: what random search and successive halving would have found, played through from recorded trials."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdet.report import COLOURS, GREY

from .curves import Record, of_one_kind
from .markdown import table as markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["TRIAL", "figure", "search_figure", "search_tables", "table"]

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

    Raises:
        ValueError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ValueError("successive halving is Optuna's, which is not installed: pip install 'hdet[evidence]'") from error
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
    found: dict[int, list[Record]] = {}
    for line in sorted(lines, key=lambda line: (line["seed"], line["draw"])):
        if line["method"] == TRIAL:
            found.setdefault(line["seed"], []).append(line)
    return found


# -- the report ----------------------------------------------------------------------------------------------------------------


def search_tables(records: Sequence[Record]) -> str:
    return (
        "# Equal compute against search\n\n![](search.png)\n\nMeans over seeds and starts that are drawn; a run is the training of one trial. "
        "A run that crashed counts as an untrained model.\nThe last column: so many trials of random search are as good on average.\n\n"
        + table(records)
    )


def table(lines: Sequence[Record]) -> str:
    """Markdown, for each problem: how many examples a method has seen, in runs, and where it ended."""
    rows = []
    for problem, chosen in of_one_kind(lines, RUN).items():
        losses = [[final(line) for line in pool] for pool in pools(chosen).values()]
        fewest = min(map(len, losses), default=0)
        for k in (k for k in (1, 2, 4, 8) if k < fewest):
            mean = statistics.mean(expected_minimum(pool, k) for pool in losses)
            rows.append([problem, f"random search, {k} trial{'s' * (k > 1)}", str(k), f"{mean:.4f}", "", ""])
        for name, results in searches(chosen).items():
            ends = [loss for _, loss in results]
            samples = statistics.mean(points[-1][0] for points, _ in results) / run_length(chosen)
            needs = ""
            if losses and "trials" not in name:
                needed = trials_needed(losses, statistics.mean(ends))
                needs = f"k > {fewest}" if needed is None else f"k = {needed}"
            rows.append([problem, name, f"{samples:.3g}", f"{statistics.mean(ends):.4f}", f"{min(ends):.4f} ... {max(ends):.4f}", needs])
    return markdown_table(["problem", "method", "examples seen, in runs", "final loss", "best ... worst", "random search needs"], rows)


def search_figure(records: Sequence[Record]) -> Figure:
    """A panel for each problem."""
    from matplotlib.figure import Figure

    problems = of_one_kind(records, RUN)
    drawing = Figure(figsize=(4.8 * len(problems) + 1.2, 4.6), dpi=130, layout="constrained")
    panels = drawing.subplots(1, len(problems), squeeze=False)[0]
    for lines, axis in zip(problems.values(), panels, strict=True):
        figure(lines, axis)
    panels[0].set_ylabel("best held-out loss so far, nats")
    return drawing


def figure(lines: Sequence[Record], axis: Axes) -> None:
    """Best loss so far against examples seen, of one problem: means, and for HDET a band from its best to its worst run.

    Raises:
        ValueError: there are lines of several problems, or none.
    """
    problems = sorted({line["problem"] for line in lines})
    if len(problems) != 1:
        raise ValueError(f"lines must be of one problem, got {problems}: choose them by line['problem']")
    colours, styles = iter(COLOURS), iter(("-", "--", "-.", ":", (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3))))
    for name, results in searches(lines).items():
        end = max(points[-1][0] for points, _ in results)
        at = [end * i / 400 for i in range(401)]
        values = list(zip(*(best_so_far(points, at) for points, _ in results), strict=True))
        runs = [samples / run_length(lines) for samples in at]
        ours = name.startswith("hdet-")
        colour, style = (next(colours), "-") if ours else (GREY, next(styles, "-"))
        axis.plot(runs, list(map(statistics.mean, values)), color=colour, linestyle=style, linewidth=2.4 if ours else 1.4, label=name)
        if ours:
            axis.fill_between(runs, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xlim(left=1 / max(len(line["curve"]) for line in lines))
    axis.set_xlabel("examples seen, in runs")
    axis.set_title(problems[0], fontsize=11, loc="left")
    axis.legend(frameon=False, fontsize=8)
    axis.grid(True, color="#E3E3E3", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def run_length(lines: Sequence[Record]) -> int:
    """Examples that a trial trains on."""
    return int(lines[0]["steps"] * lines[0]["batch"])
