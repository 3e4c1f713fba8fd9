# SPDX-License-Identifier: Apache-2.0
"""The seconds of a step: each bar starts where the one before it ended."""

from __future__ import annotations

from echelon.page.drawn.bars import HIGH, ROW, columns, row_words
from echelon.page.drawn.marks import (
    PAGE,
    STRONG,
    TONES,
    Drawing,
    box,
    empty,
    finite,
    key,
    paragraph,
    stroke,
)
from echelon.page.figures import WaterfallFigure

NAMES = {"communication": "exposed communication"}
"""What a tone is called, where it is not by its name."""


def draw_waterfall(found: WaterfallFigure, name: str, says: str) -> Drawing:
    """Return the drawing of a step's seconds, its total with the band of measured runs last."""
    tones = dict.fromkeys(part.tone for row in found.rows for part in row.parts)
    body, top = key([(TONES[tone], NAMES.get(tone, tone)) for tone in tones], top=0)
    rows = [(row.label, row.text, row.share_text) for row in found.rows]
    left, right = columns([*rows, ("step", found.total_text, "")])
    scale = (right - left) / (max(finite(found.high), finite(found.total)) or 1.0)
    for place, row in enumerate(found.rows):
        x, y = left + finite(row.start) * scale, top + ROW * place
        body += [*row_words(rows[place], y), empty((left, y, right - left, HIGH))]
        for part in row.parts:
            width = finite(part.seconds) * scale
            tip = f"{row.label}: {row.text}, {NAMES.get(part.tone, part.tone)}"
            body.append(box((x, y, width, HIGH), TONES[part.tone], tip=tip))
            x += width
    y = top + ROW * len(rows) + 6
    low, high = left + finite(found.low) * scale, left + finite(found.high) * scale
    total = left + finite(found.total) * scale
    body += [
        stroke(0, y - 4, (PAGE, y - 4)),
        *row_words(("step", found.total_text, ""), y, look=STRONG),
        empty((left, y, right - left, HIGH)),
        box((low, y + 5, max(high - low, 0), HIGH - 10), "currentColor", faint=0.35),
        stroke(total, y - 2, (total, y + HIGH + 2), width=2),
    ]
    said = f"The faint bar is where four of five measured runs lie: {found.band_text}."
    drawn, bottom = paragraph(said, 0, y + ROW, PAGE)
    return Drawing(name=name, description=says, width=PAGE, height=bottom, body=(*body, *drawn))
