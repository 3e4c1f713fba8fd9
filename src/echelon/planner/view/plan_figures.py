# SPDX-License-Identifier: Apache-2.0
"""Figures of a plan: bytes of each rank by kind, and seconds of a step by term.

Rows of a plan are what each pipeline rank holds at its peak (`predict/estimate.py`): a bound, as
the parts need not be at their most at the same time. A CPU's device is the memory of its host:
there what rests on the host counts too. Above them stands the fullest rank as it is planned, with
what a process and an allocator hold back; ranks get as much of that.

In the waterfall of a step each term is a bar that starts where the last one ended. Terms under half
a percent are one bar, "other". Texts add up to the text of the total exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import fsum, isfinite

from echelon.core.plan import Plan
from echelon.core.units import binary_bytes
from echelon.cost.peak.rank_peak import TERMS
from echelon.layout.stage import rank_part
from echelon.planner.predict.estimate import peak_bytes_by_place
from echelon.planner.view.document import (
    BarRow,
    BarsFigure,
    Tone,
    WaterfallBarPart,
    WaterfallFigure,
    WaterfallRow,
    WaterfallTone,
)
from echelon.planner.view.terms import (
    MOST_TERMS_SHOWN,
    OTHER,
    TONES,
    RoundedTerms,
    require_valid_terms,
    round_seconds,
    tone_of,
)

PLANNED = "fullest, planned"
"""The row of the fullest rank as the planner has it, above those of the ranks."""
_OF_A_PROCESS = ("slack", "context", "nccl")
_LEAST_SHARE = 0.005  # of the step


def plan_bars(plan: Plan, held: Mapping[str, float]) -> BarsFigure:
    """Return bars of a plan's ranks below `held`, the terms of the fullest one; {} has no bar."""
    planned = [(PLANNED, held)] if held else []
    ranks = [
        (label, {**terms, **_beside(terms, held)}) for label, terms in memory_rows_from_plan(plan)
    ]
    return memory_bars([*planned, *ranks], plan.cluster.device.memory_bytes)


def _beside(terms: Mapping[str, float], held: Mapping[str, float]) -> dict[str, float]:
    """Return bytes that an allocator and a process hold back on a rank, as they do in `held`."""
    beside = {name: held[name] for name in _OF_A_PROCESS if name in held}
    used = fsum(held.values()) - fsum(beside.values())
    if "slack" in beside:
        beside["slack"] *= fsum(terms.values()) / used if used > 0 else 0.0
    return beside


def memory_rows_from_plan(plan: Plan) -> list[tuple[str, dict[str, float]]]:
    """Return (label, bytes by term) of each pipeline rank; those alike that follow are one row."""
    places = range(plan.mesh.pp)
    stages = [[part.stage for part in rank_part(plan, pp).stages] for pp in places]
    word = "stage" if stages == [[pp] for pp in places] else "pp rank"
    found = [{name: held[name] for name in TERMS} for held in peak_bytes_by_place(plan)]
    rows: list[tuple[str, dict[str, float]]] = []
    for _, run in groupby(places, key=lambda pp: [*found[pp].values()]):
        alike = [*run]
        many = f"s {alike[0]}-{alike[-1]}" if len(alike) > 1 else f" {alike[0]}"
        rows.append((word + many, found[alike[0]]))
    return rows


def memory_bars(rows: Sequence[tuple[str, Mapping[str, float]]], limit_bytes: float) -> BarsFigure:
    """Return bars of (label, bytes by kind), in this order, beside `limit_bytes` of memory.

    Kinds stand in the order in which rows name them first. Where there are too many to tell them
    apart, the smallest are one kind, "other". ValueError for bytes that are no number from 0 up.
    """
    if not (isfinite(limit_bytes) and limit_bytes >= 0):
        raise ValueError(f"limit_bytes is {limit_bytes}, not a number from 0 up")
    numbers = [(label, require_valid_terms(terms)) for label, terms in rows]
    most: dict[str, float] = {}
    for _, terms in numbers:
        for name, held in terms.items():
            most[name] = max(most.get(name, 0.0), held)
    names = [name for name, held in most.items() if held > 0]
    if len(names) > MOST_TERMS_SHOWN:
        kept = sorted((n for n in names if n != OTHER), key=lambda name: -most[name])
        large = {*kept[: MOST_TERMS_SHOWN - 1]}
        names = [*(name for name in names if name in large), OTHER]
    return BarsFigure(
        kinds=tuple(names),
        limit=float(limit_bytes),
        limit_text=binary_bytes(limit_bytes) if limit_bytes else "",
        rows=tuple(_bar(label, terms, names, limit_bytes) for label, terms in numbers),
    )


