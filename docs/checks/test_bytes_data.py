"""The text of examples.bytes and its split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from examples.bytes.data import load_corpus, sample_batch


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def modules(count: int) -> dict[str, str]:
    return {f"m{i}.py": f"<{i}>" * (6000 // len(f"<{i}>")) for i in range(count)}


def marks(text: torch.Tensor) -> set[str]:
    return set(bytes(text.tolist()).decode().replace("\n", "").replace("><", "> <").split())


def test_no_module_is_on_both_sides_and_another_one_moves_none(tmp_path: Path) -> None:
    # A module may be a file and a folder.
    files = modules(60) | {f"m{i}/part.py": f"<{i}>" * 500 for i in range(10)}
    files |= {"pkg/tests/t.py": "<skip>" * 5000, "a.png": "<png>" * 5000, "n.md": "<md>" * 5000}
    before = load_corpus(write(tmp_path, files))
    after = load_corpus(write(tmp_path, {"another.py": "<x>" * 2000}))
    sides = [marks(before.train), marks(before.validation)]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == {*(f"<{i}>" for i in range(60)), "<md>"}
    assert sides[0] <= marks(after.train) and sides[1] <= marks(after.validation)


@pytest.mark.parametrize("files", [None, {}, {"all.txt": "x" * 100_000}])
def test_too_little_text_is_refused(tmp_path: Path, files: dict[str, str] | None) -> None:
    path = tmp_path / "data" if files is None else write(tmp_path, files)
    with pytest.raises(ValueError, match=f"^--data '{path}' "):
        load_corpus(path)


def test_batches_are_a_function_of_seed_stream_and_index() -> None:
    text = torch.arange(251, dtype=torch.uint8)
    arguments = {"seed": 3, "stream": "train/1", "index": 7}
    state = torch.get_rng_state()
    tokens, targets = sample_batch(text, 5, 16, **arguments)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    assert tokens.shape == targets.shape == (5, 16) and tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1]) and torch.equal(tokens + 1, targets)
    again, _ = sample_batch(text, 5, 16, **arguments)  # type: ignore[arg-type]
    assert torch.equal(tokens, again)
    for change in ({"seed": 4}, {"stream": "train/2"}, {"index": 8}):
        other, _ = sample_batch(text, 5, 16, **{**arguments, **change})  # type: ignore[arg-type]
        assert not torch.equal(tokens, other)
