# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: made once, never overwritten, written by one process group at a time.

runs/<name>/  run.toml  plan.json  environment.json  metrics.jsonl  events.jsonl.gz
              traces/planned.json.gz  traces/measured.json.gz  (`telemetry/timeline.py`)
              logs/rank-0000.log  checkpoints/step-000500/

environment.json says what the run ran on, so that a result can be told from its surroundings.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from shutil import rmtree

import psutil

from echelon.core.disk import disk_errors, flush_folder, list_names, write_durably
from echelon.core.errors import ConfigError, EchelonError, EnvironmentProblem
from echelon.core.plan import Plan
from echelon.core.rulebook.run import RUN_EXISTS, RUN_NAME, RUN_NOT_IN_USE, RUN_WRITTEN_ONCE
from echelon.core.serialize import decode_json
from echelon.core.version import __version__
from echelon.launch.host import num_usable_cores
from echelon.training.checkpoint.folder import CHECKPOINTS, clean_leftovers
from echelon.training.checkpoint.index import INDEX_FILE
from echelon.training.data.index import DATA_FOLDER

_LOCK_FILE = ".lock"
_YOUNG_S = 60.0  # processes of one launch start within it
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Name the folder of a run and what is in it."""

    path: Path

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return self.path.name

    @property
    def run_file(self) -> Path:
        """Return where the resolved run.toml is."""
        return self.path / "run.toml"

    @property
    def plan_file(self) -> Path:
        """Return where the plan is."""
        return self.path / "plan.json"

    @property
    def logs(self) -> Path:
        """Return the folder of what each rank printed."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def plan(self) -> Plan:
        """Return the plan of the run; ConfigError where its file cannot be read as one."""
        try:
            plan = Plan.read(self.plan_file)
            if plan.mesh.world_size < 1:
                raise ValueError(f"a mesh of {plan.mesh.world_size} ranks")
            return plan
        except (OSError, ValueError) as error:
            raise ConfigError(
                RUN_EXISTS.problem(
                    f"{self.plan_file} is not a plan that can be read: {error}",
                    suggestions=[one.path for one in list_runs(self.path.parent) if one != self],
                )
            ) from error

    def remove(self) -> None:
        """Remove the folder of a run that came to no step."""
        rmtree(self.path, ignore_errors=True)

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the run for this process; EnvironmentProblem where another one holds it.

        The system drops the lock when this process ends, so a killed run leaves none behind. What
        killed writers of checkpoints left behind is removed first.
        """
        with disk_errors(f"to write into {self.path}"):
            descriptor = os.open(
                self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        try:
            _take(descriptor, self.path)
            clean_leftovers(self.checkpoints)
            yield
            with disk_errors(f"to write into {self.path}"):
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)


def create_run(
    runs_dir: Path,
    name: str,
    *,
    name_was_given: bool,
    plan: Plan,
    run_toml: str,
    environment: Mapping[str, object],
) -> RunDirectory:
    """Make `runs_dir`/`name` with the plan, the resolved run file and the environment in it.

    A name that exists is an error where the user gave it, and gets a number where it was derived
    (nano, nano-2, nano-3). Raises ConfigError, or EnvironmentProblem where the disk refuses.
    """
    wrong = other = ""
    if name == DATA_FOLDER and name_was_given:
        wrong = f"{runs_dir / name} is where the prepared data of all runs is kept"
        other = _free_name(runs_dir, name)
    elif not _PLAIN_NAME.fullmatch(name):
        wrong = f"{name!r} cannot be the name of a folder: letters, digits and _ . + = - only"
        other = re.sub(r"[^A-Za-z0-9_.+=-]+", "-", name).strip(".-") or "run"
    if wrong:
        raise ConfigError(RUN_NAME.problem(wrong, key="train.run_name", suggestions=[other]))
    run = RunDirectory(_claim(runs_dir, name, name_was_given))
    try:
        with disk_errors(f"to write into {run.path}"):
            write_durably(run.run_file, run_toml.encode())
            told = json.dumps(environment, indent=2) + "\n"
            write_durably(run.path / "environment.json", told.encode())
            run.logs.mkdir()
            run.checkpoints.mkdir()
            # Last: a folder with a plan in it is a run.
            write_durably(run.plan_file, plan.to_json().encode())
            flush_folder(run.path)
            flush_folder(runs_dir)
    except KeyboardInterrupt:
        run.remove()
        raise
    return run


def run_of(path: Path) -> RunDirectory:
    """Open the run that `path` means: its own folder, or that of a checkpoint in it."""
    inside = (path / INDEX_FILE).is_file() or path.parent.name == CHECKPOINTS
    return open_run(path.resolve().parent.parent if inside else path)


def open_run(path: Path) -> RunDirectory:
    """Return the run at `path`; ConfigError lists the runs that are there instead."""
    run = RunDirectory(path)
    try:
        if run.plan_file.is_file():
            return run
        beside, instead = list_runs(path.parent), list_names(path)
        near = beside or list_runs(path) or list_runs(path.parent / "runs")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(RUN_EXISTS.problem(f"{path} cannot be read: {reason}")) from error
    raise ConfigError(
        RUN_EXISTS.problem(
            f"{path} is not a run: {instead}"
            + ("" if beside else f"; there is no run in {path.parent}"),
            suggestions=[other.path for other in near],
        )
    )


def list_runs(runs_dir: Path) -> tuple[RunDirectory, ...]:
    """Return the runs in a folder, by name."""
    if not runs_dir.is_dir():
        return ()
    return tuple(RunDirectory(path.parent) for path in sorted(runs_dir.glob("*/plan.json")))


def _claim(runs_dir: Path, name: str, name_was_given: bool) -> Path:
    """Make the folder; whoever makes it first has the name."""
    with disk_errors(f"to make a run in {runs_dir}"):
        runs_dir.mkdir(parents=True, exist_ok=True)
        for number in count(1 if name != DATA_FOLDER else 2):
            path = runs_dir / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError as error:
                if name_was_given:
                    raise ConfigError(
                        RUN_WRITTEN_ONCE.problem(
                            f"{path} is already there: {list_names(path)}{_made_just_now(path)}",
                            key="train.run_name",
                            suggestions=[
                                *([f"--resume {path}"] if (path / "plan.json").is_file() else []),
                                f"train.run_name = {_free_name(runs_dir, name)}",
                            ],
                        )
                    ) from error
            else:
                return path
    raise AssertionError("numbers end")


def _made_just_now(path: Path) -> str:
    """Return another cause of a name that is taken, for a young run; empty otherwise."""
    try:
        # The folder itself is younger after each checkpoint.
        age_s = time.time() - (path / "run.toml").stat().st_mtime
    except OSError:
        return ""
    if not 0 <= age_s < _YOUNG_S:
        return ""
    return (
        f"; it was made {age_s:.0f} s ago, maybe by another process of the same launch whose "
        "launcher set no variable that is read (echelon doctor shows what is)"
    )


def _free_name(runs_dir: Path, name: str) -> str:
    names = (f"{name}-{number}" for number in count(2))
    return next(one for one in names if not (runs_dir / one).exists())


def _take(descriptor: int, path: Path) -> None:
    """Lock the open lock file and write into it who holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, _holder(descriptor)) from None
    except OSError:
        # A file system without locks: what the file says is all there is to go by.
        holder = _holder(descriptor)
        if _is_alive(holder):
            raise _in_use(path, holder) from None
    me = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "process_started": psutil.Process().create_time(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with disk_errors(f"to write into {path}"):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(me) + "\n").encode(), 0)


