"""What a run keeps of its settings: a run.toml that reads no file of the user's about the split.

The schedule that a file gave or a search found is written beside it, and so is a cluster file. The
user may change or remove their own: the run goes on as the plan that it began with.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.config.files import missing_file
from echelon.config.job import Job
from echelon.config.kinds import toml_text
from echelon.config.pipeline import FILE, FILE_KEY, SCHEDULE_KEY
from echelon.config.show import resolved_toml
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.schedule.files import schedule_csv
from echelon.schedule.of_plan import schedule_of

CLUSTER_KEY = "cluster.file"
SCHEDULE_FILE, CLUSTER_FILE = "schedule.csv", "cluster.toml"
FROM_PLAN = "# Started from Python with a plan: plan.json says what was run.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Hold the text of a run.toml, and of the files in its folder that it reads, by name."""

    run_toml: str
    beside: Mapping[str, str]


def run_files(job: Job) -> RunFiles:
    """Return what gives this job again from a folder of its own; ConfigError where a file is gone.

    A schedule that was searched is one from a file there: a search is not made twice.
    """
    if not job.sources:
        return RunFiles(run_toml=FROM_PLAN, beside={})
    instead: dict[str, str] = {}
    beside: dict[str, str] = {}
    if job.plan.layout.pipeline.rows:
        beside[SCHEDULE_FILE] = schedule_csv(schedule_of(job.plan))
        instead |= {SCHEDULE_KEY: FILE, FILE_KEY: SCHEDULE_FILE}
    cluster = next((row for row in job.sources if row.key == CLUSTER_KEY), None)
    if cluster is not None:
        beside[CLUSTER_FILE] = _text_of(tomllib.loads(f"v = {cluster.value}")["v"], cluster.source)
        instead[CLUSTER_KEY] = CLUSTER_FILE
    written = {key: toml_text(value) for key, value in instead.items()}
    return RunFiles(run_toml=resolved_toml(job, written), beside=beside)


def same_run(kept: Plan, wanted: Plan) -> bool:
    """Return whether two plans are of one run: equal but for its name, and for who made rows."""
    return _of_any_name(kept) == _of_any_name(wanted)


def _of_any_name(plan: Plan) -> Plan:
    pipeline = plan.layout.pipeline
    if pipeline.rows:
        pipeline = replace(pipeline, schedule=FILE)
    return replace(plan, name="", layout=replace(plan.layout, pipeline=pipeline))


def _text_of(path: str, set_by: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(missing_file(Path(path), error, set_by)) from error
