"""MkDocs' build looks at the README too: its links into docs/ must lead somewhere, anchors
included."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]


def on_post_build(config: Any) -> None:
    """Raises PluginError for a link of README.md whose file, page or anchor is not there."""
    site, broken = Path(config["site_dir"]), []
    for target in re.findall(
        r"\]\((?!https?:)([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")
    ):
        path, _, anchor = target.partition("#")
        page = (
            site / Path(path).relative_to("docs").with_suffix(".html")
            if path.startswith("docs/") and path.endswith(".md")
            else None
        )
        there = (ROOT / path).exists() and (page is None or page.exists())
        if not there or (
            anchor and (page is None or f'id="{anchor}"' not in page.read_text(encoding="utf-8"))
        ):
            broken.append(target)
    if broken:
        raise PluginError(f"README.md links to what is not there: {', '.join(broken)}")
