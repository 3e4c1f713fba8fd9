"""Sentences in lines of 80 characters, as a terminal shows them."""

from __future__ import annotations

from textwrap import wrap

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
