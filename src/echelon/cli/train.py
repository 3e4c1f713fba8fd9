# SPDX-License-Identifier: Apache-2.0
"""`echelon train`: train a run on local ranks, or as one rank where torchrun has started us."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echelon.api.training import (
    TrainResult,
    follow_run,
    launched_servers,
    launched_world_size,
    train_job,
)
from echelon.cli.flags import Json, Overcommit, RunFile, Settings
from echelon.cli.output import note, print_result
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.errors import EXIT_STOPPED_WITH_CHECKPOINT
from echelon.launch.environment import LaunchedRank, read_evaluator

if TYPE_CHECKING:
    from echelon.training.evaluator import CheckpointLoss


def train(
    run: RunFile,
    /,
    *,
    settings: Settings = (),
    resume: Annotated[
        Path | None, Parameter(help="The run, or the checkpoint, to go on from.")
    ] = None,
    allow_overcommit: Overcommit = False,
    json: Json = False,
) -> int:
    """Train a run; Ctrl-C stops it at a step, with a checkpoint to go on from (exit 75)."""
    if (place := read_evaluator()) is not None:
        job = load_job(run, settings, world_size=place.world_size, servers=place.servers)
        return _evaluate(job, place, as_json=json)
    job = load_job(run, settings, world_size=launched_world_size(), servers=launched_servers())
    result = train_job(job, resume=resume, say=note, allow_overcommit=allow_overcommit)
    if result.rank == 0:
        places = {"run": str(result.run), "data": str(result.data)}
        print_result(
            "train",
            lambda: {**places, **asdict(result.summary)},
            lambda: result_text(result, job),
            as_json=json,
        )
        if result.summary.stopped:
            note(f"go on: echelon train {result.run}/run.toml --resume {result.run}")
    return EXIT_STOPPED_WITH_CHECKPOINT if result.summary.stopped else 0


def _evaluate(job: Job, place: LaunchedRank, *, as_json: bool) -> int:
    """Validate the checkpoints of the ranks, as the evaluator of TF_CONFIG; a line for each."""

    def tell(one: CheckpointLoss) -> None:
        note(f"{one.path.name}: validation {one.loss:.4f}")

    found = follow_run(job, place, tell)
    print_result(
        "train",
        lambda: {
            "checkpoints": [
                {"step": one.step, "path": str(one.path), "validation": one.loss} for one in found
            ]
        },
        lambda: "".join(f"{one.path.name:<16}validation {one.loss:.4f}\n" for one in found),
        as_json=as_json,
    )
    return 0


def result_text(result: TrainResult, job: Job) -> str:
    """Return how a run ended, one fact to a line."""
    summary = result.summary
    facts = [("run", str(result.run)), ("steps", f"{summary.steps} of {job.train.steps}")]
    if summary.loss is not None:
        facts.append(("loss", f"{summary.loss:.4f}"))
    if summary.num_validations == 1 and summary.last_validation is not None:
        facts.append(("validation", f"{summary.last_validation:.4f}"))
    elif summary.first_validation and summary.last_validation is not None:
        share = f"({100 * summary.last_validation / summary.first_validation:.1f} %)"
        both = f"{summary.first_validation:.4f} -> {summary.last_validation:.4f} {share}"
        facts.append(("validation", both))
    if summary.checkpoint is not None:
        facts.append(("checkpoint", summary.checkpoint))
    facts += [("lost", one.says()) for one in summary.absences]
    return "".join(f"{name:<12}{text}\n" for name, text in facts)
