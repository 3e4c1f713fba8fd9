# SPDX-License-Identifier: Apache-2.0
"""The settings of a job as text: what `echelon config show` prints, and what a run keeps.

A run keeps a run.toml that reads no file of the user's about the split: the schedule that a file
gave or a search found is written beside it, and so is a cluster file. The user may change or remove
their own: the run goes on as the plan that it began with.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import cast

from echelon.config.cluster.file import cluster_toml
from echelon.config.derived.pipeline import AUTO, FILE, FILE_KEY, SCHEDULE_KEY, TIMES_KEY
from echelon.config.entries import flatten
from echelon.config.job import Job, ResolvedSetting
from echelon.config.presets import PRESET_KINDS, about, preset_names
from echelon.config.reading import missing_file
from echelon.config.schema import MODEL_SOURCES
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.settings.value_types import toml_tables, toml_text
from echelon.schedule.files import schedule_csv
from echelon.schedule.from_plan import schedule_from_plan

SCHEMA = 1  # of the written JSON


def settings_json(job: Job) -> dict[str, object]:
    """Return every setting with its source, and the hashes, as one versioned JSON object."""
    return {
        "schema": SCHEMA,
        "plan_hash": job.plan.content_hash(),
        "job_hash": job.content_hash(),
        "settings": {
            row.key: {"value": tomllib.loads(f"v = {row.value}")["v"], "source": row.source}
            for row in job.sources
        },
    }


CLUSTER_FILE_HEAD = (
    "Numbers are bytes, bytes/s each way, dense FLOP/s and seconds; a text with its unit does as",
    'well: "80 GiB", "50 GB/s". Use it: echelon plan MODEL --cluster FILE.toml',
)


def cluster_tables(cluster: Cluster) -> dict[str, object]:
    """Return a cluster as the tables of its file."""
    return tomllib.loads(cluster_toml(cluster))


def cluster_rows(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield the settings of a cluster as its file has them, those of links by their number."""
    tables = cluster_tables(cluster)
    links = cast("list[dict[str, object]]", tables.pop("links", []))
    numbered = {f"links[{index}]": link for index, link in enumerate(links)}
    for key, value in flatten({**tables, **numbered}, settings={}):
        yield key, toml_text(value)


def resolved_toml(job: Job, instead: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a run.toml that gives this very job without presets of models or config.json.

    Stages are written out, so the times that they were balanced by are left out where nothing else
    reads them: a setting without effect is an error. The values of `instead` are written for those
    settings, as they stand in TOML.
    """
    values = {row.key: row.value for row in job.sources} | dict(instead)
    left_out = [*MODEL_SOURCES]
    if values[SCHEDULE_KEY] != toml_text(AUTO):
        left_out.append(TIMES_KEY)
    return toml_tables({key: value for key, value in values.items() if key not in left_out})


def preset_rows() -> tuple[tuple[str, str, str], ...]:
    """Return kind, name and one line about every preset."""
    return tuple(
        (kind.removesuffix("s"), name, about(kind, name))
        for kind in PRESET_KINDS
        for name in preset_names(kind)
    )


CLUSTER_KEY = "cluster.file"
SCHEDULE_FILE, CLUSTER_FILE = "schedule.csv", "cluster.toml"
FROM_PLAN = "# Started from Python with a plan: plan.json says what was run.\n"


def run_files(job: Job) -> tuple[str, Mapping[str, str]]:
    """Return a run.toml that gives this job again, and the text of the files beside it, by name.

    ConfigError where a file is gone.

    A schedule that was searched is one from a file there: a search is not made twice.
    """
    if not job.sources:
        return FROM_PLAN, {}
    instead: dict[str, str] = {}
    beside: dict[str, str] = {}
    if job.plan.layout.pipeline.rows:
        beside[SCHEDULE_FILE] = schedule_csv(schedule_from_plan(job.plan))
        instead |= {SCHEDULE_KEY: FILE, FILE_KEY: SCHEDULE_FILE}
    cluster = next((row for row in job.sources if row.key == CLUSTER_KEY), None)
    if cluster is not None:
        beside[CLUSTER_FILE] = text_of_file(cluster)
        instead[CLUSTER_KEY] = CLUSTER_FILE
    written = {key: toml_text(value) for key, value in instead.items()}
    return resolved_toml(job, written), beside


def describe_same_run(kept: Plan, wanted: Plan) -> bool:
    """Return whether two plans are of one run: equal but for its name, and for who made rows."""
    return _without_name(kept) == _without_name(wanted)


def _without_name(plan: Plan) -> Plan:
    pipeline = plan.layout.pipeline
    if pipeline.rows:
        pipeline = replace(pipeline, schedule=FILE)
    return replace(plan, name="", layout=replace(plan.layout, pipeline=pipeline))


def text_of_file(named: ResolvedSetting) -> str:
    """Return the text of the file that a setting names; ConfigError where it is gone."""
    path = Path(tomllib.loads(f"v = {named.value}")["v"])
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(missing_file(path, error, named.source)) from error
