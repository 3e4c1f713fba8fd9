"""Read a picture for a terminal back."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len

from echelon.planner.view.figure_text import TextLine
from echelon.planner.view.text_layout import WIDTH


def text_of(lines: Iterable[TextLine]) -> str:
    """Return lines for a terminal as text without colors, each with its end."""
    return "".join("".join(span.text for span in line).rstrip() + "\n" for line in lines)


def assert_narrow(text: str) -> None:
    """Check that no line of a terminal text is too wide."""
    assert text.endswith("\n")
    assert max(map(cell_len, text.split("\n"))) <= WIDTH
