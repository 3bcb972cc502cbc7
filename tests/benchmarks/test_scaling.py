"""`python -m benchmarks.scaling`: docs/scaling.md shows what it prints; what it refuses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.scaling import main

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
BLOCK = re.compile(r"```text\n\$ python -m benchmarks\.scaling ([^\n]*)\n(.*?)```", re.DOTALL)


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    [(command, shown)] = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    main(shlex.split(command))
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(("arguments", "message"), [
    ("--interval 100", "the following arguments are required: --parameters"),
    ("--parameters 1.5", "'1.5' is not a whole number such as 1024 or 70e9"),
    ("--parameters 0", "parameters is 0: it must be a positive number"),
    ("--parameters 1e9 --replicas 1", "nobody to be averaged with"),
    ("--parameters 1e9 --bandwidth 0", "a link of 0.0 bytes a second"),
])  # fmt: skip
def test_costs_refuse(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    assert message in capsys.readouterr().err.splitlines()[-1]
