"""What a tracker is told of a run: its settings and what follows from its plan."""

from __future__ import annotations

from pathlib import Path

from echelon.telemetry.trackers.tracker import (
    MOST_RANKS,
    MetricsReader,
    TrackedRun,
    as_taken_last,
    config_of,
)
from tests.telemetry.trackers.metrics import FIRST, SECOND, add_lines, make_run, start, step


def test_settings_have_the_names_of_the_run_file(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    config = config_of(run.path)
    assert config["extends"] == "nano"
    assert config["mesh.pp"] == 1
    assert config["plan_hash"] == run.plan().content_hash()
    assert config["world_size"] == 1
    assert config["tokens_per_step"] == run.plan().tokens_per_step


def test_a_run_that_took_steps_again_has_a_name_of_its_own() -> None:
    def named(revision: int) -> str:
        folder = Path("here")
        run = TrackedRun(
            folder=folder, project="p", group="nano", revision=revision, id="", config={}
        )
        return run.name

    assert [named(1), named(2)] == ["nano", "nano-2"]


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
