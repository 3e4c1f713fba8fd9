"""The guard of mirrors: what hangs, crashes, fails or floods is ended in time, and kept short."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from echelon.core.choices.trackers import TRACKERS
from echelon.telemetry.trackers.guard import Companion
from echelon.telemetry.trackers.progress import log_path, mirror_status
from echelon.telemetry.trackers.start import GUARD, unmirrored
from tests.telemetry.trackers.fakes import install_fakes
from tests.telemetry.trackers.metrics import FIRST, add_lines, make_run


def _processes_of(run: Path) -> list[psutil.Process]:
    """Return the processes that name a run on their command line."""
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if str(run) in (one.info["cmdline"] or ()) and one.status() != psutil.STATUS_ZOMBIE
    ]


def test_trackers_that_hang_crash_fail_and_flood_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path).path
    add_lines(run, FIRST)
    fakes = install_fakes(tmp_path / "fakes")
    monkeypatch.setenv("PYTHONPATH", f"{fakes}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    guard = Companion(GUARD, [str(run), "echelon", "4.0", *TRACKERS], log_path(run, "guard"))
    assert not guard.end(4.0)
    assert _processes_of(run) == []
    assert [one.lines for one in mirror_status(run)] == [0] * len(mirror_status(run))
    assert len(unmirrored(run, TRACKERS)) == len(TRACKERS)
    logs = {name: log_path(run, name).read_text() for name in TRACKERS}
    assert "the mirror was killed" in logs["tensorboard"]
    assert "the mirror ended with 9" in logs["wandb"]
    assert "no route to host" in logs["mlflow"]
    assert logs["trackio"].startswith("xxxx")
    assert "bytes more were not kept" in logs["trackio"]
    assert len(logs["trackio"]) < (1 << 20) + 1000


def test_a_run_that_was_killed_leaves_no_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe of a process that is gone has ended: the guard needs no other word."""
    import subprocess
    import sys

    run = make_run(tmp_path).path
    add_lines(run, FIRST)
    fakes = install_fakes(tmp_path / "fakes")
    monkeypatch.setenv("PYTHONPATH", f"{fakes}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    command = [sys.executable, "-m", GUARD, str(run), "echelon", "0.5", "tensorboard"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        assert guard.stdin is not None
        guard.stdin.close()
        assert guard.wait(60) == 1
    assert _processes_of(run) == []
