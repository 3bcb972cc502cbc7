"""What the docstrings write for a terminal, as Markdown: a griffe extension of the API
reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)
SEVERAL = re.compile(r"^( +)(\w+)((?:, \w+)+): ", re.MULTILINE)


def fenced(match: re.Match[str]) -> str:
    indent = match[1]
    return f"{indent}```pycon\n{match[0]}\n{indent}```"


def apart(match: re.Match[str]) -> str:
    """``a, b: text`` of a list of arguments, as two entries: the reference looks each up by its
    name."""
    indent, first, others = (
        match[1],
        match[2],
        match[3].lstrip(", ").split(", "),
    )
    return (
        "".join(f"{indent}{name}: see `{first}`.\n" for name in others)
        + f"{indent}{first}: "
    )


def markdown(text: str) -> str:
    """Arguments of one text get an entry each, examples at a prompt become code blocks, ``::``
    before a block ``:``, and ``[knob][replica]`` is no link."""
    parts = re.split(
        r"(```.*?```)",
        EXAMPLE.sub(fenced, SEVERAL.sub(apart, text)),
        flags=re.DOTALL,
    )
    plain = [
        re.sub(
            r"(?<![`\w\]])\[([^\[\]`]+)\]\[([^\[\]`]+)\]",
            r"`[\1][\2]`",
            re.sub(r"::$", ":", part, flags=re.MULTILINE),
        )
        for part in parts[::2]
    ]
    parts[::2] = plain
    return "".join(parts)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
