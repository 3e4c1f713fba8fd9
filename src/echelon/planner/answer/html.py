# SPDX-License-Identifier: Apache-2.0
"""An answer as HTML for a notebook: what to run and why, what else there is, every term as a bar.

It has the font and the color of the notebook, on light and on dark pages: nothing but boxes has a
color of its own, and a stylesheet, which would change other cells, is not needed. It loads nothing
and runs nothing, and whatever stands in a name is shown as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from echelon.core.svg import number
from echelon.planner.answer.estimate import (
    band_text,
    bytes_shares,
    held_unit,
    seconds_shares,
    value_text,
)
from echelon.planner.answer.recommend_text import (
    OTHERS_HEADER,
    answer_facts,
    other_rows,
    other_signs,
    run_facts,
)
from echelon.planner.predict.bands import BandedValue
from echelon.planner.recommend.recommend import Recommendation
from echelon.planner.view.lines import mark_color
from echelon.planner.view.terms import TONES, term_styles, tone_of
from echelon.planner.view.waterfall import HUES

_BAR_WIDTH = 120  # pixels
_BAR_HEIGHT = 12  # pixels
_CELL = "text-align: left; vertical-align: top; padding: 1px 12px 1px 0; white-space: {space}"
_LINE = "opacity: 0.75"

_Share = tuple[str, BandedValue, str]


def answer_html(found: Recommendation) -> str:
    """Return an answer as a piece of an HTML page."""
    first, request = found.first.ranked.estimate, found.answer.request
    title = escape(f"{request.model.name} on {request.cluster.name}")
    parts = [f"<p><strong>{title}</strong></p>"]
    parts.append(table_html((), [*run_facts(request), *answer_facts(found)]))
    if found.others:
        parts.append("<p>What somebody may prefer, and what that costs:</p>")
        parts.append(table_html(OTHERS_HEADER, other_rows(found)))
    if signs := " ".join(other_signs(found)):
        parts.append(f"<p>{escape(signs)}</p>")
    step = _terms(("a step", "s"), seconds_shares(first), _tone_colors(first.seconds))
    held = _terms(
        ("the fullest rank", held_unit(first)[1]),
        bytes_shares(first, request.memory_bytes),
        _kind_colors(first.bytes),
    )
    beside = "display: flex; flex-wrap: wrap; gap: 1em 2em; margin-top: 1em"
    parts.append(f'<div style="{beside}"><div>{step}</div>\n<div>{held}</div></div>')
    parts.append(_key())
    return '<div style="overflow-x: auto">\n{}\n</div>\n'.format("\n".join(parts))


def table_html(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts; the first cell of a row is its head."""
    told = [[escape(cell) for cell in row] for row in rows]
    return _rows_html(list(map(escape, header)), told)


def _rows_html(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already."""
    lines = ['<table style="border-collapse: collapse">']
    if header:
        lines.append("<thead><tr>" + "".join(_cells("th", header, "col")) + "</tr></thead>")
    lines.append("<tbody>")
    lines += ["<tr>" + _row(row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</tbody>", "</table>"])


def _row(row: Sequence[str]) -> str:
    return "".join((*_cells("th", row[:1], "row"), *_cells("td", row[1:])))


def _cells(tag: str, texts: Sequence[str], scope: str = "") -> Iterator[str]:
    of = f' scope="{scope}"' if scope else ""
    style = _CELL.format(space="nowrap" if tag == "th" else "normal")
    for text in texts:
        yield f'<{tag}{of} style="{style}">{text}</{tag}>'


def _terms(heads: tuple[str, str], shares: Sequence[_Share], colors: Mapping[str, str]) -> str:
    """Return terms with a bar each: a box as long as the value, a line as long as its band."""
    whole, unit = heads
    longest = max(one.high for _, one, _ in shares[:-1])
    rows = [
        (
            escape(name),
            value_text(one),
            band_text(one),
            share,
            _bar(name, one, longest, colors[name]) if place < len(shares) - 1 else "",
        )
        for place, (name, one, share) in enumerate(shares)
    ]
    return _rows_html((whole, unit, "band", "share", ""), rows)


def _bar(name: str, amount: BandedValue, longest: float, color: str) -> str:
    scale = _BAR_WIDTH / longest if longest > 0 else 0.0
    low, high = number(amount.low * scale), number(amount.high * scale)
    middle = number(_BAR_HEIGHT / 2)
    told = escape(f"{name}: {value_text(amount)}, {band_text(amount)}", quote=True)
    return (
        f'<svg width="{_BAR_WIDTH}" height="{_BAR_HEIGHT}" role="img" aria-label="{told}">'
        f'<rect width="{number(amount.value * scale)}" height="{_BAR_HEIGHT}" fill="{color}"/>'
        f'<line x1="{low}" x2="{high}" y1="{middle}" y2="{middle}" stroke="currentColor" '
        f'style="{_LINE}"/></svg>'
    )


def _tone_colors(terms: Iterable[str]) -> dict[str, str]:
    """Return the color of each term of a step: what it is, compute, exposed or idle."""
    found = {name: mark_color(*HUES[tone_of(name)]) for name in terms}
    return {**found, "all others": mark_color(*HUES["idle"])}


def _kind_colors(terms: Iterable[str]) -> dict[str, str]:
    found = {style.name: mark_color(style.hue) for style in term_styles(terms)}
    return {**found, "all others": mark_color(*HUES["idle"])}


def _key() -> str:
    """Return what the colors of a step say, and what the line on a bar is."""
    size = f'width="{_BAR_HEIGHT}" height="{_BAR_HEIGHT}"'
    told = [
        f'<svg {size}><rect {size} fill="{mark_color(*HUES[tone])}"/></svg> {escape(name)}'
        for tone, (_, name) in TONES.items()
    ]
    line = "a line is a band: four of five measured runs lie inside"
    return f"<p>{' &nbsp; '.join(told)} &nbsp; {line}</p>"
