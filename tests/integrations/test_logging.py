"""Records of cycles in TensorBoard and in Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hdet
from tests.harness import Run, TwoReplicas

from .frameworks import Halved, needs


def records(log: Any) -> list[dict[str, Any]]:
    """Two cycles, which are logged."""
    kept: list[dict[str, Any]] = []
    run = Run(
        total=10,
        controller=Halved(),
        replicas=TwoReplicas(),
        log=lambda record, step: (kept.append(record), log(record, step)),
    )
    run.steps()
    return kept


def expected(record: dict[str, Any]) -> dict[str, float]:
    """Written out by hand."""
    found = {f"hdet/losses/{r}": loss for r, loss in enumerate(record["losses"])}
    for r, rho in enumerate(record["multipliers"]["lr"]):
        found[f"hdet/multipliers/lr/{r}"] = rho
    for key in ("values", "scheduled", "corrections"):
        found[f"hdet/{key}/lr"] = record[key]["lr"]
    alone = ("cycle", "rolled_back", "rollbacks", "diverged_total", "converge_ms", "probe_ms")
    alone += ("trial_steps",)
    found |= {f"hdet/{key}": record[key] for key in alone}
    return {**found, "hdet/left_out": 0, "hdet/searching": 0}


def test_a_records_numbers_have_its_own_keys() -> None:
    for record in records(lambda record, step: None):
        found = hdet.logging.scalars(record)
        assert found == expected(record) and len(found) == 16
        assert all(isinstance(value, float) for value in found.values())
    others = {"notes": ["x"], "t": {"lr": None}, "record": {"a": 1}, "step": 5, "probe": [0.5]}
    assert hdet.logging.scalars(others, "mine") == {"mine/probe/0": 0.5}


class Writer:
    """TensorBoard's, or a run of W&B."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.items()))


def test_a_tensorboard_writer_gets_scalars_and_notes_at_the_step() -> None:
    writer = Writer()
    first, second = records(hdet.logging.TensorBoard(writer))
    scalars = [
        ("add_scalar", name, value, step)
        for record, step in ((first, 5), (second, 10))
        for name, value in expected(record).items()
    ]
    assert sorted(call for call in writer.calls if call[0] == "add_scalar") == sorted(scalars)
    assert [call for call in writer.calls if call[0] == "add_text"] == [
        ("add_text", "hdet/notes", "lr: halved", 5)
    ]


def test_a_run_of_wandb_gets_them_on_an_axis_of_their_own() -> None:
    run = Writer()
    first, second = records(hdet.logging.WandB(run))
    assert run.calls[:2] == [
        ("define_metric", "hdet/step"),
        ("define_metric", "hdet/*", ("step_metric", "hdet/step")),
    ]
    assert run.calls[2:] == [
        ("log", {"hdet/step": 5, **expected(first), "hdet/notes": "lr: halved"}),
        ("log", {"hdet/step": 10, **expected(second)}),
    ]


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
    assert lines == [
        (5, pytest.approx(first["values"]["lr"])),
        (10, pytest.approx(second["values"]["lr"], abs=1e-9)),
    ]
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
        assert {name: run.summary[name] for name in expected(second)} == expected(
            second
        ) and run.summary["hdet/step"] == 10
    finally:
        run.finish()
