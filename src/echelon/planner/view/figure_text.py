# SPDX-License-Identifier: Apache-2.0
"""Figures as text for a terminal: memory bars, the waterfall of a step, and the mesh map.

    stage 0  PPPGGGOOOOOOOOAAAAAAAAAAAA      |        61.80 GiB   83.0 %
    stage 1  PPPGGGOOOOOOOOAAAAAAAAAAAAAAAAAA|aaaaa   82.10 GiB  110.2 %

A letter is a kind of bytes; behind the line, which is the memory of the device, it is lower case.

    matmul      ==================                          4.321 s   43.2 %
    tensor                        ####                      1.000 s   10.0 %
    bubble                            ....                  1.000 s   10.0 %

Marks are compute, exposed communication, or idle. Lines are spans of text with colors, which read
on light and on dark grounds; without any, letters and marks say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum

from rich.cells import cell_len, set_cell_size

from echelon.core.svg import fill, plain
from echelon.planner.view.document import BarRow, BarsFigure, Tone, WaterfallFigure, WaterfallRow
from echelon.planner.view.mesh_map import MapDevice, MeshMap
from echelon.planner.view.terms import OTHER, TermStyle, round_bytes, term_styles, tone_mark
from echelon.planner.view.text_layout import WIDTH

_LONGEST_LABEL = 18  # columns of a row of bars
_LONGEST_TERM = 20  # columns of a term of a step
_LONGEST_NAME = 40  # columns of a name in a table
_NARROWEST = 10  # columns of text


@dataclass(frozen=True, slots=True)
class Span:
    """Hold some text and its color (six digits), "" for none."""

    text: str
    color: str = ""


TextLine = tuple[Span, ...]


def painted(lines: Sequence[TextLine]) -> str:
    """Return lines as text, with colors where stdout is a terminal that shows them."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
    with console.capture() as capture:
        for line in lines:
            text = Text()
            for span in line:
                text.append(span.text, style=span.color or None)
            text.rstrip()
            console.print(text)
    return capture.get()


def mark_color(hue: float, saturation: float = 0.6) -> str:
    """Return the color of a hue for marks in a terminal."""
    return fill(hue, 0.5, saturation)


def truncate_text(text: str, most: int) -> str:
    """Return `text` on one line of at most `most` columns; dots stand for what is left out."""
    text = plain(text)
    if cell_len(text) <= most:
        return text
    return set_cell_size(text, max(most - 2, 0)) + ".." if most > 2 else set_cell_size(text, most)


def pad_text(text: str, width: int, *, right: bool = False) -> str:
    """Return `text` with blanks up to `width` columns, before it if it is to stand right."""
    blanks = " " * max(width - cell_len(text), 0)
    return blanks + text if right else text + blanks


def table_lines(rows: Sequence[Sequence[str]], *, right: Sequence[bool]) -> list[TextLine]:
    """Return rows in aligned columns, as wide as they must be; `right` columns stand right."""
    cells = [[truncate_text(row[0], _LONGEST_NAME), *row[1:]] for row in rows]
    widths = [
        max((cell_len(row[place]) for row in cells), default=0) for place in range(len(right))
    ]
    return [
        (
            Span(
                "  ".join(
                    pad_text(cell, width, right=to_right)
                    for cell, width, to_right in zip(row, widths, right, strict=True)
                ).rstrip()
            ),
        )
        for row in cells
    ]


def bars_lines(figure: BarsFigure, *, columns: int = WIDTH) -> list[TextLine]:
    """Return bars of bytes, and the kinds of the fullest row, as lines of so many columns."""
    if not figure.rows:
        return [(Span("(no ranks)"),)]
    styles = term_styles(figure.kinds)
    return [*_bars(figure, styles, columns=columns), (), *_legend(figure, styles)]


