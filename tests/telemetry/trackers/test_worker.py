"""The process of a mirror: it ends once all is mirrored, and says in a line why it failed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from echelon.telemetry.trackers.worker import FAILED, Mirror, main, mirror_until_end
from tests.telemetry.trackers.fakes import install_fakes
from tests.telemetry.trackers.metrics import FIRST, add_lines, expected_values, make_run
from tests.telemetry.trackers.test_worker_mirror import InMemory


def test_it_ends_when_the_run_has_ended_and_all_is_mirrored(tmp_path: Path) -> None:
    run, tool = make_run(tmp_path).path, InMemory()
    add_lines(run, FIRST)
    read, write = os.pipe()
    os.close(write)
    mirror_until_end(Mirror(run, "mlflow", "echelon", lambda _: tool), read)
    os.close(read)
    assert tool.values("nano") == expected_values(FIRST)
    assert tool.now == "", "it let go of the tracker"


def test_it_says_in_a_line_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path).path
    add_lines(run, FIRST)
    monkeypatch.syspath_prepend(install_fakes(tmp_path / "fakes"))
    for name in [one for one in sys.modules if one.partition(".")[0] == "mlflow"]:
        monkeypatch.delitem(sys.modules, name)
    read, write = os.pipe()
    os.close(write)
    monkeypatch.setattr(sys, "stdin", os.fdopen(read))
    assert main([str(run), "mlflow", "echelon"]) == 1
    for name in [one for one in sys.modules if one.partition(".")[0] == "mlflow"]:
        del sys.modules[name]
    sys.stdin.close()
    said = [one for one in capfd.readouterr().err.splitlines() if one.startswith(FAILED)]
    assert said == [f"{FAILED}ConnectionError: get_experiment_by_name: no route to host"]
