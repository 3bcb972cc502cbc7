"""`python -m benchmarks.scaling`: what it prints, what it refuses, and that docs/scaling.md shows
nothing else."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.scaling import main

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
BLOCKS = re.findall(
    r"```text\n\$ python -m benchmarks\.scaling ([^\n]*)\n(.*?)```",
    PAGE.read_text(encoding="utf-8"),
    flags=re.DOTALL,
)


@pytest.mark.parametrize(("command", "shown"), BLOCKS)
def test_the_page_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], command: str, shown: str
) -> None:
    main(shlex.split(command))
    assert capsys.readouterr().out == shown


def test_the_page_has_its_tables() -> None:
    assert len(BLOCKS) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interval", "100"], "the following arguments are required: --parameters"),
        (["--parameters", "1.5"], "'1.5' is not a whole number such as 1024 or 70e9"),
        (["--parameters", "0"], "parameters is 0: it must be a positive number"),
        (["--parameters", "1e9", "--replicas", "1"], "nobody to be averaged with"),
        (["--parameters", "1e9", "--bandwidth", "0"], "a link of 0.0 bytes a second"),
        (["--parameters", "1e9", "--interval", "2"], "it must be at least fragments (4)"),
    ],
)
def test_costs_refuse(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err.splitlines()[-1]
