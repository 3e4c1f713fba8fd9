# SPDX-License-Identifier: Apache-2.0
"""The curves of a run: what it wrote of each step, as lines.

Of many steps so many are drawn that the page stays small: those of each stretch of the run with the
highest and the lowest loss, and the slowest, among them, so that no peak is lost. What is said of a
curve in words is said of all of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from echelon.core.units import binary_bytes
from echelon.planner.predict.estimate import Estimate
from echelon.planner.view.document import DataTable, LineSeries, LinesFigure, Section
from echelon.telemetry.json_lines import LogEntry

T = TypeVar("T")

MOST_POINTS = 800
"""Steps that a line is drawn through."""
MOST_ROWS = 40
"""Steps that a table lists."""
MOST_RANKS = 16
"""Ranks that have a line of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Say what is drawn of one number of each step: its part of the page, unit, and name."""

    id: str
    title: str
    unit: str
    key: str


LOSS = Curve(id="loss", title="Loss", unit="loss", key="loss")
NORM = Curve(id="norm", title="Gradient norm", unit="norm", key="grad_norm")
_RATE = Curve(id="rate", title="Learning rate", unit="rate", key="learning_rate")
SECONDS = Curve(id="seconds", title="Seconds of each step", unit="s", key="step_s")
_EXPERTS = Curve(
    id="experts",
    title="Load of experts: the busiest over the mean",
    unit="x",
    key="imbalance",
)
_WAITS = Curve(id="waits", title="Waits of each rank", unit="s", key="rank_waits_s")
_USED = Curve(id="used", title="Memory of each rank", unit="bytes", key="rank_used_bytes")


def curve_sections(
    steps: Sequence[LogEntry], validations: Sequence[LogEntry], estimate: Estimate
) -> Iterator[Section]:
    """Yield the parts that draw what a run wrote of each step."""
    places = drawn_places(steps, MOST_POINTS)
    validated = {one.whole("step"): one.number("loss") for one in validations}
    checked = [at for at, step in enumerate(steps) if step.whole("step") in validated]
    shown = [steps[at] for at in sorted({*places, *sampled(checked, MOST_POINTS // 4)})]
    drawn = [steps[at] for at in places]
    losses = [step.number("loss") for step in steps]
    series = [_series("loss", shown, "loss")]
    if any(value is not None for value in validated.values()):
        values = tuple(validated.get(step.whole("step")) for step in shown)
        series.append(LineSeries(name="validation loss", values=values, joined=True))
    yield Section(
        id="loss",
        title="Loss",
        summary=_moves("The loss", losses) + _some(len(shown), len(steps)),
        figure=_figure("loss", shown, series),
        table=_table(steps),
    )
    yield _line(NORM, steps, drawn)
    yield _line(_RATE, steps, drawn)
    yield _line(SECONDS, steps, drawn, (estimate.step_s, f"{estimate.step_s:.4g} s"))
    yield from _rank_lines(_WAITS, steps, drawn)
    yield from _rank_lines(_USED, steps, drawn)
    if routed := [step for step in steps if "imbalance" in step.values]:
        yield _line(_EXPERTS, routed, [routed[at] for at in drawn_places(routed, MOST_POINTS)])


def sampled(steps: Sequence[T], most: int) -> list[T]:
    """Return `most` steps at most, evenly spaced, with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    last = len(steps) - 1
    places = sorted({round(place * last / (most - 1)) for place in range(most)})
    return [steps[place] for place in places]


