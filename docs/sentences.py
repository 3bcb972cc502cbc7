"""Mean sentence length of README.md and of the pages of the site, in words.

    python docs/sentences.py

Code blocks, tables, headings and images are left out; a piece of inline code is one word. A
paragraph or list item ends a sentence. Exit status 1 if README or a page of the sections in `HELD`
has a mean above `LIMIT`. The other pages are printed only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 18.0
HELD = ("Start", "How-to", "Help", "Reference")
"""sections of mkdocs.yml"""


def sentences(text: str) -> list[str]:
    """The sentences of a page's prose."""
    text = re.sub(r"\A---\n.*?\n---\n|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(
        r"^([^\S\n]*)(```|~~~)[^\n]*\n.*?^\1\2[^\S\n]*$", "\n", text, flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(
        r"(?<=\n\n)(    \S.*\n)+(?=\n)", "\n", text, flags=re.MULTILINE
    )  # an indented block
    text = re.sub(r"^[^\S\n]*([|#]|!!!|:::).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)(\{[^}]*\})?", "", text)
    text = re.sub(r"`[^`]+`", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*([-*]|\d+\.)\s+", "\n\n", text, flags=re.MULTILINE)
    parts = [
        re.split(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_\w])", " ".join(block.split()))
        for block in re.split(r"\n\s*\n", text)
    ]
    return [part for block in parts for part in block if re.search(r"\w", part)]


def mean_length(text: str) -> float:
    """Words a sentence; 0 without a sentence."""
    lengths = [len(re.findall(r"[^\s]*\w[^\s]*", sentence)) for sentence in sentences(text)]
    return sum(lengths) / len(lengths) if lengths else 0.0


def pages() -> list[tuple[Path, bool]]:
    """README, then the pages in the order of the navigation; is each held to the limit?"""
    found, section = [(ROOT / "README.md", True)], ""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    for line in nav.splitlines():
        heading, page = re.match(r"  - (.*):$", line), re.search(r"(\S+\.md)$", line)
        section = heading[1] if heading else section
        if page and not page[1].startswith("api/"):
            found.append((ROOT / "docs" / page[1], section in HELD))
    return found


def main() -> int:
    long = 0
    print(f"{'page':24} sentences  words, mean  limit")
    for page, held in pages():
        if not page.exists():  # MkDocs says so
            continue
        text = page.read_text(encoding="utf-8")
        mean = mean_length(text)
        long += held and mean > LIMIT
        mark = "" if not held else "too long" if mean > LIMIT else f"{LIMIT:g}"
        print(
            f"{page.relative_to(ROOT)!s:24} {len(sentences(text)):9d} {mean:12.1f}  {mark}".rstrip()
        )
    return int(long > 0)


if __name__ == "__main__":
    sys.exit(main())
