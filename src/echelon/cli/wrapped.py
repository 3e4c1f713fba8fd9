"""Sentences in lines of 80 characters, as a terminal shows them."""

from __future__ import annotations

import re
from textwrap import fill, wrap

WIDTH = 80


def wrapped(text: str, first: str, rest: str) -> list[str]:
    """Return `text` in lines; `first` stands before the first of them, `rest` before others."""
    return wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )


def fitted(text: str) -> str:
    """Return a page with lines that are too long in several, those after the first further in.

    ``zero     stage 3, ...`` goes on under its third word, a sentence at the margin.
    """
    return "\n".join(_fitted(line) for line in text.split("\n"))


def _fitted(line: str) -> str:
    if len(line) <= WIDTH:
        return line
    head = re.match(r" *(?:\S+ {2,})?", line)
    indent = " " * len(head[0]) if head is not None and len(head[0]) < WIDTH // 2 else ""
    return fill(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