def _bars(figure: BarsFigure, styles: Sequence[TermStyle], *, columns: int) -> Iterator[TextLine]:
    labels = [truncate_text(row.label, _LONGEST_LABEL) for row in figure.rows]
    margin = max(map(cell_len, labels))
    right = [
        max(len(row.total_text) for row in figure.rows),
        max(len(row.share_text) for row in figure.rows),
    ]
    # One column is the line, two stand before the bar, two before each number.
    room = max(columns - margin - sum(right) - 7, _NARROWEST)
    for row, label in zip(figure.rows, labels, strict=True):
        numbers = f"  {row.total_text.rjust(right[0])}  {row.share_text.rjust(right[1])}"
        yield (
            Span(pad_text(label, margin) + "  "),
            *_bar(figure, styles, row, room),
            Span(numbers.rstrip()),
        )
    if figure.limit > 0:
        memory = figure.limit_text
        yield (Span(f"| the memory of a device, {memory}; lower case: more than it has"),)


def _bar(figure: BarsFigure, styles: Sequence[TermStyle], row: BarRow, room: int) -> Iterator[Span]:
    """Yield the columns of a bar, which are `room` and the line."""
    limit, largest = figure.limit, max([figure.limit, *(row.total for row in figure.rows)])
    if limit <= 0:
        scale = room / largest if largest > 0 else 0.0
        yield from _letters(styles, row, (0.0, row.total), scale, room)
        return
    line = round(limit / largest * room)
    if largest > limit:
        line = min(line, room - 1)
    yield from _letters(styles, row, (0.0, min(row.total, limit)), line / limit, line)
    yield Span("|", _over() if row.over else "")
    if row.over:
        scale = (room - line) / (largest - limit)
        yield from _letters(styles, row, (limit, row.total), scale, room - line)
    else:
        yield Span(" " * (room - line))


def _over() -> str:
    return mark_color(0, 0.8)


def _letters(
    styles: Sequence[TermStyle], row: BarRow, part: tuple[float, float], scale: float, room: int
) -> Iterator[Span]:
    """Yield the `room` columns for the bytes from `part[0]` to `part[1]`, `scale` to a byte."""
    begin, end = part
    over = begin > 0
    filled = max(round((end - begin) * scale), int(over))
    at, held = 0, 0.0
    for style, value in zip(styles, row.values, strict=True):
        held += value
        stop = round((min(max(held, begin), end) - begin) * scale)
        # What does not fit is seen, however little of it there is.
        if over and held > begin:
            stop = max(stop, 1)
        letter = style.letter.lower() if over else style.letter
        stop = min(max(stop, at), filled)
        yield Span(letter * (stop - at), _over() if over else mark_color(style.hue))
        at = stop
    yield Span(" " * (room - at))


def _legend(figure: BarsFigure, styles: Sequence[TermStyle]) -> Iterator[TextLine]:
    row = max(figure.rows, key=lambda one: one.total)
    if not styles:
        yield (Span("Nothing is held."),)
        return
    shown = round_bytes(dict(zip(figure.kinds, row.values, strict=True)))
    place = truncate_text(row.label, _LONGEST_LABEL)
    rows = [
        ("", "", f"in {place}" if len(figure.rows) > 1 else "bytes", "share"),
        *(
            (
                one.letter,
                truncate_text(one.name, _LONGEST_NAME),
                shown.value(one.name),
                shown.share(one.name),
            )
            for one in styles
        ),
        ("", "total", shown.value(), shown.share()),
    ]
    yield from table_lines(rows, right=(False, False, True, True))


def waterfall_lines(figure: WaterfallFigure, *, columns: int = WIDTH) -> list[TextLine]:
    """Return the bars of a step, and its tones, as lines of so many columns."""
    if not figure.rows:
        return [(Span("(a step takes no time)"),)]
    return [*_waterfall(figure, columns=columns)]


