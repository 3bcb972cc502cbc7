"""The sentences by which an Ensemble is refused or warned of, from the functions that yield them:
docs/hooks.py puts them into errors-constructing.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("hdet/run/compatibility.py", "hdet/replicas/refusals.py")


def messages() -> Iterator[str]:
    """In the order of the sources; … stands for what is put in."""
    for source in SOURCES:
        tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
        yields = [
            node for node in ast.walk(tree) if isinstance(node, ast.Yield)
        ]
        for node in sorted(yields, key=lambda node: node.lineno):
            parts = getattr(node.value, "values", [node.value])
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…"
                for part in parts
            )
            if len(text.split()) > 3:
                yield " ".join(text.split())


def listed() -> str:
    """In Markdown."""
    return "\n".join(f"- `` {message} ``" for message in messages())
