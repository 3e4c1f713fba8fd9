"""A process beside a run: it hears that the run ended, and is killed where it does not care."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.choices.trackers import TRACKERS
from echelon.launch.environment import VARIABLES
from echelon.telemetry.trackers import guard
from echelon.telemetry.trackers.guard import Companion, tracker_environment

LISTENS = "import sys\nsys.stdin.read()\nprint('heard')\nsys.exit(len(sys.argv) - 1)\n"
DEAF = "import time\nprint('deaf', flush=True)\ntime.sleep(3600)\n"


def _module(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "beside.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "beside"


@pytest.mark.parametrize(("arguments", "good"), [([], True), (["one"], False)])
def test_it_hears_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], good: bool
) -> None:
    log = tmp_path / "log"
    beside = Companion(_module(tmp_path, LISTENS, monkeypatch), arguments, log)
    assert beside.end(60.0) == good
    assert log.read_text() == "heard\n"


def test_one_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_KILLED_AFTER_S", 0.0)
    beside = Companion(_module(tmp_path, DEAF, monkeypatch), [], tmp_path / "log")
    assert not beside.end(0.2)


def test_what_the_user_says_about_a_place_holds() -> None:
    record, folder = TRACKERS["mlflow"], Path("/run/t")
    mine = tracker_environment(record, folder, {"MLFLOW_TRACKING_URI": "http://here:1"})
    assert mine["MLFLOW_TRACKING_URI"] == "http://here:1"
    ours = tracker_environment(record, folder, {"HOME": "/home"})
    assert ours["MLFLOW_TRACKING_URI"] == "file:///run/t"
    assert ours["HOME"] == "/home"
    assert tracker_environment(TRACKERS["wandb"], folder, {})["WANDB_MODE"] == "offline"


def test_the_one_table_has_the_variables_of_trackers() -> None:
    written = {name for one in TRACKERS.values() for name in one.environment}
    assert written <= set(VARIABLES)
    assert not any("KEY" in name or "TOKEN" in name for name in written)
