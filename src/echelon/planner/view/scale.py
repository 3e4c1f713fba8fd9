"""Places on the page of a figure: where a value lies, its axis, and what all figures share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from echelon.core.svg import line, text, text_width
from echelon.schedule.time_axis import ticks

PAGE = 760
"""The pixels of a figure's width."""
MARGIN = 16  # pixels
ROW = 26  # pixels
BOX = 22  # pixels
TITLE_LINE = 26  # pixels
TEXT = 12  # pixels
TICK = 11  # pixels

RULES = """\
.value { font-size: 12px; fill: #444c56; text-anchor: end; }
.over { fill: none; stroke: #cf222e; stroke-width: 2; }
.limit { stroke: #cf222e; stroke-width: 1.5; stroke-dasharray: 5 3; }
.join { stroke: #8b949e; stroke-width: 1; stroke-dasharray: 2 2; }
"""
DARK = """\
  .value { fill: #b1bac4; }
  .over, .limit { stroke: #ff7b72; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Say where values from 0 to `span` lie between `left` and `right`."""

    left: float
    right: float
    span: float

    def x(self, value: float) -> float:
        """Return how far to the right `value` lies."""
        share = value / self.span if self.span > 0 else 0.0
        return self.left + (self.right - self.left) * share

    def axis(self, top: float, unit: str, per_unit: float = 1.0) -> Iterator[str]:
        """Yield a line with a mark at each round value and as many labels as there is room for.

        A `unit` is `per_unit` of what values count; seconds become ms, us or ns where they must.
        """
        yield line(self.left, top, self.right, top)
        scale, found, name = ticks(self.span / per_unit, unit)
        labels = [f"{tick * scale:.6g}" for tick in found]
        labels[-1] += f" {name}"
        places = [self.x(tick * per_unit) for tick in found]
        widest = max(text_width(label, TICK) for label in labels) + 6
        step = places[1] - places[0] if len(places) > 1 else widest
        every = ceil(widest / step) if step > 0 else len(places)
        for count, (label, x) in enumerate(zip(reversed(labels), reversed(places), strict=True)):
            yield line(x, top, x, top + 5)
            if count % every == 0:
                yield text(x, top + 18, label, "tick")


def shortened(words: str, width: float, size: float = TEXT) -> str:
    """Return `words`, or as much of them as `width` pixels hold, with dots."""
    if text_width(words, size) <= width:
        return words
    kept = words
    while kept and text_width(kept + "..", size) > width:
        kept = kept[:-1]
    return kept + ".."
