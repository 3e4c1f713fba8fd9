"""Of many steps those are drawn that matter: no peak is lost, and words are about all of them."""

from __future__ import annotations

from pathlib import Path

from echelon.page.documents.curves import MOST_POINTS, drawn_places, sampled
from echelon.page.documents.run import run_page
from echelon.planner.view.document import LinesFigure
from echelon.telemetry.json_lines import LogEntry
from tests.page.documents.test_run import part, steps, written


def entries(count: int, peaks: dict[int, float], slow: dict[int, float]) -> list[LogEntry]:
    return [
        LogEntry(
            path=Path("metrics.jsonl"),
            place=0,
            values={
                "step": at + 1,
                "loss": peaks.get(at, 2.0),
                "step_s": slow.get(at, 0.5),
            },
        )
        for at in range(count)
    ]


def test_peaks_and_slow_steps_are_drawn() -> None:
    found = drawn_places(entries(10_000, {4321: 90.0, 777: -1.0}, {1234: 60.0}), MOST_POINTS)
    assert {0, 777, 1234, 4321, 9999} <= set(found)
    assert len(found) <= MOST_POINTS
    assert found == sorted(set(found))
    few = entries(5, {}, {})
    assert drawn_places(few, MOST_POINTS) == [0, 1, 2, 3, 4]


def test_steps_of_a_table_are_evenly_spaced() -> None:
    assert sampled(range(1000), 5) == [0, 250, 500, 749, 999]
    assert sampled([1, 2], 5) == [1, 2]


def test_words_are_about_every_step(tmp_path: Path) -> None:
    text = steps(3000).replace('"step_s": 0.25', '"step_s": 50.0', 1)
    lines = text.splitlines(keepends=True)
    at = next(place for place, line in enumerate(lines) if '"step": 1501,' in line)
    lines[at] = lines[at].replace('"loss": 0.00333', '"loss": 7000.00333')
    page = run_page(written(tmp_path, "".join(lines)))
    assert "the most 7000" in part(page, "loss").summary
    assert "of 3,000 steps are drawn" in part(page, "loss").summary
    figure = part(page, "loss").figure
    assert isinstance(figure, LinesFigure)
    assert max(value for value in figure.series[0].values if value is not None) > 7000
    # The validation of the last step is drawn at its step.
    assert figure.series[1].values[-1] == 3.5
    assert "the most 50" in part(page, "seconds").summary
