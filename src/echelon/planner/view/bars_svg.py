"""Memory bars and the waterfall of a step as SVG figures: lengths are those of bytes, of seconds.

A dashed line is the memory of a device; a pointer on a bar shows what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from echelon.core.svg import figure, fill, key, line, rect, style, text, text_width
from echelon.core.units import binary_bytes
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
from echelon.planner.view.terms import TONES, TermStyle, byte_unit
from echelon.planner.view.waterfall import HUES, Waterfall, WaterfallBar

_MEMORY_LABEL = 150  # pixels
_STEP_LABEL = 170  # pixels
_LIGHT = 0.74  # lightness, 0 to 1


def memory_svg(bars: MemoryBars, *, title: str = "Memory") -> str:
    """Return the bars as a figure; a pointer on a part of a bar shows its kind and bytes."""
    labels = [shortened(row.label, _MEMORY_LABEL) for row in bars.rows]
    totals = [binary_bytes(row.total) for row in bars.rows]
    shares = [bars.share(row) for row in bars.rows]
    scale = _scale(labels, totals, shares, bars.largest)
    top = MARGIN + TITLE_LINE + (20 if bars.limit_bytes > 0 else 0)
    bottom = top + ROW * len(bars.rows)

    def draw(place: int, y: float) -> Iterator[str]:
        return _memory_bar(bars, bars.rows[place], scale, y)

    body = [_title(title), *_rows(scale, (labels, totals, shares), top, draw)]
    if bars.limit_bytes > 0:
        body.extend(_limit(bars, scale, top, bottom))
    per_unit, unit = byte_unit(bars.largest)
    body.extend(scale.axis(bottom, unit, per_unit))
    names = [f"{kind.letter} {shortened(kind.name, 300)}" for kind in bars.kinds]
    entries = [([_class(kind)], name) for kind, name in zip(bars.kinds, names, strict=True)]
    drawn, end = key(entries, left=scale.left, right=PAGE - MARGIN, top=bottom + 32)
    return figure(
        [*body, *drawn],
        name=title,
        description=". ".join(map(bars.says, bars.rows)) or "No ranks",
        rules=style(RULES + _memory_fills(bars), DARK),
        width=PAGE,
        height=end + MARGIN,
    )


def waterfall_svg(fall: Waterfall, *, title: str = "Seconds of a step") -> str:
    """Return the waterfall as a figure; a pointer on a bar shows its term, seconds and tone."""
    shown = fall.shown
    labels = [shortened(bar.label, _STEP_LABEL) for bar in fall.bars]
    values = [shown.value(*bar.terms) for bar in fall.bars]
    shares = [shown.share(*bar.terms) for bar in fall.bars]
    if fall.bars:
        labels, values = [*labels, "total"], [*values, shown.value()]
        shares.append(shown.share())
    scale = _scale(labels, values, shares, fall.total)
    top = MARGIN + TITLE_LINE
    bottom = top + ROW * len(labels) + 4

    def draw(place: int, y: float) -> Iterator[str]:
        return _step_bar(fall, place, scale, y)

    body = [_title(title), *_rows(scale, (labels, values, shares), top, draw)]
    body.extend(scale.axis(bottom, "s"))
    drawn, end = key(_entries(fall), left=scale.left, right=PAGE - MARGIN, top=bottom + 32)
    return figure(
        [*body, *drawn],
        name=title,
        description=_says(fall),
        rules=style(RULES + _tone_fills(), DARK),
        width=PAGE,
        height=end + MARGIN,
    )


def _title(title: str) -> str:
    return text(MARGIN, MARGIN + 14, shortened(title, (PAGE - 2 * MARGIN) / 1.15, 14), "title")


def _widest(words: Sequence[str]) -> float:
    return max((text_width(one, TEXT) for one in words), default=0.0)


def _scale(
    labels: Sequence[str], values: Sequence[str], shares: Sequence[str], span: float
) -> Scale:
    """Return where bars lie, between their labels and the columns of values and shares."""
    return Scale(
        left=MARGIN + _widest(labels) + 8,
        right=PAGE - MARGIN - _widest(values) - _widest(shares) - 20,
        span=span,
    )


def _rows(
    scale: Scale,
    columns: tuple[Sequence[str], Sequence[str], Sequence[str]],
    top: float,
    draw: Callable[[int, float], Iterator[str]],
) -> Iterator[str]:
    """Yield each row: its label, what `draw` makes of its place and top, its value and share."""
    widest = _widest(columns[2])
    for place, (label, value, share) in enumerate(zip(*columns, strict=True)):
        y = top + ROW * place
        yield text(scale.left - 8, y + 15, label, "rank")
        yield from draw(place, y)
        yield text(PAGE - MARGIN - widest - 10, y + 15, value, "value")
        yield text(PAGE - MARGIN, y + 15, share, "value")


def _memory_bar(bars: MemoryBars, row: MemoryRow, scale: Scale, y: float) -> Iterator[str]:
    yield rect("idle", scale.left, y, scale.right - scale.left, BOX)
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


def _class(kind: TermStyle) -> str:
    return f"box kind{kind.letter}"


def _memory_fills(bars: MemoryBars) -> str:
    return "".join(
        f".kind{kind.letter} {{ fill: {fill(kind.hue, _LIGHT)}; }}\n" for kind in bars.kinds
    )


def _step_bar(fall: Waterfall, place: int, scale: Scale, y: float) -> Iterator[str]:
    """Yield the bar at `place`, with the line that joins it to the next; the total is the last."""
    if place == len(fall.bars):
        yield rect("idle", scale.left, y, scale.x(fall.total) - scale.left, BOX)
        return
    bar = fall.bars[place]
    at = bar.start
    for tone, seconds in bar.parts.items():
        start, end = scale.x(at), scale.x(at + seconds)
        yield rect(f"box {tone}", start, y, end - start, BOX, _tip(fall, bar))
        at += seconds
    end = scale.x(bar.stop)
    yield line(end, y + BOX, end, y + ROW, "join")


def _tip(fall: Waterfall, bar: WaterfallBar) -> str:
    names = "" if len(bar.terms) == 1 else f" ({', '.join(bar.terms)})"
    tones = ", ".join(TONES[tone][1] for tone in bar.parts)
    value, share = fall.shown.value(*bar.terms), fall.shown.share(*bar.terms)
    return f"{bar.label}{names}: {value}, {share}, {tones}"


def _entries(fall: Waterfall) -> Iterator[tuple[list[str], str]]:
    for tone, (_, name) in TONES.items():
        if terms := fall.of_tone(tone):
            yield [f"box {tone}"], f"{name} {fall.shown.share(*terms)}"


def _says(fall: Waterfall) -> str:
    if not fall.bars:
        return "A step takes no time"
    bars = [f"{bar.label} {fall.shown.value(*bar.terms)}" for bar in fall.bars]
    return f"A step takes {fall.shown.value()}: {', '.join(bars)}"


def _tone_fills() -> str:
    return "".join(
        f".{tone} {{ fill: {fill(hue, _LIGHT, saturation)}; }}\n"
        for tone, (hue, saturation) in HUES.items()
    )
