# SPDX-License-Identifier: Apache-2.0
"""The waterfall of a step: each term is a bar that starts where the last one ended.

    products    ==================                          4.321 s   43.2 %
    tensor                        ####                      1.000 s   10.0 %
    bubble                            ....                  1.000 s   10.0 %

Marks say what the seconds are: compute, exposed communication, or idle. Terms under half a
percent are one bar, "other". What is printed adds up to the total exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from rich.cells import cell_len

from echelon.planner.view.lines import WIDTH, Span, TextLine, mark_color, pad_text, truncate_text
from echelon.planner.view.terms import (
    OTHER,
    TONES,
    RoundedTerms,
    Tone,
    require_valid_terms,
    round_seconds,
    tone_of,
)

_LEAST_SHARE = 0.005  # of the step
HUES: Mapping[Tone, tuple[int, float]] = {
    "compute": (212, 0.72),
    "communication": (36, 0.72),
    "idle": (212, 0.06),
}
"""The hue and the saturation of each tone."""
_LONGEST_LABEL = 20  # columns of text


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallBar:
    """Hold the seconds of one bar by term, and where it starts; several terms are "other"."""

    label: str
    start: float
    terms: Mapping[str, float]

    @property
    def stop(self) -> float:
        """Return where the bar ends."""
        return self.start + fsum(self.terms.values())

    @property
    def parts(self) -> dict[Tone, float]:
        """Return the seconds of the bar by tone; tones that it has nothing of are left out."""
        found: dict[Tone, float] = {
            tone: fsum(_terms_of_tone(self.terms, tone).values()) for tone in TONES
        }
        return {tone: seconds for tone, seconds in found.items() if seconds > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """Hold the seconds of a step by term, its bars, and the numbers as they are printed."""

    terms: Mapping[str, float]
    bars: tuple[WaterfallBar, ...]
    shown: RoundedTerms

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return fsum(self.terms.values())

    def of_tone(self, tone: Tone) -> tuple[str, ...]:
        """Return the terms of a tone."""
        return tuple(_terms_of_tone(self.terms, tone))

    def lines(self, *, columns: int = WIDTH) -> list[TextLine]:
        """Return the bars, and the tones, as lines of 80 columns at most."""
        if not self.bars:
            return [(Span("(a step takes no time)"),)]
        return [*_lines(self, columns=columns)]


def waterfall(terms: Mapping[str, float]) -> Waterfall:
    """Return the bars of a step's seconds by term, in this order, "other" last.

    ValueError for seconds that are no number from 0 up.
    """
    numbers = {name: seconds for name, seconds in require_valid_terms(terms).items() if seconds > 0}
    total = fsum(numbers.values())
    least = _LEAST_SHARE * total
    small = {name: seconds for name, seconds in numbers.items() if seconds < least or name == OTHER}
    bars: list[WaterfallBar] = []
    at: list[float] = []
    for name, seconds in numbers.items():
        if name not in small:
            bars.append(WaterfallBar(label=name, start=fsum(at), terms={name: seconds}))
            at.append(seconds)
    if small:
        bars.append(WaterfallBar(label=OTHER, start=fsum(at), terms=small))
    return Waterfall(terms=numbers, bars=tuple(bars), shown=round_seconds(numbers))


def _terms_of_tone(terms: Mapping[str, float], tone: Tone) -> dict[str, float]:
    return {name: seconds for name, seconds in terms.items() if tone_of(name) == tone}


def _lines(fall: Waterfall, *, columns: int) -> Iterator[TextLine]:
    shown = fall.shown
    labels = [truncate_text(bar.label, _LONGEST_LABEL) for bar in fall.bars]
    margin = max(len("total"), *map(cell_len, labels))
    width = len(shown.value())
    room = max(columns - margin - width - 13, 1)
    for bar, label in zip(fall.bars, labels, strict=True):
        yield (
            Span(pad_text(label, margin) + "  "),
            *_marks(bar, fall.total, room),
            *_numbers(shown, bar.terms, width),
        )
    yield (Span(pad_text("total", margin) + " " * (room + 2)), *_numbers(shown, (), width))
    yield ()
    for tone, (mark, name) in TONES.items():
        terms = fall.of_tone(tone)
        if terms:
            yield (
                Span(mark, mark_color(*HUES[tone])),
                Span(pad_text(f" {name}", margin + room + 1)),
                *_numbers(shown, terms, width),
            )
    if fall.bars[-1].label == OTHER:
        yield (Span(truncate_text(f"other: {', '.join(fall.bars[-1].terms)}", columns)),)


def _marks(bar: WaterfallBar, total: float, room: int) -> Iterator[Span]:
    """Yield the `room` columns of a bar, with one mark at least."""
    first = min(round(bar.start / total * room), room - 1)
    last = min(max(round(bar.stop / total * room), first + 1), room)
    yield Span(" " * first)
    parts = bar.parts
    whole, reached, at = fsum(parts.values()), 0.0, 0
    for tone, seconds in parts.items():
        reached += seconds
        stop = min(round(reached / whole * (last - first)), last - first)
        yield Span(TONES[tone][0] * (stop - at), mark_color(*HUES[tone]))
        at = stop
    yield Span(" " * (room - first - at))


def _numbers(
    shown: RoundedTerms, terms: Mapping[str, float] | Sequence[str], width: int
) -> Iterator[Span]:
    yield Span(f"  {shown.value(*terms).rjust(width)}  {shown.share(*terms).rjust(7)}")
