"""The rules in Triton, and their optimizers, are what csrc/generate.py prints of hdet/rules."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hdet.rules.trace import Settings, Tensor, mean_of, sum_of, trace

GENERATE = Path(__file__).resolve().parents[2] / "csrc/generate.py"


@pytest.mark.skipif(not GENERATE.exists(), reason="needs hdet's sources")
def test_what_is_committed_is_what_is_printed() -> None:
    spec = importlib.util.spec_from_file_location("hdet_generate", GENERATE)
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, text in generate.texts().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: python csrc/generate.py"


def test_a_sum_of_a_sum_is_refused() -> None:
    """There is one pass before a step."""

    def nested(h: Settings, g: Tensor, p: Tensor) -> tuple[Tensor]:
        centred = g - sum_of(g) * g
        return (g * mean_of(centred),)

    with pytest.raises(ValueError, match="a sum of nested depends on another one"):
        trace(nested, 0)
