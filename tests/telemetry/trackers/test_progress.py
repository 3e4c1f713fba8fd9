"""How far a mirror got: noted, read, told, and written by one process at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.core.errors import ConfigError, EnvironmentProblem
from echelon.telemetry.summary import summarize_run
from echelon.telemetry.trackers.progress import (
    MirrorProgress,
    mirror_status,
    mirrored_alone,
    read_progress,
    write_progress,
)
from tests.telemetry.trackers.metrics import FIRST, add_lines, make_run


def test_what_was_noted_is_read_and_told(tmp_path: Path) -> None:
    run = make_run(tmp_path).path
    assert read_progress(run, "mlflow") is None
    assert mirror_status(run) == ()
    add_lines(run, FIRST)
    for lines in (3, 8):
        progress = MirrorProgress(project="p", id="x", revision=2, lines=lines)
        write_progress(run, "mlflow", progress)
        assert read_progress(run, "mlflow") == progress
        says = "mlflow: all 8 lines" if lines == 8 else "mlflow: 3 of 8 lines"
        assert [one.says() for one in summarize_run(run).mirrors] == [says]


def test_a_damaged_note_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path).path
    (run / "trackers").mkdir()
    (run / "trackers" / "mlflow.json").write_text(json.dumps({"project": 3}))
    with pytest.raises(ConfigError, match="events-readable"):
        read_progress(run, "mlflow")


def test_one_process_writes_a_mirror(tmp_path: Path) -> None:
    run = make_run(tmp_path).path
    with (
        mirrored_alone(run, "mlflow"),
        mirrored_alone(run, "wandb"),
        pytest.raises(EnvironmentProblem) as found,
        mirrored_alone(run, "mlflow"),
    ):
        pass
    assert found.value.rules == ("mirror-not-in-use",)
    with mirrored_alone(run, "mlflow"):
        pass
