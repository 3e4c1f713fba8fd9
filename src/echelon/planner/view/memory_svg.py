"""Memory bars as one SVG figure: lengths are proportional to bytes, a dashed line is the device."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.svg import figure, fill, key, line, rect, style, text, text_width
from echelon.core.units import binary_bytes
from echelon.planner.view.kinds import Kind
from echelon.planner.view.memory import MemoryBars, MemoryRow
from echelon.planner.view.scale import (
    BOX,
    DARK,
    MARGIN,
    PAGE,
    ROW,
    RULES,
    TEXT,
    TICK,
    TITLE_LINE,
    Scale,
    shortened,
)
from echelon.planner.view.shares import byte_unit

_LABEL = 150
_LIGHT = 0.74


def memory_svg(bars: MemoryBars, *, title: str = "Memory") -> str:
    """Return the bars as a figure; a pointer on a part of a bar shows its kind and bytes."""
    labels = [shortened(row.label, _LABEL) for row in bars.rows]
    totals = [binary_bytes(row.total) for row in bars.rows]
    shares = [bars.share(row) for row in bars.rows]
    numbers = [_widest(totals), _widest(shares)]
    scale = Scale(
        left=MARGIN + _widest(labels) + 8,
        right=PAGE - MARGIN - sum(numbers) - 20,
        span=bars.largest,
    )
    top = MARGIN + TITLE_LINE + (20 if bars.limit_bytes > 0 else 0)
    bottom = top + ROW * len(bars.rows)
    body = [text(MARGIN, MARGIN + 14, shortened(title, (PAGE - 2 * MARGIN) / 1.15, 14), "title")]
    for place, row in enumerate(bars.rows):
        y = top + ROW * place
        body.append(text(scale.left - 8, y + 15, labels[place], "rank"))
        body.append(rect("idle", scale.left, y, scale.right - scale.left, BOX))
        body.extend(_bar(bars, row, scale, y))
        body.append(text(PAGE - MARGIN - numbers[1] - 10, y + 15, totals[place], "value"))
        body.append(text(PAGE - MARGIN, y + 15, shares[place], "value"))
    if bars.limit_bytes > 0:
        body.extend(_limit(bars, scale, top, bottom))
    per_unit, unit = byte_unit(bars.largest)
    body.extend(scale.axis(bottom, unit, per_unit))
    entries = [([_class(kind)], f"{kind.letter} {_name(kind)}") for kind in bars.kinds]
    drawn, end = key(entries, left=scale.left, right=PAGE - MARGIN, top=bottom + 32)
    return figure(
        [*body, *drawn],
        name=title,
        description=". ".join(map(bars.says, bars.rows)) or "No ranks",
        rules=style(RULES + _fills(bars), DARK),
        width=PAGE,
        height=end + MARGIN,
    )


def _bar(bars: MemoryBars, row: MemoryRow, scale: Scale, y: float) -> Iterator[str]:
    held = 0.0
    for kind in bars.kinds:
        here = row.terms.get(kind.name, 0.0)
        if not here:
            continue
        start, end = scale.x(held), scale.x(held + here)
        tip = f"{row.label}: {kind.name} {binary_bytes(here)}"
        yield rect(_class(kind), start, y, end - start, BOX, tip)
        if end - start >= text_width(kind.letter, TEXT) + 4:
            yield text((start + end) / 2, y + 15, kind.letter, "label", TEXT)
        held += here
    if 0 < bars.limit_bytes < row.total:
        start, end = scale.x(bars.limit_bytes), scale.x(row.total)
        more = binary_bytes(row.total - bars.limit_bytes)
        yield rect("over", start, y, end - start, BOX, f"{row.label}: {more} too much")


def _limit(bars: MemoryBars, scale: Scale, top: float, bottom: float) -> Iterator[str]:
    x = scale.x(bars.limit_bytes)
    label = f"memory of a device {binary_bytes(bars.limit_bytes)}"
    half = text_width(label, TICK) / 2
    yield line(x, top - 6, x, bottom, "limit")
    yield text(min(max(x, MARGIN + half), PAGE - MARGIN - half), top - 10, label, "tick")


def _widest(words: list[str]) -> float:
    return max((text_width(one, TEXT) for one in words), default=0.0)


def _name(kind: Kind) -> str:
    return shortened(kind.name, 300)


def _class(kind: Kind) -> str:
    return f"box kind{kind.letter}"


def _fills(bars: MemoryBars) -> str:
    return "".join(
        f".kind{kind.letter} {{ fill: {fill(kind.hue, _LIGHT)}; }}\n" for kind in bars.kinds
    )
