"""Signal quality: what each controller says of the rate, against what forks of the run say at its end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .curves import Record, of_one_kind, score
from .tables import crossed, percent, share, standard_error, start, table

FACTORS = {"fork-0.7": 0.7, "fork-1.4": 1.4}
"""method of a fork -> what its schedule is multiplied by from the moment on"""
MOMENTS = (0.05, 0.1, 0.2, 0.4)
"""parts of the run"""
STARTS = (-4, -2, 0, 2, 4)
RUN = ("method", "moment", "exponent", "seed")
"""what makes two lines of a problem the same run"""
SEEDS = 5
SIGNALS = ("probe", "probe (last weights)", "slope", "rank", "softmax", "hypergradient")
"""in the order of the table"""
IN_NATS = ("probe", "probe (last weights)", "slope")
"""signals whose slope is that of a loss"""
CERTAIN = 2.0
"""standard errors; the truth's over seeds, a controller's own"""

CAPTION = """
The truth is d loss / d ln(rate) at the end of the run, (L(1.4) - L(0.7)) / ln 2 of two forks whose schedule is multiplied by this from the
moment on; nats, mean over seeds ± one standard error. Below 0 a higher rate is better. It counts where it is more than two standard errors from 0.
"""
EXPLAINED = """
*Right*: the sign is that of the truth, of all runs in which the truth counts and the controller says something. *Sure*: |t| > 2; softmax has no
error. *Scatter*: of the slope over seeds, in its own errors, root mean square over starts and moments; near 1 they tell how far seeds are apart, above it they are too
small. *Off the truth*: slope and truth differ by more than two of both errors together; what errors leave out is that a cycle is not the run.
Nothing was corrected in these runs; near the schedule's ends the rules do not act on what they say.
"""


@dataclass(frozen=True)
class Heard:
    """What a controller said in one run, at one moment, beside the truth of that start and moment over seeds."""

    exponent: int
    moment: float
    slope: float
    error: float | None
    t: float | None
    truth: float
    uncertainty: float

    @property
    def right(self) -> bool:
        return self.slope * self.truth > 0

    @property
    def sure(self) -> bool:
        return self.t is not None and abs(self.t) > CERTAIN

    @property
    def counts(self) -> bool:
        return known(self.truth, self.uncertainty)

    @property
    def off(self) -> bool:
        """From the truth, by more than both errors together."""
        return abs(self.slope - self.truth) > CERTAIN * math.hypot(self.error or 0.0, self.uncertainty)


def known(truth: float, uncertainty: float) -> bool:
    """A single seed has no error: then any difference counts."""
    return abs(truth) > CERTAIN * uncertainty


def truths(lines: Sequence[Record]) -> dict[tuple[int, float], tuple[float, float]]:
    """(start, moment) -> mean and standard error over the seeds that have both forks."""
    forks: dict[tuple[int, float], dict[int, dict[str, float]]] = {}
    for line in lines:
        if line["method"] in FACTORS:
            forks.setdefault((line["exponent"], line["moment"]), {}).setdefault(line["seed"], {})[line["method"]] = score(line)
    (low, below), (high, above) = FACTORS.items()
    found = {}
    for place, seeds in sorted(forks.items()):
        slopes = [(by[high] - by[low]) / math.log(above / below) for by in seeds.values() if len(by) == len(FACTORS)]
        if slopes:
            found[place] = statistics.mean(slopes), standard_error(slopes)
    return found


def heard(lines: Sequence[Record]) -> dict[str, list[Heard]]:
    """Signal -> all that it said where there is a truth, in the order of the table."""
    truth = truths(lines)
    found: dict[str, list[Heard]] = {}
    for line in lines:
        for said in line["said"]:
            place = line["exponent"], said["moment"]
            if said["slope"] is not None and place in truth:
                found.setdefault(said["signal"], []).append(Heard(*place, said["slope"], said["error"], said["t"], *truth[place]))
    return {name: found[name] for name in sorted(found, key=lambda name: (SIGNALS.index(name) if name in SIGNALS else len(SIGNALS), name))}


def scatter(said: Sequence[Heard]) -> float | None:
    """Standard deviation over seeds by the mean error, root mean square over starts and moments; None without two seeds, or errors."""
    cells: dict[tuple[int, float], list[Heard]] = {}
    for one in said:
        if one.error:
            cells.setdefault((one.exponent, one.moment), []).append(one)
    ratios = [
        statistics.variance(one.slope for one in cell) / statistics.mean(one.error**2 for one in cell if one.error)
        for cell in cells.values() if len(cell) > 1
    ]  # fmt: skip
    return math.sqrt(statistics.mean(ratios)) if ratios else None


def signal_tables(records: Sequence[Record]) -> str:
    """Markdown: for each problem the truth, and how often each controller knows it."""
    parts = ["# Signal quality\n", "![](signal.png)", CAPTION]
    for problem, lines in of_one_kind(records, RUN).items():
        parts += [f"## {problem}\n", _truth_table(lines), EXPLAINED, _signal_table(lines)]
    return "\n".join(parts)


def _truth_table(lines: Sequence[Record]) -> str:
    truth = truths(lines)

    def cell(exponent: int, moment: float) -> str:
        if (exponent, moment) not in truth:
            return ""
        mean, error = truth[exponent, moment]
        return f"{mean:+.3f} ± {error:.3f}{'' if known(mean, error) else ' ?'}"

    moments = {f"at {percent(moment)} of the run": moment for moment in sorted({moment for _, moment in truth})}
    return crossed("start", {start(e): e for e in sorted({e for e, _ in truth})}, moments, cell)


def _at(moment: float) -> Callable[[Heard], bool]:
    return lambda one: one.moment == moment


def _signal_table(lines: Sequence[Record]) -> str:
    moments = sorted({said["moment"] for line in lines for said in line["said"]})
    columns: dict[str, Callable[[Heard], bool]] = {
        "right": lambda one: True,
        "right where sure": lambda one: one.sure,
        **{f"at {percent(moment)}": _at(moment) for moment in moments},
        "higher is better": lambda one: one.truth < 0,
        "lower is better": lambda one: one.truth > 0,
    }
    rows = []
    for name, said in heard(lines).items():
        rights = [share(one.right for one in said if one.counts and chosen(one)) for chosen in columns.values()]
        ratio = scatter(said)
        off = share(one.off for one in said if one.error) if name in IN_NATS else "-"
        rows.append([name, *rights, "-" if ratio is None else f"{ratio:.1f}", off])
    return table(["signal", *columns, "scatter", "off the truth"], rows)