def _bar(label: str, terms: Mapping[str, float], names: Sequence[str], limit: float) -> BarRow:
    held = {name: terms.get(name, 0.0) for name in names}
    rest = fsum(value for name, value in terms.items() if name not in held)
    if rest:
        held[OTHER] = held.get(OTHER, 0.0) + rest
    total = fsum(held.values())
    return BarRow(
        label=label,
        values=tuple(held.values()),
        texts=tuple(map(binary_bytes, held.values())),
        total=total,
        total_text=binary_bytes(total),
        share_text=_share(total, limit),
        over=total > limit,
    )


def _share(total: float, limit: float) -> str:
    """Return how much of a device a row takes, in %; never 100.0 where it does not fit."""
    if limit <= 0:
        return ""
    percent = 100 * total / limit
    if percent >= 1000:
        return ">999 %"
    shown = f"{percent:.1f}"
    return ">100 %" if total > limit and shown == "100.0" else f"{shown} %"


def bar_sentence(figure: BarsFigure, row: BarRow) -> str:
    """Return what a row holds of what the device has, in words."""
    of = f" of {figure.limit_text} ({row.share_text})" if figure.limit > 0 else ""
    return f"{row.label} holds {row.total_text}{of}"


def waterfall(
    terms: Mapping[str, float], band: tuple[float, float] | None = None
) -> WaterfallFigure:
    """Return the bars of a step's seconds by term, in this order, "other" last.

    `band` is where measured steps lie, the step itself without one. ValueError for seconds that are
    no number from 0 up.
    """
    numbers = {name: seconds for name, seconds in require_valid_terms(terms).items() if seconds > 0}
    total, shown = fsum(numbers.values()), round_seconds(numbers)
    least = _LEAST_SHARE * total
    small = {name: seconds for name, seconds in numbers.items() if seconds < least or name == OTHER}
    groups = {name: {name: numbers[name]} for name in numbers if name not in small}
    if small:
        groups[OTHER] = small
    rows: list[WaterfallRow] = []
    reached: list[float] = []
    for label, seconds in groups.items():
        rows.append(_waterfall_row(label, fsum(reached), seconds, shown))
        reached.extend(seconds.values())
    low, high = band or (total, total)
    return WaterfallFigure(
        rows=tuple(rows),
        tones=tuple(_tones(numbers, shown)),
        others=tuple(small),
        total=total,
        total_text=shown.value(),
        low=low,
        high=high,
        band_text=f"{low:.4g} to {high:.4g} s",
    )


def _waterfall_row(
    label: str, start: float, seconds: Mapping[str, float], shown: RoundedTerms
) -> WaterfallRow:
    parts: dict[Tone, float] = {
        tone: fsum(seconds[name] for name in _of_tone(seconds, tone)) for tone in TONES
    }
    return WaterfallRow(
        label=label,
        start=start,
        parts=tuple(
            WaterfallBarPart(tone=tone, seconds=length)
            for tone, length in parts.items()
            if length > 0
        ),
        text=shown.value(*seconds),
        share_text=shown.share(*seconds),
    )


def _tones(seconds: Mapping[str, float], shown: RoundedTerms) -> Iterator[WaterfallTone]:
    for tone, name in TONES.items():
        if terms := _of_tone(seconds, tone):
            yield WaterfallTone(
                tone=tone, name=name, text=shown.value(*terms), share_text=shown.share(*terms)
            )


def _of_tone(seconds: Mapping[str, float], tone: Tone) -> list[str]:
    return [name for name in seconds if tone_of(name) == tone]
