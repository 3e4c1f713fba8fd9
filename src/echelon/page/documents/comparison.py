# SPDX-License-Identifier: Apache-2.0
"""The page of two plans, or two runs, side by side: what differs, and what becomes of it.

Where both are folders of runs, what each did at the same step stands on one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from echelon.core.settings.value_types import toml_text
from echelon.core.units import binary_bytes, decimal_bytes, duration, short_count
from echelon.page.documents.curves import LOSS, MOST_POINTS, NORM, SECONDS, sampled
from echelon.planner.explain.compare import PlanComparison, SettingDifference
from echelon.planner.view.document import (
    BarRow,
    BarsFigure,
    DataTable,
    Fact,
    LineSeries,
    LinesFigure,
    PageDocument,
    Section,
)
from echelon.telemetry.events import METRICS_FILE
from echelon.telemetry.json_lines import LogEntry, last_of_each_step, read_entries

_LARGE = 1000  # a ratio


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}ms" if seconds < 1 else duration(seconds)


_PARTS: Mapping[str, tuple[str, str, Callable[[float], str]]] = {
    "held": ("Bytes between steps", "Between steps the fullest rank holds:", binary_bytes),
    "step": (
        "Bytes that a step adds",
        "While a step runs it holds too, at most, beside activations:",
        binary_bytes,
    ),
    "sent": (
        "Bytes sent in a step",
        "In a step the busiest rank sends, over each axis:",
        decimal_bytes,
    ),
    "seconds": ("Seconds of a step", "A step takes, by the planner's estimate:", _time),
}
"""Parts of a plan that are compared: a title, a sentence, and how amounts are written."""


def comparison_page(found: PlanComparison, a: str, b: str) -> PageDocument:
    """Return the page of two plans that are called `a` and `b`; folders of runs are read."""
    return PageDocument(
        title=f"{a} and {b}",
        subject=f"A: {a}, {found.a.plan.mesh.world_size:,} ranks; B: {b}, "
        f"{found.b.plan.mesh.world_size:,} ranks",
        verdict=verdict_of_comparison(found),
        good=found.same_mathematics,
        facts=tuple(_facts(found)),
        sections=(*_differences(found), *_runs(a, b), *part_sections(found)),
    )


def verdict_of_comparison(found: PlanComparison) -> str:
    """Return in a sentence whether both must give the same numbers."""
    if not found.same_mathematics:
        count = sum(one.changes_numbers for one in found.differences)
        settings = "1 setting changes" if count == 1 else f"{count} settings change"
        return f"Other mathematics: {settings} the numbers of a run."
    if found.same_layout:
        return "The same mathematics and the same layout."
    return "The same mathematics in another layout: both must give the same numbers."


def what_changes(one: SettingDifference) -> str:
    """Return what a setting that differs changes."""
    if one.setting == "cluster":
        return "cluster"
    return "numbers" if one.changes_numbers else "layout"


def _facts(found: PlanComparison) -> Iterator[Fact]:
    first, second = (sum(side.seconds.values()) for side in (found.a, found.b))
    yield Fact("step of A, planned", f"{first:.4g} s")
    yield Fact("step of B, planned", f"{second:.4g} s", f"{second / first:.2f} of A")
    held = [sum(side.held.values()) for side in (found.a, found.b)]
    yield Fact("held between steps, A", binary_bytes(held[0]))
    yield Fact("held between steps, B", binary_bytes(held[1]), f"{held[1] / held[0]:.2f} of A")


def _differences(found: PlanComparison) -> Iterator[Section]:
    if not found.differences:
        return
    yield Section(
        id="differences",
        title="Settings that differ",
        summary=f"{len(found.differences)} settings differ.",
        table=DataTable(
            head=("setting", "A", "B", "changes"),
            rows=tuple(
                (one.setting, value_text(one.a), value_text(one.b), what_changes(one))
                for one in found.differences
            ),
        ),
    )


def value_text(value: object) -> str:
    """Value of a setting; "none" where a plan has no such setting."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else toml_text(value)


def part_sections(found: PlanComparison) -> Iterator[Section]:
    """Yield bytes and seconds of both plans by term, with their sums, each B as a part of A."""
    theirs = found.b.parts()
    for part, ours in found.a.parts().items():
        title, sentence, text = _PARTS[part]
        terms = {
            name: (ours.get(name, 0), theirs[part].get(name, 0))
            for name in dict.fromkeys((*ours, *theirs[part]))
        }
        terms = {name: pair for name, pair in terms.items() if any(pair)}
        if terms:
            sums = {"together": (sum(ours.values()), sum(theirs[part].values()))}
            yield Section(
                id=f"part-{part}",
                title=title,
                summary=sentence,
                figure=BarsFigure(
                    kinds=tuple(terms),
                    rows=tuple(
                        BarRow.of(label, [pair[side] for pair in terms.values()], text)
                        for side, label in enumerate("AB")
                    ),
                ),
                table=DataTable.of(
                    ("", "A", "B", "B / A"),
                    [
                        (name, text(a), text(b), _ratio(a, b))
                        for name, (a, b) in {**terms, **sums}.items()
                    ],
                ),
            )


def _ratio(ours: float, theirs: float) -> str:
    if not ours:
        return "-"
    ratio = theirs / ours
    return f"{ratio:.2f}" if ratio < _LARGE else short_count(ratio)


def _runs(a: str, b: str) -> Iterator[Section]:
    """Yield what both runs did at the same steps, where both are folders of runs."""
    found = [_steps(Path(one)) for one in (a, b)]
    if not all(found):
        return
    numbers = sorted({step for side in found for step in side})
    shown = [numbers[place] for place in sampled(range(len(numbers)), MOST_POINTS)]
    for curve in (LOSS, NORM, SECONDS):
        series = tuple(
            LineSeries(
                name=label,
                values=tuple(
                    side[step].number(curve.key) if step in side else None for step in shown
                ),
            )
            for label, side in zip(("A", "B"), found, strict=True)
        )
        yield Section(
            id=curve.id,
            title=curve.title,
            summary=_apart(series),
            figure=LinesFigure(
                unit=curve.unit, steps=tuple(shown), series=series, planned=None, planned_text=""
            ),
        )


def _steps(path: Path) -> dict[int, LogEntry]:
    file = path / METRICS_FILE
    if not file.is_file():
        return {}
    entries = last_of_each_step(one for one in read_entries(file) if one.text("kind") == "step")
    return {one.whole("step"): one for one in entries}


def _apart(series: Sequence[LineSeries]) -> str:
    """Return how far two lines are apart at most, of the steps that both have."""
    pairs = zip(series[0].values, series[1].values, strict=True)
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    if not both:
        return "No step is in both."
    most = max(abs(one - other) for one, other in both)
    return f"{len(both):,} steps are in both; they differ by {most:.3g} at most."
