"""A controller in the shadow decides, is recorded, and touches nothing: the run is bitwise the one without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdet
from tests.controllers.runs import Run
from tests.controllers.test_replay import MAKES

SHOWN = [name for name in MAKES if "shadow" not in name and "taken back" not in name]


@pytest.mark.parametrize("name", SHOWN)
def test_the_run_is_bitwise_the_one_without_it(name: str) -> None:
    make, settings = MAKES[name]
    plain: dict[str, Any] = {**settings, "steps": 120}
    ours = Run(lambda model: hdet.Shadow(make(model)), **plain).train()
    alone = Run(lambda model: None, **plain).train()
    assert all(map(torch.equal, ours.weights(), alone.weights())) and ours.losses == alone.losses
    assert ours.ensemble.values() == alone.ensemble.values() and ours.ensemble.corrections == {"lr": 1.0}
    assert [record["cycle"] for record in ours.history] == [record["cycle"] for record in alone.history]
    assert all(record["record"]["end"] is None for record in ours.history)
    assert not ours.ensemble.sweeping


def test_what_it_would_have_decided_is_in_the_record() -> None:
    make, settings = MAKES["probe"]
    run = Run(lambda model: hdet.Shadow(make(model)), **settings).train()
    notes = [note for record in run.history for note in record["notes"] if "would move the value: times" in note]
    assert notes and any(record["slopes"]["lr"] is not None for record in run.history)
    shadow = run.controller
    assert isinstance(shadow, hdet.Shadow) and len(shadow.decisions) == 1


def test_a_shadow_of_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a controller"):
        hdet.Shadow(None)  # type: ignore[arg-type]
