# SPDX-License-Identifier: Apache-2.0
"""MLflow: a folder of the run, or the server that MLFLOW_TRACKING_URI names.

What happened (starts, checkpoints, notes) is a tag each, ``event.000017``. Settings are parameters;
those of a run that exists cannot be changed, so the first ones stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from echelon.core.optional import optional_package
from echelon.telemetry.trackers.tracker import ENTRY, Point, TrackedRun, Tracker

_MOST = {"metrics": 1000, "params": 100, "tags": 100}
"""What one request may hold, of each kind."""
_PARAMETER_TEXT = 500  # characters of the value of a parameter
_TAG_TEXT = 5000  # characters of the value of a tag


class MLflow(Tracker):
    """Write metrics, parameters and tags of one run."""

    def __init__(self) -> None:
        """Import the client."""
        purpose = "mirroring a run in MLflow"
        tracking: Any = optional_package("mlflow.tracking", extra="mlflow", purpose=purpose)
        self._entities: Any = optional_package("mlflow.entities", extra="mlflow", purpose=purpose)
        self._client = tracking.MlflowClient()
        self._run_id = ""

    def open(self, run: TrackedRun) -> str:
        """Create the run in the experiment of the project, or go on with it."""
        if run.id:
            self._run_id = run.id
            self._client.update_run(run.id, status="RUNNING")
            return run.id
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            self._client.create_experiment(run.project)
            if experiment is None
            else experiment.experiment_id
        )
        tags = {"echelon.run": run.group, "echelon.revision": str(run.revision)}
        created = self._client.create_run(experiment_id, run_name=run.name, tags=tags)
        self._run_id = created.info.run_id
        parameters = iter(
            [
                self._entities.Param(key, str(value)[:_PARAMETER_TEXT])
                for key, value in run.config.items()
            ]
        )
        while some := list(islice(parameters, _MOST["params"])):
            self._client.log_batch(self._run_id, params=some)
        return self._run_id

    def recorded(self) -> int | None:
        """Return the number of the last line, which every request ends with."""
        metrics = self._client.get_run(self._run_id).data.metrics
        return int(metrics.get(ENTRY, 0))

    def write(self, points: Sequence[Point]) -> None:
        """Write points, as many to a request as it may hold."""
        for some in _requests(points):
            metrics = [
                self._entities.Metric(name, value, round(1000 * point.time_s), point.step)
                for point in some
                for name, value in point.numbers().items()
            ]
            tags = [
                self._entities.RunTag(
                    f"event.{point.number:06d}", f"step {point.step}: {name}: {text}"[:_TAG_TEXT]
                )
                for point in some
                for name, text in point.texts.items()
            ]
            self._client.log_batch(self._run_id, metrics=metrics, tags=tags)

    def close(self) -> None:
        """Say that the run has ended; opened again, it goes on."""
        self._client.set_terminated(self._run_id)


def _requests(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield points that fit into one request each."""
    some: list[Point] = []
    metrics = tags = 0
    for point in points:
        more, named = len(point.numbers()), len(point.texts)
        if some and (metrics + more > _MOST["metrics"] or tags + named > _MOST["tags"]):
            yield some
            some, metrics, tags = [], 0, 0
        some.append(point)
        metrics, tags = metrics + more, tags + named
    if some:
        yield some
