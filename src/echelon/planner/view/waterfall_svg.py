"""The waterfall of a step as one SVG figure: lengths are proportional to seconds."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.svg import figure, fill, key, line, rect, style, text, text_width
from echelon.planner.view.kinds import TONES
from echelon.planner.view.scale import (
    BOX,
    DARK,
    MARGIN,
    PAGE,
    ROW,
    RULES,
    TEXT,
    TITLE_LINE,
    Scale,
    shortened,
)
from echelon.planner.view.waterfall import HUES, Bar, Waterfall

_LABEL = 170
_LIGHT = 0.74


def waterfall_svg(fall: Waterfall, *, title: str = "Seconds of a step") -> str:
    """Return the waterfall as a figure; a pointer on a bar shows its term, seconds and tone."""
    shown = fall.shown
    labels = [shortened(bar.label, _LABEL) for bar in fall.bars]
    values = [shown.value(*bar.terms) for bar in fall.bars]
    shares = [shown.share(*bar.terms) for bar in fall.bars]
    if fall.bars:
        labels, values = [*labels, "total"], [*values, shown.value()]
        shares.append(shown.share())
    numbers = [max(map(_width, one), default=0.0) for one in (values, shares)]
    scale = Scale(
        left=MARGIN + max(map(_width, labels), default=0.0) + 8,
        right=PAGE - MARGIN - sum(numbers) - 20,
        span=fall.total,
    )
    top = MARGIN + TITLE_LINE
    body = [text(MARGIN, MARGIN + 14, shortened(title, (PAGE - 2 * MARGIN) / 1.15, 14), "title")]
    for place, label in enumerate(labels):
        y = top + ROW * place
        body.append(text(scale.left - 8, y + 15, label, "rank"))
        body.extend(_bar(fall, place, scale, y))
        body.append(text(PAGE - MARGIN - numbers[1] - 10, y + 15, values[place], "value"))
        body.append(text(PAGE - MARGIN, y + 15, shares[place], "value"))
    bottom = top + ROW * len(labels) + 4
    body.extend(scale.axis(bottom, "s"))
    drawn, end = key(_entries(fall), left=scale.left, right=PAGE - MARGIN, top=bottom + 32)
    return figure(
        [*body, *drawn],
        name=title,
        description=_says(fall),
        rules=style(RULES + _fills(), DARK),
        width=PAGE,
        height=end + MARGIN,
    )


def _bar(fall: Waterfall, place: int, scale: Scale, y: float) -> Iterator[str]:
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


def _tip(fall: Waterfall, bar: Bar) -> str:
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


def _width(words: str) -> float:
    return text_width(words, TEXT)


def _fills() -> str:
    return "".join(
        f".{tone} {{ fill: {fill(hue, _LIGHT, saturation)}; }}\n"
        for tone, (hue, saturation) in HUES.items()
    )
