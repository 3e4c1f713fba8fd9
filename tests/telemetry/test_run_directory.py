"""A run directory is made once, held by one process, and says what it is."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.core.errors import ConfigError, EchelonError, EnvironmentProblem
from echelon.telemetry.run_directory import RunDirectory, describe_environment, list_runs, open_run
from tests.telemetry.runs import make_job, make_run

HOLD = """
import sys, time
from pathlib import Path
from echelon.telemetry.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_what_is_in_a_new_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints",
        "environment.json",
        "logs",
        "plan.json",
        "run.toml",
    ]
    assert open_run(run.path).plan() == make_job().plan
    assert run.run_file.read_text() == 'extends = "nano"\n'
    assert json.loads((run.path / "environment.json").read_text()) == {"host": "here"}


def test_a_name_that_was_given_is_never_used_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in run.path.iterdir()}
    with pytest.raises(ConfigError) as caught:
        make_run(tmp_path)
    assert caught.value.rules == ("run-written-once",)
    assert caught.value.problems[0].suggestions == (
        f"--resume {run.path}",
        "train.run_name = nano-2",
    )
    assert "maybe by another process of the same launch" in str(caught.value)
    assert {path.name: path.stat().st_mtime_ns for path in run.path.iterdir()} == before


def test_a_name_that_was_derived_gets_a_number(tmp_path: Path) -> None:
    names = [make_run(tmp_path, name_was_given=False).name for _ in range(3)]
    assert names == ["nano", "nano-2", "nano-3"]
    assert [run.name for run in list_runs(tmp_path)] == names


def test_no_run_is_called_as_the_folder_of_prepared_data(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_run(tmp_path, "data")
    assert caught.value.rules == ("run-name",)
    assert caught.value.problems[0].suggestions == ("data-2",)
    assert make_run(tmp_path, "data", name_was_given=False).name == "data-2"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up", "-x", "a b", "x\ny", "a" * 300])
def test_a_name_that_is_no_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_run(tmp_path, name)
    assert caught.value.rules == ("run-name",)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(ConfigError) as caught:
        open_run(tmp_path / "nana")
    assert caught.value.rules == ("run-exists",)
    assert caught.value.problems[0].suggestions == (str(run.path),)
    with pytest.raises(ConfigError, match="no run in"):
        open_run(tmp_path / "elsewhere" / "nano")


def test_a_plan_that_was_damaged(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.plan_file.write_text("{")
    with pytest.raises(ConfigError) as caught:
        run.plan()
    assert caught.value.rules == ("run-exists",)


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        (errno.EROFS, "folder-writable"),
        (errno.ENOSPC, "disk-space"),
        (errno.EIO, "disk-works"),
    ],
)
def test_a_disk_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, rule: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(EnvironmentProblem) as caught:
        make_run(tmp_path / "runs")
    assert caught.value.rules == (rule,)


def test_a_runs_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(EnvironmentProblem) as caught:
        make_run(tmp_path / "runs")
    assert caught.value.rules == ("folder-writable",)


def _expect_in_use(run: RunDirectory, pid: int) -> None:
    with pytest.raises(EchelonError) as caught, run.locked():
        pass
    assert caught.value.rules == ("run-not-in-use",)
    assert f"process {pid} on" in str(caught.value)


def test_a_run_is_held_by_one_process_and_free_when_it_is_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        _expect_in_use(run, holder.pid)
    finally:
        holder.kill()
        holder.communicate()
    with run.locked():
        _expect_in_use(run, os.getpid())
    with run.locked():
        pass


def test_where_the_file_system_has_no_locks_the_process_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    from echelon.telemetry import run_directory

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_directory.fcntl, "flock", no_locks)
    run = make_run(tmp_path)
    with run.locked():
        _expect_in_use(run, os.getpid())
    lock = run.path / ".lock"
    me = {"pid": os.getpid(), "host": run_directory.socket.gethostname(), "process_started": 1.0}
    lock.write_text(json.dumps(me))  # the id of a process that ended was given to another one
    with run.locked():
        pass
    me["process_started"] = psutil.Process().create_time()
    lock.write_text(json.dumps(me))
    _expect_in_use(run, os.getpid())
    lock.write_text(json.dumps({**me, "host": "another-host"}))
    _expect_in_use(run, os.getpid())


def test_what_killed_writers_left_is_removed_by_who_holds_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.checkpoints / ".tmp-step-000005-00ff00ff00ff").mkdir()
    with run.locked():
        assert list(run.checkpoints.iterdir()) == []


def test_the_environment_leaves_out_what_may_be_a_secret() -> None:
    found = describe_environment(
        {"NCCL_DEBUG": "INFO", "API_TOKEN": "secret", "HOME": "/x"}, {"TORCH_B": "2", "CUDA_A": "1"}
    )
    assert found["variables"] == {"NCCL_DEBUG": "INFO"}
    assert list(found["defaults"].items()) == [("CUDA_A", "1"), ("TORCH_B", "2")]  # type: ignore[attr-defined]
    assert isinstance(found["packages"], dict)
    assert found["packages"]["numpy"]
    assert json.loads(json.dumps(found)) == found
