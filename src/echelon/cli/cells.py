"""The text of one cell of a table in lines: words whole if they can be, keys cut behind a dot."""

from __future__ import annotations

import re
from collections.abc import Sequence

CUTS = (r"\S+", r"[^\s.]+\.?|\.", r"[^\s._/=-]+[._/=-]*|[._/=-]+")
"""What is kept whole, most first: words, parts of dotted keys, parts of names."""


def longest_piece(cells: Sequence[str], cut: str) -> int:
    """Return the characters of the longest piece of some cells that `cut` keeps whole."""
    return max((len(piece) for cell in cells for piece in re.findall(cut, cell)), default=0)


def cell_lines(text: str, width: int) -> list[str]:
    """Return a text in lines of `width` characters; a single line where it fits."""
    if len(text) <= width:
        return [text]
    lines = [""]
    for word in text.split():
        gap = " " if lines[-1] else ""
        for piece in _cut(word, max(1, width)):
            if len(lines[-1]) + len(gap) + len(piece) <= width:
                lines[-1] += gap + piece
            else:
                lines.append(piece)
            gap = ""
    return lines if lines[0] else lines[1:]


def _cut(word: str, width: int) -> list[str]:
    """Return a word in pieces that fit, cut where it hurts least."""
    for cut in CUTS:
        pieces: list[str] = re.findall(cut, word)
        if max(map(len, pieces)) <= width:
            return pieces
    return [word[start : start + width] for start in range(0, len(word), width)]
