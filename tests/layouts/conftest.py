"""`pytest tests/layouts/test_golden.py --write-golden` writes the golden trajectories again."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write tests/layouts/golden/*.json from this machine's runs")
