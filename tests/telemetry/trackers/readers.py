"""What each tracker has of a run, read back with its own package: values and texts by step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from echelon.telemetry.trackers.tracker import tracker_folder

Values = dict[str, dict[int, float]]
"""Numbers by name and step."""
Texts = list[tuple[str, int, str]]
"""Names, steps and texts."""


def read_tensorboard(run: Path) -> tuple[Values, Texts]:
    """Return what the event files of a run say."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "tensors": 0}
    files = EventAccumulator(str(tracker_folder(run, "tensorboard")), size_guidance=everything)
    files.Reload()
    values = {
        tag: {one.step: one.value for one in files.Scalars(tag)} for tag in files.Tags()["scalars"]
    }
    texts = [
        (tag, one.step, one.tensor_proto.string_val[0].decode())
        for tag in files.Tags()["tensors"]
        for one in files.Tensors(tag)
    ]
    return values, texts


def read_wandb(run: Path, run_id: str) -> tuple[Values, Texts]:
    """Return what the offline folders of a run say, `run_id` being the tracker's id."""
    from echelon.telemetry.trackers.weights_and_biases import offline_files, offline_rows

    folder = tracker_folder(run, "wandb") / "wandb"
    rows = [row for path in offline_files(folder, run_id) for row in offline_rows(path)]
    numbers = [int(row["_step"]) for row in rows]
    assert numbers == sorted(set(numbers)), "a row is there twice"
    return _of_rows([(int(row["step"]), row) for row in rows])


def read_mlflow(uri: str, run_id: str) -> tuple[Values, Texts]:
    """Return what MLflow says of a run."""
    from mlflow.tracking import MlflowClient

    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=uri)
    data = client.get_run(run_id).data
    values: Values = {}
    for name in data.metrics:
        history = client.get_metric_history(run_id, name)
        values[name] = {one.step: one.value for one in history}
        lines = [(one.step, one.timestamp, one.value) for one in history]
        assert len(lines) == len(set(lines)), f"{name} is there twice"
    texts: Texts = []
    for _, text in sorted(one for one in data.tags.items() if one[0].startswith("event.")):
        step, name, said = text.removeprefix("step ").split(": ", 2)
        texts.append((name, int(step), said))
    return values, texts


def read_trackio(run: Path, name: str) -> tuple[Values, Texts]:
    """Return what the database of a run says: its rows as they stand in SQLite."""
    import sqlite3

    (database,) = tracker_folder(run, "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        found = connection.execute(
            "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (name,)
        ).fetchall()
    return _of_rows([(step, json.loads(metrics)) for step, metrics in found])


def _of_rows(rows: list[tuple[int, dict[str, Any]]]) -> tuple[Values, Texts]:
    values: Values = {}
    texts: Texts = []
    for step, row in rows:
        for name, value in row.items():
            if name.startswith("_") or name == "step":
                continue
            if isinstance(value, str):
                texts.append((name, step, value))
            else:
                values.setdefault(name, {})[step] = value
    return values, texts
