"""What controller auto has found in a run's first steps: losses over rates, and a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import mean

from hdet.cli.charts import Point, Series, figure, linear, log, number, safe, table
from hdet.trial.rule import TIE, RateInterval

__all__ = ["in_words", "trial_figure"]


def trial_figure(interval: RateInterval, colour: str, when: str = "") -> str:
    """Of the run's own first steps, which have no losses, a sentence alone."""
    trial, says = interval.trial, " ".join(in_words(interval))
    arms = [arm for arm in trial.arms if arm.losses]
    if not trial.first_losses or not arms:
        return f"<h3>The first steps{when}</h3><p>{safe(says)}</p>"
    before, rates = mean(trial.first_losses), [arm.rate for arm in trial.arms]
    bars = [(a.rate, a.loss - TIE * a.error, a.loss + TIE * a.error) for a in arms]
    best = min(arm.loss for arm in arms)
    top = max(before, best) + abs(before - best)  # an arm far above would flatten the others
    framed = [value for _, low, high in bars for value in (low, high) if value <= top]
    above = [f"{arm.rate:.2g}" for arm in arms if arm.loss > top]
    says += f" Above the frame: the loss at {', '.join(above)}." if above else ""

    def at(*places: float) -> list[Point]:
        return [(place, None, None) for place in places]

    good = f"good rates for {number(interval.total_steps)} steps"
    series = [
        Series(good, colour, at(interval.low, interval.high), "span"),
        Series("three standard errors", colour, bars, "bars", told=False),
        Series("loss after the trial", colour, [(a.rate, a.loss, a.loss) for a in arms], "dots"),
        Series("before training", "ink", [(rate, before, before) for rate in rates], "dotted"),
        Series(f"yours: {number(interval.rate)}", "ink", at(interval.rate), "marks"),
    ]
    if interval.moves:
        now = f"now: {number(interval.suggestion)}"
        series.append(Series(now, colour, at(interval.suggestion), "marks"))
    rows = [
        (a.rate, a.loss if a.losses else "-", a.error if a.losses else "-", a.displacement or "-")
        for a in trial.arms
    ]  # fmt: skip
    heads = ["rate", "loss", "standard error", "weights moved by"]
    across = log([min(rates) / 2, 2 * max(rates), interval.suggestion], "rate")
    return figure(
        f"Loss over rate{when}", says, series, linear([*framed, before]), across,
        "nats per byte ± three standard errors", table("Losses after the trial", heads, rows),
    )  # fmt: skip


def in_words(interval: RateInterval) -> Iterator[str]:
    """Sentences."""
    trial, rate = interval.trial, f"{interval.rate:.2g}"
    arms = [arm for arm in trial.arms if arm.losses]
    if len(trial.arms) == 1 and not arms:
        moved, of = trial.arms[0].displacement, "of their size, counted at the rates of a trial"
        how = "no matrix" if moved is None else f"the weights by {moved:.2g} {of}"
        yield f"The first {number(trial.steps)} steps, without a trial, moved {how}."
    if interval.moves:
        yield f"Your rate, {rate}, {interval.reason}: it went to {interval.suggestion:.2g}."
    else:
        followed = " What followed is among the events." * trial.broke
        yield f"Your rate, {rate}: {interval.reason}.{followed}"
    ends = [f"from {interval.low:.2g}"] * bool(interval.low)
    ends += [f"up to {interval.high:.2g}"] * math.isfinite(interval.high)
    good = [f"Good rates for {number(interval.total_steps)} steps: {' '.join(ends)}"] * bool(ends)
    good += ["no lower rate was ruled out"] * (not interval.low)
    good += ["no higher rate was ruled out"] * (not math.isfinite(interval.high))
    yield "; ".join(good).capitalize() + "."
    if trial.first_losses and arms:
        best = min(arms, key=lambda arm: arm.loss)
        if not trial.has_learned:
            yield "No rate has learned anything: only how far the weights moved counts."
        elif all(arm.loss <= best.loss + TIE * best.error for arm in trial.arms):
            yield "All rates tied."
    gone = [f"{arm.rate:.2g}" for arm in trial.arms if not arm.losses]
    if gone and len(trial.arms) > 1:
        yield f"Broke, or stopped for being far behind: {', '.join(gone)}."
