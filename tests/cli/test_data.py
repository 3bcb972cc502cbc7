"""The text and its split: nothing of the validation text is in the training text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hdet.cli.job.data import DataError, load_corpus, sample_batch


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def modules(count: int, size: int = 6000) -> dict[str, str]:
    return {f"m{i}.py": f"<{i}>" * (size // len(f"<{i}>")) for i in range(count)}


def marks(text: torch.Tensor) -> set[str]:
    return set(bytes(text.tolist()).decode().replace("\n", "").replace("><", "> <").split())


def test_library_of_this_python_is_split_by_module() -> None:
    corpus = load_corpus()
    assert not corpus.train_modules & corpus.validation_modules
    assert len(corpus.train) > 3_000_000 and len(corpus.validation) > 200_000
    assert "encodings" not in corpus.train_modules | corpus.validation_modules
    again = load_corpus()
    assert torch.equal(corpus.train, again.train) and torch.equal(corpus.validation, again.validation)


def test_no_module_is_on_both_sides(tmp_path: Path) -> None:
    files = modules(30)
    # A module that is a file and a folder, as a library's old and new form may be.
    files |= {f"m{i}/part.py": f"<{i}>" * 500 for i in range(10)}
    corpus = load_corpus(write(tmp_path, files))
    assert not marks(corpus.train) & marks(corpus.validation)
    assert corpus.train_modules | corpus.validation_modules == {f"m{i}" for i in range(30)}


def test_another_module_moves_none_across_the_split(tmp_path: Path) -> None:
    before = load_corpus(write(tmp_path, modules(60)))
    after = load_corpus(write(tmp_path, {"another.py": "<x>" * 2000}))
    assert before.train_modules <= after.train_modules and before.validation_modules <= after.validation_modules


def test_few_modules_still_give_both_sides(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path, modules(2, size=20_000)))
    assert len(corpus.train_modules) == len(corpus.validation_modules) == 1


def test_test_folders_and_other_files_are_left_out(tmp_path: Path) -> None:
    files = modules(20) | {"pkg/tests/t.py": "<skip>" * 5000, "picture.png": "<png>" * 5000, "notes.md": "<md>" * 5000}
    corpus = load_corpus(write(tmp_path, files))
    found = marks(corpus.train) | marks(corpus.validation)
    assert "<md>" in found and not {"<skip>", "<png>"} & found


@pytest.mark.parametrize("case", ["missing", "a file", "empty", "one module"])
def test_unusable_path_is_named_with_the_remedy(tmp_path: Path, case: str) -> None:
    path = tmp_path / "data"
    if case == "a file":
        path.write_text("x" * 100_000)
    elif case != "missing":
        write(path, {} if case == "empty" else {"all.txt": "x" * 100_000})
        path.mkdir(exist_ok=True)
    with pytest.raises(DataError) as caught:
        load_corpus(path)
    assert repr(str(path)) in str(caught.value) and "--data" in str(caught.value)


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


def test_every_window_of_the_text_can_be_drawn() -> None:
    text = torch.arange(18, dtype=torch.uint8)  # two windows of 16 and their targets
    firsts = {int(sample_batch(text, 1, 16, seed=0, stream="s", index=i)[0][0, 0]) for i in range(40)}
    assert firsts == {0, 1}
