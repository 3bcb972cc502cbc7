"""Records of cycles in TensorBoard and in Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.testing.adapters import Halved
from tests.harness import Run, TwoReplicas

from .frameworks import needs


def records(*logs: Any) -> list[dict[str, Any]]:
    """Two cycles, which are logged."""
    run = Run(total=10, controller=Halved(), replicas=TwoReplicas(), log=lambda *_: None)
    run.steps()
    kept = run.ensemble.history
    for record in kept:
        for log in logs:
            log(record, record["step"])
    return list(kept)


def expected(record: dict[str, Any]) -> dict[str, float]:
    """Written out by hand."""
    found = {f"hdet/losses/{r}": loss for r, loss in enumerate(record["losses"])}
    for r, rho in enumerate(record["multipliers"]["lr"]):
        found[f"hdet/multipliers/lr/{r}"] = rho
    for key in ("values", "scheduled", "corrections"):
        found[f"hdet/{key}/lr"] = record[key]["lr"]
    alone = ("cycle", "rolled_back", "rollbacks", "diverged_total", "converge_ms", "probe_ms")
    alone += ("trial_steps", "trial_ms")
    found |= {f"hdet/{key}": record[key] for key in alone}
    return {**found, "hdet/left_out": 0, "hdet/searching": 0}


def test_of_a_trial_four_numbers_are_series() -> None:
    trial = {"rate": 0.1, "low": 0.0, "high": 0.2, "suggestion": 0.1}
    series = hdet.logging.scalars({"trial": {**trial, "total_steps": 9, "trial": {"arms": [1.0]}}})
    assert series == {f"hdet/trial/{key}": value for key, value in trial.items()}


class Writer:
    """TensorBoard's, or a run of W&B."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.items()))


def test_scalars_and_notes_come_at_the_step_under_the_records_own_keys() -> None:
    board, run = Writer(), Writer()
    first, second = records(hdet.logging.TensorBoard(board), hdet.logging.WandB(run))
    both = [(expected(first), 5), (expected(second), 10)]
    scalars = [("add_scalar", *pair, step) for values, step in both for pair in values.items()]
    note = "lr: halved"
    assert sorted(board.calls) == sorted([*scalars, ("add_text", "hdet/notes", note, 5)])
    assert run.calls == [
        ("define_metric", "hdet/step"),
        ("define_metric", "hdet/*", ("step_metric", "hdet/step")),
        ("log", {"hdet/step": 5, **both[0][0], "hdet/notes": note}),
        ("log", {"hdet/step": 10, **both[1][0]}),
    ]
    found = hdet.logging.scalars(first)
    assert len(found) == 17 and all(isinstance(value, float) for value in found.values())
    others = {"notes": ["x"], "t": {"lr": None}, "record": {"a": 1}, "step": 5, "probe": [0.5]}
    assert hdet.logging.scalars(others, "mine") == {"mine/probe/0": 0.5}


@pytest.mark.parametrize("kind", [hdet.logging.TensorBoard, hdet.logging.WandB])
def test_what_is_no_writer_is_refused_at_once(kind: Any) -> None:
    with pytest.raises(AttributeError):
        kind("runs/first")


def test_the_real_tensorboard_reads_them_back(tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    first, second = records(hdet.logging.TensorBoard(writer))
    writer.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert set(found.Tags()["scalars"]) == set(expected(first))
    lines = [(line.step, line.value) for line in found.Scalars("hdet/values/lr")]
    values = [(step, of["values"]["lr"]) for step, of in ((5, first), (10, second))]
    assert lines == [(step, pytest.approx(value, abs=1e-9)) for step, value in values]
    assert [line.step for line in found.Tensors("hdet/notes/text_summary")] == [5]


def test_the_real_wandb_takes_them_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb")
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="hdet", dir=str(tmp_path))
    try:
        run.log({"loss": 1.0}, step=100)  # the loop is ahead: its steps are its own
        _, second = records(hdet.logging.WandB(run))
        wanted = {**expected(second), "hdet/step": 10}
        assert {name: run.summary[name] for name in wanted} == wanted
    finally:
        run.finish()
