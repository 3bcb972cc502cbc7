"""Long sentences, and words that the documents do not use.

    python docs/prose.py

Reads README.md, CONTRIBUTING.md, CHANGELOG.md, the pages of docs/, and the
docstrings and messages of hdet/. Exit status 1 if a page's mean sentence has
more than `LIMIT` words, or if one of `WORDS` stands on a page outside of code,
or in a text of hdet/. (Neither vale nor proselint does this
offline with a list of one's own.)
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 16.0
WORDS = {
    "to the bit": "bitwise",
    "bit for bit": "bitwise",
    "in force": "in use",
    "honest": "valid, without",
    "judge[sd]?": "held-out loss, decide",
    "anew": "again",
    "come again": "several epochs",
    "examples that come": "several epochs",
    "is told": "is given, is recorded",
    "of before": "former",
    "take[ns]? back": "rolled back, restored",
    "what is missing of": "gap",
    "travels?": "is sent",
    "rooms?": "package",
    "not any ?more": "no longer",
    "have parted": "differ",
    "beside the run": "a trial",
    "utili[sz]e": "use",
    "simply": "",
    "blazing(ly)?": "",
}
"""Regular expressions, and what to write instead."""


def prose(text: str) -> str:
    """Without code blocks, comments, images and targets of links; inline code is
    one word."""
    text = re.sub(r"\A---\n.*?\n---\n|<!--.*?-->", "", text, flags=re.DOTALL)
    fence = re.compile(
        r"^([^\S\n]*)(```|~~~)[^\n]*\n.*?^\1\2[^\S\n]*$",
        re.DOTALL | re.MULTILINE,
    )
    text = fence.sub("\n", text)
    text = re.sub(
        r"(?<=\n\n)(    \S.*\n)+(?=\n)", "\n", text, flags=re.MULTILINE
    )  # indented
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)(\{[^}]*\})?", "", text)
    text = re.sub(r"``? ?.+?``?", "code", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> list[str]:
    """Those of paragraphs and list items: no tables, headings, admonitions."""
    text = re.sub(
        r"^[^\S\n]*([|#<]|!!!|:::|--8<--).*$",
        "\n",
        prose(text),
        flags=re.MULTILINE,
    )
    text = re.sub(r"^\s*([-*]|\d+\.)\s+", "\n\n", text, flags=re.MULTILINE)
    parts = [
        re.split(
            r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_\w])", " ".join(block.split())
        )
        for block in re.split(r"\n\s*\n", text)
    ]
    return [part for block in parts for part in block if re.search(r"\w", part)]


def mean_length(text: str) -> float:
    """Words a sentence; 0 without a sentence."""
    lengths = [
        len(re.findall(r"[^\s]*\w[^\s]*", sentence))
        for sentence in sentences(text)
    ]
    return sum(lengths) / len(lengths) if lengths else 0.0


def texts(source: str) -> str:
    """The docstrings and messages of a module: its strings of several words."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\n\n".join(" ".join(s.split()) for s in strings if " " in s)


def unwanted(text: str) -> list[str]:
    """Words that stand in the text, with what to write instead."""
    found = []
    for word, instead in WORDS.items():
        if match := re.search(rf"\b{word}\b", prose(text), re.IGNORECASE):
            found.append(
                f"{match[0]!r}"
                + (f": write {instead}" if instead else ": leave it out")
            )
    return found


def main() -> int:
    faults = 0
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    for page in [
        *(ROOT / name for name in names),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]:
        text = page.read_text(encoding="utf-8")
        mean, words = mean_length(text), unwanted(text)
        long = (
            [f"sentences of {mean:.1f} words, limit {LIMIT:g}"]
            if mean > LIMIT
            else []
        )
        faults += len(words) + len(long)
        print(
            f"{page.relative_to(ROOT)!s:28} {mean:5.1f}  {'; '.join([*long, *words])}".rstrip()
        )
    for module in sorted((ROOT / "hdet").rglob("*.py")):
        if words := unwanted(texts(module.read_text(encoding="utf-8"))):
            faults += len(words)
            print(f"{module.relative_to(ROOT)}: {'; '.join(words)}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
