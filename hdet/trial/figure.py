"""The figure that explains an interval: losses after the trial over rates."""

from __future__ import annotations

from statistics import mean
from typing import Any

__all__ = ["draw_interval"]


def draw_interval(interval: Any, errors: float, axes: Any = None) -> Any:
    """See `RateInterval.plot`. ``errors``: standard errors that a bar shows."""
    if axes is None:
        from matplotlib import pyplot

        axes = pyplot.figure(figsize=(6, 3.5), layout="constrained").subplots()
    rates = [arm.rate for arm in interval.trial.arms]
    scored = [arm for arm in interval.trial.arms if arm.losses]
    axes.errorbar(
        [arm.rate for arm in scored], [arm.loss for arm in scored],
        [errors * arm.error for arm in scored], marker="o", capsize=3, label="loss after the trial",
    )  # fmt: skip
    if interval.trial.first_losses:
        axes.axhline(mean(interval.trial.first_losses), ls=":", c="grey", label="before training")
    low, high = max(interval.low, min(rates) / 4), min(interval.high, max(rates) * 4)
    label = f"good rates for {interval.total_steps} steps"
    axes.axvspan(low, high, alpha=0.15, color="green", label=label)
    axes.axvline(interval.rate, color="grey", label=f"yours: {interval.rate:.2g}")
    if interval.moves:
        axes.axvline(interval.suggestion, color="tab:red", label=f"now: {interval.suggestion:.2g}")
    axes.set(xscale="log", xlabel="peak learning rate", ylabel="loss")
    axes.legend(fontsize="small")
    return axes
