"""What the docstrings write for a terminal, as Markdown: a griffe extension of the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


def fenced(match: re.Match[str]) -> str:
    indent = match[1]
    return f"{indent}```pycon\n{match[0]}\n{indent}```"


def markdown(text: str) -> str:
    """Examples at a prompt become code blocks, ``::`` before a block ``:``, and ``[knob][replica]`` is no link."""
    parts = re.split(r"(```.*?```)", EXAMPLE.sub(fenced, text), flags=re.DOTALL)
    plain = [
        re.sub(r"(?<![`\w\]])\[([^\[\]`]+)\]\[([^\[\]`]+)\]", r"`[\1][\2]`", re.sub(r"::$", ":", part, flags=re.MULTILINE))
        for part in parts[::2]
    ]
    parts[::2] = plain
    return "".join(parts)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
