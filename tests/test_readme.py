"""README: short, and its quickstart finds a rate."""

from __future__ import annotations

from pathlib import Path

import torch

from .docs_toys import batches, run
from .test_docs import blocks

README = Path(__file__).parents[1] / "README.md"


def test_it_can_be_read_in_five_minutes() -> None:
    assert len(README.read_text(encoding="utf-8").split()) < 900


def test_the_quickstart_has_ten_lines_and_raises_a_rate_that_is_far_too_low() -> None:
    quickstart = next(block for block in blocks(README) if "AutoLR" in block.source)
    assert len([line for line in quickstart.source.splitlines() if line.strip()]) <= 10
    torch.manual_seed(0)
    ensemble = run(quickstart.source, "README.md", model=torch.nn.Linear(4, 1), loader=batches(400, 0))["ensemble"]
    assert ensemble.corrections["lr"] > 1