def _holder(descriptor: int) -> Mapping[str, object]:
    try:
        holder = decode_json(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_alive(holder: Mapping[str, object]) -> bool:
    """Return whether the process that wrote the lock may still run; on another host, it may."""
    pid = holder.get("pid")
    if not isinstance(pid, int):
        return False
    if holder.get("host") != socket.gethostname():
        return True
    try:
        return psutil.Process(pid).create_time() == holder.get("process_started")
    except psutil.Error:
        return False


def _in_use(path: Path, holder: Mapping[str, object]) -> EchelonError:
    return EnvironmentProblem(
        RUN_NOT_IN_USE.problem(
            f"{path} is written by process {holder.get('pid', '?')} on {holder.get('host', '?')} "
            f"since {holder.get('since', '?')}"
        )
    )


_PACKAGES = (
    *("torch", "numpy", "safetensors", "tokenizers", "pyarrow", "cyclopts", "rich"),
    *("triton", "flash_attn_3"),
)
_RECORDED_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "TORCH_", "PYTORCH_", "ECHELON_")


def describe_environment(
    variables: Mapping[str, str], defaults: Mapping[str, str]
) -> dict[str, object]:
    """Return the machine, the versions, and of the environment what changes how ranks run.

    `variables` is the environment; what is not about the run (and may be a secret) is left out.
    `defaults` is what ranks get beside it.
    """
    return {
        "schema": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "echelon": __version__,
        "python": platform.python_version(),
        "packages": {name: _installed_version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "usable_cores": num_usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "command": sys.argv,
        "variables": {
            name: value
            for name, value in sorted(variables.items())
            if name.startswith(_RECORDED_PREFIXES)
        },
        "defaults": dict(sorted(defaults.items())),
    }


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
