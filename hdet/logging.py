"""Where records of cycles go: ``Ensemble(..., log=hdet.logging.TensorBoard(writer))``, or ``WandB(run)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["TensorBoard", "WandB", "scalars"]


def scalars(record: Mapping[str, Any], prefix: str = "hdet/") -> dict[str, float]:
    """The numbers of a record (`Ensemble.history`), by its own keys: ``hdet/values/lr``, ``hdet/losses/0`` (replica 0), ``hdet/converge_ms``.
    ``left_out`` is how many replicas were. What is None, text, or there for `hdet.replay` alone is missing."""
    told = {key: len(value) if key == "left_out" else value for key, value in record.items() if key not in ("record", "step")}
    return dict(_numbers(told, prefix.rstrip("/")))


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _numbers(item, f"{name}/{number}")
    elif isinstance(value, (bool, int, float)):
        yield name, float(value)


class TensorBoard:
    """A cycle's numbers as scalars at its step, its notes as text.

    Args:
        writer: a ``SummaryWriter`` of torch.utils.tensorboard or tensorboardX: its ``add_scalar`` and ``add_text`` are called.
        prefix: of all names.

    Raises:
        TypeError: no such writer.
    """

    def __init__(self, writer: Any, prefix: str = "hdet/") -> None:
        _check(writer, "writer", "a SummaryWriter", "add_scalar", "add_text")
        self.writer, self.prefix = writer, prefix

    def __call__(self, record: Mapping[str, Any], step: int) -> None:
        for name, value in scalars(record, self.prefix).items():
            self.writer.add_scalar(name, value, step)
        for note in record["notes"]:
            self.writer.add_text(f"{self.prefix.rstrip('/')}/notes", note, step)


class WandB:
    """A cycle's numbers in a run of Weights & Biases. They have an axis of their own, ``hdet/step``, so that they need not agree with the
    steps in which the loop logs.

    Args:
        run: what ``wandb.init()`` returns: its ``log`` and ``define_metric`` are called.
        prefix: of all names.

    Raises:
        TypeError: no such run.
    """

    def __init__(self, run: Any, prefix: str = "hdet/") -> None:
        _check(run, "run", "what wandb.init() returns", "log", "define_metric")
        self.run, self.prefix = run, prefix
        self.step = f"{prefix.rstrip('/')}/step"
        run.define_metric(self.step)
        run.define_metric(f"{prefix.rstrip('/')}/*", step_metric=self.step)

    def __call__(self, record: Mapping[str, Any], step: int) -> None:
        notes = {f"{self.prefix.rstrip('/')}/notes": "; ".join(record["notes"])} if record["notes"] else {}
        self.run.log({self.step: step, **scalars(record, self.prefix), **notes})


def _check(given: Any, name: str, what: str, *methods: str) -> None:
    if not all(callable(getattr(given, method, None)) for method in methods):
        raise TypeError(f"{name} must be {what}, with {' and '.join(methods)}, got {type(given).__name__}")
