"""A report's page in a browser. HDET_PICTURE=docs/report.png draws the tutorial's picture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hdet.cli.main import main
from tests.cli.common import write_run

from .browser import CHROMIUM, TOO_WIDE, Browser
from .test_pages import ROOT, blocks
from .toys import run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
LOADED = "[...document.images].filter(one => one.checkVisibility() && one.naturalWidth > 0).length"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tutorial's program, as it stands there, with a log."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    history = f"hdet.logging.History({str(folder / 'history.jsonl')!r})"
    search = "search=hdet.AutoLR(model),"
    source = blocks(ROOT / "docs" / "tutorial" / "one-gpu.md")[1].source
    assert search in source
    run(source.replace(search, f"{search} log={history}"), "one-gpu.md")
    assert main(["report", str(folder), "--html", str(folder / "page.html")]) == 0
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with closing(Browser()) as one:
        yield one


@pytest.mark.parametrize("width", [1400, 400])
def test_the_page_fits(page: Path, browser: Browser, width: int) -> None:
    browser.open(page, width)
    assert browser.value("document.querySelector('.found').innerText").startswith("Learning rate: ")
    assert browser.value(LOADED) == 3, "the trial, the losses and the rate"
    texts = browser.value("[...document.images].map(one => one.alt)")
    assert len({*texts}) == 3 and "at 1e-05" in texts[0]
    assert "good rates for 1000 steps" in browser.value("document.body.innerText")
    assert browser.value("document.images[0].getBoundingClientRect().bottom") < 900, "too far down"
    assert browser.value(TOO_WIDE) == []
    browser.value("document.querySelector('details').open = true")
    assert browser.value(TOO_WIDE) == []


def test_long_names_of_several_runs_fit(tmp_path: Path, browser: Browser) -> None:
    for name in ("with", "x" * 99):
        write_run(tmp_path / name)
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    browser.open(tmp_path / "page.html", 400)
    browser.value("document.querySelector('details').open = true")
    assert browser.value(LOADED) == 6 and browser.value(TOO_WIDE) == []


def test_the_tutorials_picture(page: Path, browser: Browser) -> None:
    browser.open(page, 1100)
    picture = browser.picture()
    if target := os.environ.get("HDET_PICTURE"):
        Path(target).write_bytes(picture)
    assert len(picture) < 150_000
    assert (ROOT / "docs" / "report.png").stat().st_size < 150_000
