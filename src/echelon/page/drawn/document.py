# SPDX-License-Identifier: Apache-2.0
"""A document without a browser: figures as files, SVG or PNG; the page as HTML without a script.

The HTML is a piece of a page, such as a notebook shows: it has no style sheet and no ids, so that
it changes nothing around it, has the font and the color of what it stands in, and is bounded: what
would make it larger than `MOST_BYTES` is told by its name. Whatever a name holds is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal, cast

from echelon.config.files.new_file import (
    make_folder,
    require_free_names,
    require_writable,
    write_new,
)
from echelon.core.errors import EnvironmentProblem
from echelon.core.optional import optional_package
from echelon.core.rulebook.config import FONT_INSTALLED
from echelon.core.svg import plain
from echelon.page.drawn.bars import draw_bars, draw_heat, draw_waterfall
from echelon.page.drawn.lines import draw_lines, draw_schedule
from echelon.page.drawn.marks import Drawing, svg_file, svg_inside
from echelon.page.drawn.mesh import draw_mesh
from echelon.planner.view.document import DataTable, PageDocument, Section

DRAWN_BY: dict[str, Callable[[Any, str, str], Drawing]] = {
    "mesh": draw_mesh,
    "bars": draw_bars,
    "waterfall": draw_waterfall,
    "schedule": draw_schedule,
    "lines": draw_lines,
    "heat": draw_heat,
}
"""What draws each kind of figure: a function of the figure, its name, and what it shows."""


def drawing(section: Section) -> Drawing | None:
    """Return the drawing of a part's figure; None where it has none."""
    if section.figure is None:
        return None
    return DRAWN_BY[section.figure.kind](section.figure, section.title, section.summary)


ZOOM = 2.0
"""The dots of a PNG for each pixel of a drawing."""
_EMPTY = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
_LETTER = (
    '<text x="2" y="16" font-size="16" font-family="Arial, \'DejaVu Sans\', sans-serif">M</text>'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureFiles:
    """Say where figures go: into a new `folder`, or as files whose names begin with `stem`."""

    folder: Path
    stem: str = ""
    form: Literal["svg", "png"] = "svg"

    @classmethod
    def at(cls, path: Path) -> FigureFiles:
        """Return where `path` says: NAME.svg and NAME.png begin names, else it is a folder."""
        stem = f"{path.stem}-"
        match path.suffix.lower():
            case ".svg":
                return cls(folder=path.parent, stem=stem)
            case ".png":
                return cls(folder=path.parent, stem=stem, form="png")
            case _:
                return cls(folder=path)

    def require(self, key: str) -> None:
        """Refuse what cannot be written, before the work for what is to be written."""
        if self.form == "png":
            require_png()
        if not self.stem:
            require_writable(self.folder, key=key)
            return
        ending = f".{self.form}"
        require_free_names(self.folder / f"{self.stem[:-1]}{ending}", ending, key=key)
        require_writable(self.folder / f"{self.stem}figure.{self.form}", key=key)

    def write(self, document: PageDocument, *, key: str) -> tuple[Path, ...]:
        """Write each figure of a page into a new file, and return the files in its order.

        ConfigError where a file or the folder exists, EnvironmentProblem where PNG is not there.
        """
        self.require(key)
        made = {
            self.folder / f"{self.stem}{_plain(section.id)}.{self.form}": found
            for section in document.sections
            if (found := drawing(section)) is not None
        }
        # All are drawn before any is written: what goes wrong leaves no file behind.
        drawn = {
            path: png_bytes(one) if self.form == "png" else svg_file(one)
            for path, one in made.items()
        }
        if not self.stem:
            make_folder(self.folder, key=key)
        for path, content in drawn.items():
            write_new(path, content, key=key)
        return tuple(drawn)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", name) or "figure"


def require_png() -> None:
    """Refuse PNG where it can't be made: EnvironmentProblem says what to install."""
    drawer = _drawer()
    drawn = drawer.svg_to_bytes(svg_string=_EMPTY.format(_LETTER))
    if bytes(drawn) == bytes(drawer.svg_to_bytes(svg_string=_EMPTY.format(""))):
        raise EnvironmentProblem(
            FONT_INSTALLED.problem(
                "PNG needs a font for its words, and none was found",
                suggestions=("SVG, which needs none", "apt-get install fonts-dejavu-core"),
            )
        )


def png_bytes(drawing: Drawing) -> bytes:
    """Return a drawing as a PNG on light paper, twice as many dots as it has pixels."""
    text = svg_file(drawing, follows_page=False)
    return bytes(_drawer().svg_to_bytes(svg_string=text, zoom=ZOOM))


def _drawer() -> Any:
    return cast("Any", optional_package("resvg_py", extra="png", purpose="a figure as PNG"))


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
        rows = ((one.name, one.value, one.note) for one in document.facts)
        yield _table((), rows, frozenset())


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
