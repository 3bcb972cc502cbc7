"""Variants of kernels are the sources with lines replaced, which must be there; and what a profiler
looks at takes steps in every format."""

from __future__ import annotations

import pytest

from benchmarks import profiled, variants


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_a_variant_differs_where_it_says(name: str) -> None:
    plain, texts = variants.edited([]), variants.edited(variants.VARIANTS[name])
    assert {file for file in texts if texts[file] != plain[file]} == {
        file for file, *_ in variants.VARIANTS[name]
    }
    assert all(new in texts[file] for file, _, new in variants.VARIANTS[name])
    assert "case Rule::adam:" not in texts[variants.CODED], (
        "compiled for all rules, which takes minutes"
    )


def test_a_line_that_is_gone_is_named() -> None:
    with pytest.raises(SystemExit, match="no longer the line 'another'"):
        variants.edited([(variants.CODED, "another", "")])


@pytest.mark.parametrize("mode", ["step", "converge"])
def test_a_format_can_be_profiled(mode: str) -> None:
    of = profiled.FORMATS["8 bits, split"]
    model = profiled.blocks(16).to("cpu", of.dtype)
    call = profiled.prepare(mode, model, 2, of.options)
    call()
    before = [p.detach().clone() for p in model.parameters()]
    call()
    moved = [bool((a != b).any()) for a, b in zip(model.parameters(), before, strict=True)]
    assert sum(moved) > len(moved) / 2, "a step of 1e-4 rounds away beside a bfloat16 of 1"
