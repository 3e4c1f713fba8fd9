"""Lines of metrics as points: names, ranks, and steps that were taken again."""

from __future__ import annotations

from pathlib import Path

from echelon.telemetry.trackers.points import MOST_RANKS, MetricsReader, as_taken_last
from tests.telemetry.trackers.metrics import FIRST, SECOND, add_lines, make_run, start, step


def _points(run: Path) -> list[tuple[str, int]]:
    points = as_taken_last(MetricsReader(run).look(final=True))
    return [(one.kind, one.step) for one in points]


def test_a_start_stands_behind_the_step_that_it_goes_on_from(tmp_path: Path) -> None:
    run = make_run(tmp_path).path
    add_lines(run, (*FIRST, *SECOND))
    assert _points(run) == [
        *(("start", 0), ("step", 1), ("step", 2), ("step", 3), ("validation", 3)),
        *(("checkpoint", 3), ("start", 3), ("step", 4), ("note", 4), ("step", 5), ("step", 6)),
    ]


def test_a_line_that_is_not_whole_waits(tmp_path: Path) -> None:
    run = make_run(tmp_path).path
    reader = MetricsReader(run)
    assert reader.look(final=False) == []
    add_lines(run, [start()])
    assert reader.look(final=False) == []
    add_lines(run, [step(1)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "ti')
    assert [one.number for one in reader.look(final=False)] == [1, 2]
    assert reader.look(final=True) == []


def test_of_many_ranks_the_least_and_the_most_are_there(tmp_path: Path) -> None:
    run = make_run(tmp_path).path
    waits = [0.5 + rank for rank in range(MOST_RANKS + 1)]
    add_lines(run, [{**step(1), "rank_waits_s": waits}, {**step(2), "rank_waits_s": waits[:-1]}])
    many, few = MetricsReader(run).look(final=True)
    assert {one: many.values[one] for one in many.values if one.startswith("waits_s")} == {
        "waits_s/min": 0.5,
        "waits_s/max": 0.5 + MOST_RANKS,
    }
    assert few.values["waits_s/rank_0063"] == 63.5


def test_a_number_that_was_not_finite_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path).path
    add_lines(run, [{**step(1), "loss": None, "imbalance": 1.25}])
    (point,) = MetricsReader(run).look(final=True)
    assert "train/loss" not in point.values
    assert point.values["train/grad_norm"] == 0.1
    assert point.values["experts/imbalance"] == 1.25
