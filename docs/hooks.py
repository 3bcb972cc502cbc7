"""What the site's build does beside MkDocs: the version in the header, figures such
as 10 000 on one line, the messages of refusals, and a look at README's links into
docs/, which must lead somewhere, anchors included."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docs.messages import listed

ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> Any:
    text = (ROOT / "hdet" / "__init__.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "(.*)"', text, re.MULTILINE)
    config["site_name"] = f"hdet {version}"
    return config


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = readme.replace("](docs/", "](")
    readme = readme.replace("](CONTRIBUTING.md)", "](design.md)")
    markdown = markdown.replace("<!-- README -->", readme)
    return markdown.replace("<!-- messages -->", listed())


def on_page_content(html: str, **kwargs: Any) -> str:
    """With spaces that do not break inside of numbers and before %; code is left
    alone."""
    parts = re.split(r"(<pre.*?</pre>|<[^>]*>)", html, flags=re.DOTALL)
    parts[::2] = [
        re.sub(r"(?<=\d) (?=\d{3}\b|%)", "\u00a0", part) for part in parts[::2]
    ]
    return "".join(parts)
