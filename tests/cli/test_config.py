"""Settings are refused before a process is started, by name, with value and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from hdet.cli.job.config import TrainConfig


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("max_lr", 0.0, "positive"),
        ("max_lr", float("nan"), "finite"),
        ("max_lr", float("inf"), "finite"),
        ("max_lr", "3e-4", "number"),
        ("steps", 1, "at least 2"),
        ("steps", 2.5, "whole number"),
        ("steps", True, "whole number"),
        ("replicas", 0, "at least 1"),
        ("replicas", 1, "controller none"),
        ("spread", 1.0, "[0, 1)"),
        ("spread", -0.1, "[0, 1)"),
        ("spread", 0.0, "controller none or auto"),
        ("sync_interval", 0, "at least 1"),
        ("sync_interval", 2001, "steps"),
        ("pct_start", 1.0, "between 0 and 1"),
        ("controller", "greedy", "probe, auto, softmax, none"),
        ("device", "tpu", "auto, cpu, cuda"),
        ("mode", "both", "hdet, fixed"),
        ("width", 66, "multiple of heads"),
        ("probe_batches", 1, "at least 2"),
        ("checkpoint_interval", 75, "multiple of sync_interval"),
        ("validation_interval", 0, "multiple of sync_interval"),
        ("weight_decay", -1.0, "negative"),
        ("seed", -1, "negative"),
        ("context", 0, "at least 1"),
        ("data", 7, "text"),
        ("coresident", 1, "true or false"),
    ],
)
def test_refusals_name_setting_value_and_remedy(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(ValueError) as caught:
        TrainConfig(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} is {value!r}: ") and remedy in message


def test_what_a_controller_needs_is_not_asked_of_runs_without_one() -> None:
    assert TrainConfig(mode="fixed", replicas=1).replicas == 1
    for controller in ("none", "auto"):
        assert TrainConfig(controller=controller, replicas=1, spread=0.0).spread == 0.0
    assert TrainConfig(mode="fixed", coresident=True, controller="auto").processes == 1


def test_settings_survive_a_file_and_unknown_ones_are_refused() -> None:
    config = TrainConfig(steps=77, sync_interval=7, data="somewhere")
    assert TrainConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="unknown setting 'momentum'"):
        TrainConfig.from_dict({"momentum": 0.9})


@pytest.mark.parametrize(("steps", "interval"), [(2000, 50), (24, 4), (40, 7), (5, 5), (2, 1)])
def test_validations_and_checkpoints_fall_on_ends_of_cycles(steps: int, interval: int) -> None:
    config = TrainConfig(steps=steps, sync_interval=interval)
    ends = {step for step in range(1, steps + 1) if config.ends_cycle(step)}
    assert len(ends) == config.cycles and steps in ends
    for due in (config.validates_at, config.saves_at):
        assert {step for step in range(1, steps + 1) if due(step)} <= ends
    assert config.saves_at(steps)
