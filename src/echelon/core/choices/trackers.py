# SPDX-License-Identifier: Apache-2.0
"""The trackers that can mirror a run, each as one record: its package, and where it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

TRACKERS_FOLDER = "trackers"
"""What of a run's folder belongs to its trackers: their files, and how far each mirror got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerRecord:
    """State the facts of one tracker, and name what writes to it."""

    name: str
    """What `observe.trackers` takes; also the extra that installs it."""
    title: str
    """What its makers call it."""
    package: str
    """The module that is imported."""
    runner: str
    """"module:class" of what writes to it: a `Tracker`."""
    has_projects: bool = True
    """Whether runs are kept by project (`observe.tracker_project`)."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """What its process gets unless set; {} is its folder in the run. Nothing leaves the machine."""


_RECORDS = (
    TrackerRecord(
        name="tensorboard",
        title="TensorBoard",
        package="tensorboard",
        runner="echelon.telemetry.trackers.tensorboard:TensorBoard",
        has_projects=False,
    ),
    TrackerRecord(
        name="wandb",
        title="Weights & Biases",
        package="wandb",
        runner="echelon.telemetry.trackers.weights_and_biases:WeightsAndBiases",
        environment={
            "WANDB_MODE": "offline",
            "WANDB_DIR": "{}",
            "WANDB_CACHE_DIR": "{}/cache",
            "WANDB_DATA_DIR": "{}/data",
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_SILENT": "true",
        },
    ),
    TrackerRecord(
        name="mlflow",
        title="MLflow",
        package="mlflow",
        runner="echelon.telemetry.trackers.mlflow:MLflow",
        environment={
            "MLFLOW_TRACKING_URI": "file://{}",
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        },
    ),
    TrackerRecord(
        name="trackio",
        title="trackio",
        package="trackio",
        runner="echelon.telemetry.trackers.trackio:Trackio",
        environment={"TRACKIO_DIR": "{}"},
    ),
)

TRACKERS: Mapping[str, TrackerRecord] = MappingProxyType({one.name: one for one in _RECORDS})
"""The record of each tracker, by the name that `observe.trackers` takes."""

TRACKER_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        name: f"written for the process of {one.title} unless set: {value.format('its folder')}"
        for one in _RECORDS
        for name, value in one.environment.items()
    }
)
"""The variables of trackers, and what for; keys of accounts are left to the tracker to read."""
