# SPDX-License-Identifier: Apache-2.0
"""A whole page as HTML without a script: what a notebook shows of a plan, a proof and a run.

It is a piece of a page: it has no style sheet and no ids, so that it changes nothing around it, has
the font and the color of what it stands in, and is bounded: what would make it larger than
`MOST_BYTES` is told by its name. Whatever a name holds is text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from echelon.core.svg import plain
from echelon.page.drawn.figure import drawing
from echelon.page.drawn.marks import svg_inside
from echelon.planner.view.document import DataTable, Fact, PageDocument, Section

MOST_BYTES = 180_000
"""The bytes of all parts together, at most; what stands above them is some thousand more."""
OPEN = 2
"""Figures that are unfolded at first."""
MOST_ROWS = 24
"""Rows of a table."""
MOST_COLUMNS = 16
"""Columns of a table."""
_MOST_CHARACTERS = 1000  # of a text
_GOOD, _BAD = "#2f9e5f", "#d1432b"
_CELL = "padding: 2px 10px 2px 0; text-align: {}; vertical-align: top"


def static_html(document: PageDocument) -> str:
    """Return a page as a piece of HTML that loads nothing and runs nothing."""
    pieces = [*_top(document), *_sections(document.sections)]
    pieces.append(f'<p style="opacity: 0.75">{_said(document.made_by)}</p>')
    inside = "\n".join(pieces)
    return f'<div style="max-width: 800px; overflow-x: auto">\n{inside}\n</div>\n'


def _sections(sections: Sequence[Section]) -> Iterator[str]:
    """Yield the parts in their order; the smallest ones first get the room that there is."""
    opened = [at for at, one in enumerate(sections) if one.figure is not None][:OPEN]
    whole = {at: _section(one, opened=at in opened) for at, one in enumerate(sections)}
    kept, left = dict[int, str](), MOST_BYTES
    for at in sorted(whole, key=lambda place: len(whole[place])):
        for piece in (whole[at], _section(sections[at], with_figure=False)):
            size = len(piece.encode())
            if at not in kept and size <= left:
                kept[at], left = piece, left - size
    yield from (kept[at] for at in sorted(kept))
    if missing := [one.title for at, one in enumerate(sections) if at not in kept]:
        names = "; ".join(map(_said, missing[:20]))
        yield f"<p>Too large to be shown here, and on the page (--out FILE.html): {names}</p>"


def _top(document: PageDocument) -> Iterator[str]:
    color = _GOOD if document.good else _BAD
    line = f"border-left: 5px solid {color}; padding: 4px 10px; margin: 6px 0"
    yield f'<p style="opacity: 0.75; margin: 0">{_said(document.subject)}</p>'
    yield f"<p><strong>{_said(document.title)}</strong></p>"
    yield f'<p style="{line}">{_said(document.verdict)}</p>'
    if document.facts:
        yield _table((), (_fact(one) for one in document.facts), frozenset())


def _fact(one: Fact) -> tuple[str, str, str]:
    return one.name, one.value, one.note


def _section(section: Section, *, with_figure: bool = True, opened: bool = False) -> str:
    """Return a part, folded up but for the first figures."""
    parts = [f"<details{' open' * opened}>"]
    parts.append(f"<summary><strong>{_said(section.title)}</strong></summary>")
    parts.append(f'<p style="margin: 4px 0">{_said(section.summary)}</p>')
    found = drawing(section) if with_figure else None
    if found is not None:
        parts.append(svg_inside(found))
    elif section.figure is not None:
        parts.append(
            "<p>Its figure is too large to be shown here, and on the page (--out FILE.html).</p>"
        )
    parts += [f"<p>{_said(note)}</p>" for note in section.notes[:MOST_ROWS]]
    if section.table is not None:
        parts += _numbers(section.table, beside=found is not None)
    parts += [f"<pre>{_said(one)}</pre>" for one in section.commands[:MOST_ROWS]]
    return "\n".join([*parts, "</details>"])


def _numbers(table: DataTable, *, beside: bool) -> Iterator[str]:
    """Yield the rows of a table, as many as there is room for; below a figure, folded up."""
    if beside:
        yield "<details><summary>The numbers as a table</summary>"
    rows = [row[:MOST_COLUMNS] for row in table.rows[:MOST_ROWS]]
    yield _table(table.head[:MOST_COLUMNS], rows, frozenset(table.right))
    more = [
        f"{count - most:,} more {what}"
        for count, most, what in (
            (len(table.rows), MOST_ROWS, "rows"),
            (len(table.head), MOST_COLUMNS, "columns"),
        )
        if count > most
    ]
    if more:
        yield f"<p>{' and '.join(more)} are on the page (--out FILE.html).</p>"
    if beside:
        yield "</details>"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], right: frozenset[int]) -> str:
    lines = ['<table style="border-collapse: collapse">']
    if head:
        lines.append("<thead><tr>" + "".join(_cells("th", head, right)) + "</tr></thead>")
    lines.append("<tbody>")
    lines += ["<tr>" + "".join(_cells("td", row, right)) + "</tr>" for row in rows]
    return "\n".join([*lines, "</tbody></table>"])


def _cells(tag: str, texts: Iterable[str], right: frozenset[int]) -> Iterator[str]:
    for place, text in enumerate(texts):
        style = _CELL.format("right" if place in right else "left")
        yield f'<{tag} style="{style}">{_said(text)}</{tag}>'


def _said(text: str) -> str:
    """Return text as HTML; what is far too long is cut."""
    if len(text) > _MOST_CHARACTERS:
        text = text[:_MOST_CHARACTERS] + "..."
    return escape(plain(text), quote=True)
