# SPDX-License-Identifier: Apache-2.0
"""How text is laid out: tables and sentences that fit into the columns of a page.

A terminal says how many these are (`cli/output.py`), 80 where nothing does. No number and no word
is cut, unless it is longer than a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap

from echelon.core.messages.plurals import in_singular
from echelon.planner.view.document import DataTable, Section, number_columns

WIDTH = 80  # columns of text
GAP, WORDS_OF_NUMBER = "  ", 2


def section_text(section: Section, *, columns: int = WIDTH) -> str:
    """Return a section as paragraphs: its sentence, its table, its notes."""
    parts = [section.summary]
    if section.table is not None:
        parts.append(data_text(section.table, columns=columns))
    return "\n\n".join((*parts, *section.notes))


def data_text(found: DataTable, *, columns: int | None = None) -> str:
    """Return a table of a document as text."""
    return table(found.head, found.rows, columns)


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], columns: int | None = None
) -> str:
    """Return rows in aligned columns: the first to the left, numbers to the right.

    What is wider than `columns` has its heads and texts in several lines; what there is still no
    room for stands below, behind the first column again.
    """
    head, body = list(header), [[in_singular(str(cell)) for cell in row] for row in rows]
    numbers = number_columns(len(head), body)
    right = [column in numbers for column in range(len(head))]
    widths = [max(map(len, cells)) for cells in zip(head, *body, strict=True)]
    parts = [[*range(len(head))]]
    if columns is not None and sum(widths) + len(GAP) * (len(widths) - 1) > columns:
        # What is more than a number and its unit can go on in the next line.
        right = [
            is_right and all(len(row[column].split()) <= WORDS_OF_NUMBER for row in body)
            for column, is_right in enumerate(right)
        ]
        widths = _widths(head, body, right, columns)
        parts = _folded(widths, columns)
    return "\n\n".join(
        "\n".join(
            line
            for place, row in enumerate((head, *body))
            for line in _lines(row, part, widths, right, is_head=place == 0)
        )
        for part in parts
    )


def _widths(
    head: Sequence[str], body: Sequence[Sequence[str]], right: Sequence[bool], width: int
) -> list[int]:
    """Return the columns of a table in characters: narrower where it would be too wide."""
    columns = range(len(head))
    cells = [max([len(row[column]) for row in body], default=0) for column in columns]
    widths = [max(len(head[column]), cells[column]) for column in columns]
    words = [max(map(len, head[column].split()), default=0) for column in columns]
    _narrow(widths, [max(words[column], cells[column]) for column in columns], width)
    texts = [column for column in columns if not right[column]]
    for cut in CUTS:
        floors = [
            longest_piece([row[column] for row in (head, *body)], cut)
            if column in texts
            else widths[column]
            for column in columns
        ]
        _narrow(widths, floors, width)
    return widths


def _narrow(widths: list[int], floors: Sequence[int], width: int) -> None:
    """Take from the columns with most to spare until a table fits, if it can."""
    over = sum(widths) + len(GAP) * (len(widths) - 1) - width
    while over > 0:
        column = max(range(len(widths)), key=lambda one: widths[one] - floors[one])
        if widths[column] <= floors[column]:
            return
        widths[column] -= 1
        over -= 1


def _folded(widths: Sequence[int], width: int) -> list[list[int]]:
    """Return the columns of each part of a table, the first column in all of them."""
    parts, taken = [[0]], widths[0] if widths else 0
    for column in range(1, len(widths)):
        if taken + len(GAP) + widths[column] > width and len(parts[-1]) > 1:
            parts.append([0])
            taken = widths[0]
        parts[-1].append(column)
        taken += len(GAP) + widths[column]
    return parts


def _lines(
    row: Sequence[str],
    columns: Sequence[int],
    widths: Sequence[int],
    right: Sequence[bool],
    *,
    is_head: bool,
) -> Iterator[str]:
    """Yield the lines of one row; a head of fewer lines stands at their end."""
    cells = [cell_lines(row[column], widths[column]) for column in columns]
    height = max(map(len, cells))
    for line in range(height):
        shown: list[str] = []
        for column, cell in zip(columns, cells, strict=True):
            place = line - (height - len(cell)) if is_head else line
            text = cell[place] if 0 <= place < len(cell) else ""
            pad = text.rjust if right[column] else text.ljust
            shown.append(pad(widths[column]))
        yield GAP.join(shown).rstrip()


_IN_NUMBER = r"(?<=\d)\.(?=\d)|(?<=\de)[+-](?=\d)"
CUTS = (
    r"\S+",
    rf"(?:[^\s.]|{_IN_NUMBER})+\.?|\.",
    rf"(?:[^\s._/=-]|{_IN_NUMBER})+[._/=-]*|[._/=-]+",
)
"""What is kept whole, most first: words, parts of dotted keys, parts of names; always numbers."""


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


def wrap_text(text: str, first: str, rest: str, *, columns: int = WIDTH) -> list[str]:
    """Return `text` in lines; `first` stands before the first of them, `rest` before others."""
    lines = wrap(
        in_singular(text),
        columns,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [part for line in lines for part in _cut_line(line, columns)]


def _cut_line(line: str, columns: int) -> list[str]:
    """Return a line in lines that fit; only one of a single long word does not by itself."""
    if len(line) <= columns:
        return [line]
    word = line.lstrip()
    indent = line[: len(line) - len(word)]
    lines = cell_lines(word, max(1, columns - len(indent)))
    return [indent + one for one in lines]


def fill_text(text: str, *, columns: int = WIDTH, first: str = "", rest: str = "") -> str:
    """Return the lines of `wrap_text` as one text."""
    return "\n".join(wrap_text(text, first, rest, columns=columns))


def flow_text(lines: Iterable[str], *, columns: int, indent: str = "") -> str:
    """Return lines of one paragraph as lines of a page, as long as there is room for."""
    text = " ".join(line.strip() for line in lines)
    return fill_text(text, columns=columns, first=indent, rest=indent)


def flow_paragraphs(text: str, *, columns: int) -> str:
    """Return the paragraphs of a text, which empty lines part, as those of a page.

    One with lines that stand further in, or begin with a dash, is a list, and stays as it is.
    """
    return "\n\n".join(
        part
        if re.search(r"^(\s|- )", part, re.MULTILINE)
        else flow_text(part.split("\n"), columns=columns)
        for part in text.split("\n\n")
    )


def fit_page(text: str, *, columns: int = WIDTH) -> str:
    """Return a page with lines that are too long in several, those after the first further in.

    ``zero     stage 3, ...`` goes on under its third word, a sentence at the margin.
    """
    return "\n".join(_fit_line(in_singular(line), columns) for line in text.split("\n"))


def _fit_line(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    head = re.match(r" *(?:\S+ {2,})?", line)
    indent = " " * len(head[0]) if head is not None and len(head[0]) < columns // 2 else ""
    return fill_text(line, columns=columns, rest=indent)
