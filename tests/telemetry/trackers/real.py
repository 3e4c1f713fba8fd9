"""Mirror a run in a real tracker, and require that it has what metrics.jsonl says."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from echelon.core.choices.trackers import TRACKERS
from echelon.telemetry.trackers.guard import tracker_environment, worker_command
from echelon.telemetry.trackers.progress import mirror_status, read_progress, write_progress
from echelon.telemetry.trackers.tracker import tracker_folder
from tests.telemetry.trackers.metrics import (
    FIRST,
    SECOND,
    add_lines,
    expected_values,
    make_run,
)
from tests.telemetry.trackers.readers import (
    Texts,
    Values,
    read_mlflow,
    read_tensorboard,
    read_trackio,
    read_wandb,
)


def mirror(run: Path, tool: str) -> None:
    """Mirror what a tracker lacks of a run, in a process as it is started for a run."""
    folder = tracker_folder(run, tool)
    folder.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(
        worker_command(run, tool, "echelon"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=tracker_environment(TRACKERS[tool], folder),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def id_of(run: Path, tool: str) -> str:
    progress = read_progress(run, tool)
    assert progress is not None
    return progress.id


READERS: dict[str, Callable[[Path], tuple[Values, Texts]]] = {
    "tensorboard": read_tensorboard,
    "wandb": lambda run: read_wandb(run, id_of(run, "wandb")),
    "mlflow": lambda run: read_mlflow(
        f"file://{tracker_folder(run, 'mlflow')}", id_of(run, "mlflow")
    ),
    "trackio": lambda run: read_trackio(run, id_of(run, "trackio")),
}


def require_same(run: Path, tool: str, lines: tuple[dict[str, object], ...]) -> Texts:
    """Require that a tracker has the numbers of these lines and no others; return its texts."""
    values, texts = READERS[tool](run)
    values.pop("run/entry", None)
    expected = expected_values(lines)
    if tool == "tensorboard":
        expected = {
            name: {step: float(np.float32(value)) for step, value in by_step.items()}
            for name, by_step in expected.items()
        }
    assert values == expected
    return sorted(one for one in texts if one[0].startswith("events/"))


PLAN = "plan 0123456789abcdef, 20 steps"


def require_first_mirror(tmp_path: Path, tool: str) -> Path:
    """Require that a tracker has what a run wrote, and no more after a second mirror."""
    run = make_run(tmp_path).path
    add_lines(run, FIRST)
    mirror(run, tool)
    texts = require_same(run, tool, FIRST)
    assert texts == [("events/checkpoint", 3, "c/step-000003"), ("events/start", 0, PLAN)]
    return run


def require_resumed_mirror(tmp_path: Path, tool: str) -> None:
    """Require that a mirror goes on, and undoes steps that were taken again."""
    run = require_first_mirror(tmp_path, tool)
    first_id = id_of(run, tool)
    mirror(run, tool)
    require_same(run, tool, FIRST)
    assert id_of(run, tool) == first_id
    add_lines(run, SECOND)
    mirror(run, tool)
    assert require_same(run, tool, (*FIRST, *SECOND)) == [
        ("events/checkpoint", 3, "c/step-000003"),
        ("events/note", 4, "rank 1 was lost"),
        ("events/start", 0, PLAN),
        ("events/start", 3, PLAN),
    ]
    (status,) = mirror_status(run)
    assert (status.tracker, status.lines, status.total_lines) == (tool, 13, 13)
    # One that cannot forget has a second run with all of it, and keeps the first.
    assert (id_of(run, tool) != first_id) == (tool != "tensorboard")


def require_nothing_twice(tmp_path: Path, tool: str) -> None:
    """Require that a mirror that was killed before it noted what it wrote writes nothing twice."""
    run = make_run(tmp_path).path
    add_lines(run, FIRST)
    mirror(run, tool)
    progress = read_progress(run, tool)
    assert progress is not None
    write_progress(run, tool, replace(progress, lines=4))
    add_lines(run, (SECOND[4],))
    mirror(run, tool)
    require_same(run, tool, (*FIRST, SECOND[4]))