def drawn_places(steps: Sequence[LogEntry], most: int) -> list[int]:
    """Return the places of the steps that are drawn, `most` at most, in rising order.

    They are the first, the last, and of each stretch the highest and the lowest loss and the
    slowest.
    """
    if len(steps) <= most:
        return list(range(len(steps)))
    stretches = (most - 2) // 3
    losses = [step.number("loss") for step in steps]
    seconds = [step.number("step_s") or 0.0 for step in steps]
    places = {0, len(steps) - 1}
    for stretch in range(stretches):
        begin, end = (len(steps) * at // stretches for at in (stretch, stretch + 1))
        places.add(max(range(begin, end), key=seconds.__getitem__))
        there = [(value, at) for at in range(begin, end) if (value := losses[at]) is not None]
        if there:
            places |= {max(there)[1], min(there)[1]}
    return sorted(places)


def _series(name: str, steps: Sequence[LogEntry], key: str) -> LineSeries:
    return LineSeries(name=name, values=tuple(step.number(key) for step in steps))


def _figure(
    unit: str,
    steps: Sequence[LogEntry],
    series: Sequence[LineSeries],
    planned: tuple[float, str] | None = None,
) -> LinesFigure:
    return LinesFigure(
        unit=unit,
        steps=tuple(step.whole("step") for step in steps),
        series=tuple(series),
        planned=None if planned is None else planned[0],
        planned_text="" if planned is None else planned[1],
    )


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _moves(name: str, values: Sequence[float | None], text: Callable[[float], str] = _plain) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return f"{name} was not written."
    first, last, least, most = map(text, (there[0], there[-1], min(there), max(there)))
    return f"{name} goes from {first} to {last}; the least is {least}, the most {most}."


def _some(drawn: int, count: int) -> str:
    """Return what is said where not every step is drawn."""
    if drawn == count:
        return ""
    return (
        f" {drawn:,} of {count:,} steps are drawn: of each stretch those of the highest and the "
        "lowest loss, and the slowest."
    )


def _line(
    curve: Curve,
    steps: Sequence[LogEntry],
    drawn: Sequence[LogEntry],
    planned: tuple[float, str] | None = None,
) -> Section:
    values = [step.number(curve.key) for step in steps]
    series = [_series(curve.title.lower(), drawn, curve.key)]
    return Section(
        id=curve.id,
        title=curve.title,
        summary=_moves(curve.title, values),
        figure=_figure(curve.unit, drawn, series, planned),
    )


def _rank_lines(
    curve: Curve, steps: Sequence[LogEntry], drawn: Sequence[LogEntry]
) -> Iterator[Section]:
    """Yield a line for each of the first ranks, where steps say something of each rank."""
    rows = [_list(step.values.get(curve.key)) for step in drawn]
    count = max(map(len, rows), default=0)
    if not count:
        return
    shown = range(min(count, MOST_RANKS))
    series = [
        LineSeries(
            name=f"rank {rank}",
            values=tuple(row[rank] if rank < len(row) else None for row in rows),
        )
        for rank in shown
    ]
    more = f" The first {len(shown)} of {count} ranks are drawn." if len(shown) < count else ""
    every = [value for step in steps for value in _list(step.values.get(curve.key))]
    text = binary_bytes if curve.unit == "bytes" else _plain
    yield Section(
        id=curve.id,
        title=curve.title,
        summary=_moves(curve.title, every, text) + more,
        figure=_figure(curve.unit, drawn, series),
    )


def _list(value: object) -> list[float | None]:
    if not isinstance(value, list):
        return []
    return [_finite(one) for one in value]


def _finite(value: object) -> float | None:
    """Return a number that can be drawn; None for anything else that a file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -1e300 < value < 1e300 else None


def _table(steps: Sequence[LogEntry]) -> DataTable:
    keys = ("loss", "grad_norm", "learning_rate", "step_s")
    return DataTable(
        head=("step", "loss", "gradient norm", "learning rate", "seconds", "tokens"),
        rows=tuple(
            (
                f"{step.whole('step'):,}",
                *("-" if (v := step.number(key)) is None else f"{v:.6g}" for key in keys),
                f"{step.whole('tokens'):,}",
            )
            for step in sampled(steps, MOST_ROWS)
        ),
        right=(0, 1, 2, 3, 4, 5),
    )
