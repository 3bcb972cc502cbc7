"""A controller in the shadow decides, is recorded, and touches nothing: the run is bitwise the one without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdet

from .runs import run
from .test_replay import MAKES

SHOWN = [name for name in MAKES if "shadow" not in name and "taken back" not in name]


@pytest.mark.parametrize("name", SHOWN)
def test_the_run_is_bitwise_the_one_without_it(name: str) -> None:
    make, settings = MAKES[name]
    plain: dict[str, Any] = {**settings, "total": settings.get("total", 120)}  # trials have to know a long run
    ours = run(lambda model: hdet.Shadow(make(model)), **plain)
    alone = run(lambda model: None, **plain)
    assert [float(ours.step()) for _ in range(120)] == [float(alone.step()) for _ in range(120)]
    assert all(map(torch.equal, ours.all_weights(), alone.all_weights()))
    assert ours.ensemble.values() == alone.ensemble.values() and ours.ensemble.corrections == {"lr": 1.0}
    assert [record["cycle"] for record in ours.records] == [record["cycle"] for record in alone.records]
    assert all(record["record"]["end"] is None for record in ours.records)


def test_what_it_would_have_decided_is_in_the_record() -> None:
    make, settings = MAKES["probe"]
    ran = run(lambda model: hdet.Shadow(make(model)), **settings).steps()
    notes = [note for note in ran.notes() if "would move the value: times" in note]
    assert notes and any(record["slopes"]["lr"] is not None for record in ran.records)
    shadow = ran.controller
    assert isinstance(shadow, hdet.Shadow) and len(shadow.decisions) == 1


def test_a_shadow_of_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a controller"):
        hdet.Shadow(None)