def _waterfall(figure: WaterfallFigure, *, columns: int) -> Iterator[TextLine]:
    labels = [truncate_text(row.label, _LONGEST_TERM) for row in figure.rows]
    margin = max(len("total"), *map(cell_len, labels))
    width = len(figure.total_text)
    room = max(columns - margin - width - 13, 1)

    def numbers(value: str, share: str) -> Span:
        return Span(f"  {value.rjust(width)}  {share.rjust(7)}")

    for row, label in zip(figure.rows, labels, strict=True):
        yield (
            Span(pad_text(label, margin) + "  "),
            *_marks(row, figure.total, room),
            numbers(row.text, row.share_text),
        )
    yield (
        Span(pad_text("total", margin) + " " * (room + 2)),
        numbers(figure.total_text, "100.0 %"),
    )
    yield ()
    for one in figure.tones:
        yield (
            _mark(one.tone, 1),
            Span(pad_text(f" {one.name}", margin + room + 1)),
            numbers(one.text, one.share_text),
        )
    if figure.rows[-1].label == OTHER:
        yield (Span(truncate_text(f"other: {', '.join(figure.others)}", columns)),)


def _marks(row: WaterfallRow, total: float, room: int) -> Iterator[Span]:
    """Yield the `room` columns of a bar, with one mark at least."""
    whole = fsum(part.seconds for part in row.parts)
    first = min(round(row.start / total * room), room - 1)
    last = min(max(round((row.start + whole) / total * room), first + 1), room)
    yield Span(" " * first)
    reached, at = 0.0, 0
    for part in row.parts:
        reached += part.seconds
        stop = min(round(reached / whole * (last - first)), last - first)
        yield _mark(part.tone, stop - at)
        at = stop
    yield Span(" " * (room - first - at))


def _mark(tone: Tone, count: int) -> Span:
    mark, hue, saturation = tone_mark(tone)
    return Span(mark * count, mark_color(hue, saturation))


def mesh_lines(found: MeshMap, *, columns: int = WIDTH) -> list[TextLine]:
    """Return the map of a mesh as lines of so many columns."""
    return [*_map(found, columns=columns)]


def _map(found: MeshMap, *, columns: int) -> Iterator[TextLine]:
    cluster, mesh = found.head()
    yield (Span(truncate_text(f"cluster  {cluster}", columns)),)
    yield (Span(truncate_text(f"mesh     {mesh}", columns)),)
    if found.facts:
        yield ()
        rows = found.rows()
        used = sum(max(cell_len(row[place]) for row in rows) + 2 for place in range(6))
        right = (False, True, True, False, True, True, False)
        fitted = [(*row[:6], truncate_text(row[6], columns - used)) for row in rows]
        yield from table_lines(fitted, right=right)
        for words in found.shared_ways():
            yield (Span(truncate_text(words, columns)),)
    yield ()
    for node in found.shown_nodes:
        yield (Span(truncate_text(found.node_title(node), columns)),)
        yield from _boxes(found.devices(node), columns=columns)
    yield (Span("A box is a device: its rank, then its coordinates."),)
    if parts := found.parts():
        yield ()
        yield (Span(f"The {found.num_nodes:,} nodes hold the ranks of the pipeline so:"),)
        yield from ((Span(truncate_text(part, columns)),) for part in parts)


def _boxes(devices: Sequence[MapDevice], *, columns: int) -> Iterator[TextLine]:
    cells = [(str(device.rank), *device.coordinates) for device in devices]
    width = max(len(words) for cell in cells for words in cell)
    most = max((columns - 1) // (width + 3), 1)
    in_row = -(-len(cells) // -(-len(cells) // most))
    edge: TextLine = ()
    for first in range(0, len(cells), in_row):
        row = cells[first : first + in_row]
        edge = (Span("+" + ("-" * (width + 2) + "+") * len(row)),)
        yield edge
        for words in zip(*row, strict=True):
            yield (Span("|" + "".join(f" {word.ljust(width)} |" for word in words)),)
    yield edge
