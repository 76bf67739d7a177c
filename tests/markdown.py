"""Fenced code blocks of Markdown files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.M | re.S)
_TITLE = re.compile(r'title="([^"]*)"')


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        path: Of the file.
        line: Of its first line of code, from 1.
        language: First word of the info string.
        title: What the info string gives as ``title="..."``, or "".
        code: Without indentation of the fence.
    """

    path: Path
    line: int
    language: str
    title: str
    code: str


def blocks(path: Path) -> list[Block]:
    """All fenced blocks of a file."""
    text = path.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        indent, info, code = match.groups()
        title = _TITLE.search(info)
        found.append(
            Block(
                path,
                text.count("\n", 0, match.start(3)) + 1,
                info.split()[0] if info.split() else "",
                title[1] if title else "",
                re.sub(rf"^{indent}", "", code, flags=re.M),
            )
        )
    return found
