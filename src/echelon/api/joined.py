"""One rank of a run that torchrun has started: rank 0 prepares the run, the others hear of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from echelon.api.observing import trace_plan, trace_run
from echelon.api.run_setup import prepare_run
from echelon.api.training import TrainResult
from echelon.config.job import Job
from echelon.core.serialize import from_json, to_json
from echelon.launch.context import RankContext
from echelon.launch.output import copy_to_log, log_name
from echelon.observe.run_directory import RunDirectory
from echelon.train.loop import RankTask, train_rank

_TASK = "task"


def train_joined_rank(context: RankContext, argument: Mapping[str, Any]) -> TrainResult:
    """Train this rank of the job in `argument`; the target of every rank."""
    job = Job.from_ranks(argument["job"])
    if context.rank != 0:
        return _train(context, _hear(context, job))
    context.progress.mark("preparing the run")
    resume = argument["resume"]
    run, task = prepare_run(job, None if resume is None else Path(resume), say=lambda _: None)
    with run.locked():
        context.store.set(_TASK, json.dumps(to_json(task)))
        trace_plan(job, run.path)
        result = _train(context, task)
        trace_run(job, run.path)
        return result


def _hear(context: RankContext, job: Job) -> RankTask:
    with context.progress.waits_for("rank 0 to prepare the run"):
        context.store.wait([_TASK], timedelta(seconds=job.train.step_timeout_s))
    return from_json(RankTask, json.loads(context.store.get(_TASK)))


def _train(context: RankContext, task: RankTask) -> TrainResult:
    run = RunDirectory(Path(task.run_dir))
    run.logs.mkdir(parents=True, exist_ok=True)
    copy_to_log(run.logs / log_name(context.rank))
    summary = train_rank(context, to_json(task))
    return TrainResult(run=run.path, data=Path(task.data), summary=summary, rank=context.rank)
