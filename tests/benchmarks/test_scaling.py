"""`python -m benchmarks.scaling`: what it prints, what it refuses, and that docs/scaling.md shows
nothing else."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.scaling.__main__ import main

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
BLOCKS = re.findall(
    r"```text\n\$ python -m benchmarks\.scaling ([^\n]*)\n(.*?)```",
    PAGE.read_text(encoding="utf-8"),
    flags=re.DOTALL,
)
ISSUE = ["--replicas", "1024", "--parameters", "70e9", "--interval", "1000", "--bandwidth", "45e9"]


@pytest.mark.parametrize(("command", "shown"), BLOCKS)
def test_the_page_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], command: str, shown: str
) -> None:
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


def test_the_page_has_its_tables() -> None:
    assert len(BLOCKS) == 1


def test_json_has_the_numbers_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ISSUE, "--shards", "64", "--latency", "0", "--chunks", "0", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["job"]["parameters"] == 70 * 10**9 and record["job"]["across"] == {
        "bandwidth": 45e9,
        "latency": 0.0,
    }
    plain = record["ways"][0]
    assert plain["name"] == "plain" and plain["seconds"] == pytest.approx(
        2 * 1023 / 1024 * 4 * 70e9 / 64 / 45e9
    )
    assert record["statistics"]["size"] == 24_576 and record["statistics_with_probe"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interval", "100"], "the following arguments are required: --parameters"),
        (["--parameters", "1.5"], "'1.5' is not a whole number such as 1024 or 70e9"),
        (["--parameters", "inf"], "'inf' is not a whole number"),
        (["--parameters", "many"], "'many' is not a whole number"),
        (["--parameters", "0"], "parameters is 0: it must be a whole number, at least 1"),
        (["--parameters", "1e9", "--replicas", "1"], "nobody to be averaged with"),
        (["--parameters", "1e9", "--shards", "0"], "shards is 0"),
        (["--parameters", "1e9", "--bandwidth", "0"], "between nodes: bandwidth is 0.0"),
        (["--parameters", "1e9", "--latency-inside", "nan"], "inside a node: latency is nan"),
        (
            ["--parameters", "1e9", "--bandwidth", "fast"],
            "--bandwidth: invalid float value: 'fast'",
        ),
        (
            ["--parameters", "1e9", "--interval", "2"],
            "interval is 2: it must be at least fragments (4)",
        ),
        (["--parameters", "1e9", "--step-seconds", "0"], "step_seconds is 0.0"),
        (["--parameters", "1e9", "--knobs", "0"], "knobs is 0"),
        (["--parameters", "1e9", "--chunks=-1"], "chunks is -1"),
    ],
)
def test_costs_refuse(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as refused:  # argparse's own
        code = refused.code
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert message in err.splitlines()[-1]
