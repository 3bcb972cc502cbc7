"""Variants of kernels are the sources with lines replaced, which must be there."""

from __future__ import annotations

import pytest

from benchmarks import variants


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
