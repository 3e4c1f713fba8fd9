"""Prepare a run before its ranks: data, the checkpoint to go on from, the folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from echelon.config.job import Job
from echelon.config.show import resolved_toml
from echelon.core.errors import CheckpointError
from echelon.observe.environment import describe_environment
from echelon.observe.run_directory import RunDirectory, create_run, open_run
from echelon.train.checkpoint.folder import StoredCheckpoint, find_checkpoint, list_checkpoints
from echelon.train.checkpoint.identity import RunIdentity, identity_problems
from echelon.train.checkpoint.index import read_index
from echelon.train.data.corpus import prepared_data
from echelon.train.data.dataset import TokenDataset
from echelon.train.loop import RankTask

OBSERVER = "echelon.observe.observer:observe_rank"

MAY_CHANGE = ("optimizer.total_steps",)
"""What of the mathematics a resumed run may change: it may be made longer."""


def prepare_run(
    job: Job, resume: Path | None, say: Callable[[str], None]
) -> tuple[RunDirectory, RankTask]:
    """Return the folder of a run and what its ranks are told; errors come before any rank does."""
    say(f"reading {job.data.source} ...")
    data = prepared_data(job.data.source, job.data.tokenizer, job.train.runs_dir)
    dataset = _checked_data(job, data)
    checkpoint = None if resume is None else find_checkpoint(resume)
    if checkpoint is not None:
        _check_identity(job, checkpoint, dataset.index.tokenizer.hash)
    run = _run_of(job, checkpoint)
    going_on = "" if checkpoint is None else f", from step {checkpoint.step}"
    say(f"training {job.plan.name} in {run.path}{going_on}")
    task = RankTask(
        job=job,
        run_dir=str(run.path),
        data=str(data),
        observer=OBSERVER,
        resume=None if checkpoint is None else str(checkpoint.path),
    )
    return run, task


def _checked_data(job: Job, data: Path) -> TokenDataset:
    """Return the data once it is whole, fits the model, and has samples to train on."""
    dataset = TokenDataset.open(data, verify=True)
    dataset.check_vocabulary(job.plan.model.vocab)
    training, validation = dataset.split(job.data.validation_fraction)
    length = job.plan.mathematics.sequence_length
    training.num_samples(length)
    if job.train.validate_every != "never":
        validation.num_samples(length)
    return dataset


def _check_identity(job: Job, checkpoint: StoredCheckpoint, tokenizer_hash: str) -> None:
    identity = RunIdentity.of(job.plan, tokenizer_hash)
    index = read_index(checkpoint.path)
    where = str(checkpoint.path)
    problems = list(identity_problems(index, identity, where=where, accept=MAY_CHANGE))
    if problems:
        raise CheckpointError(problems)


def _run_of(job: Job, checkpoint: StoredCheckpoint | None) -> RunDirectory:
    """Return the run that the checkpoint belongs to where this goes on with it, else a new one.

    An older checkpoint, another split or another length makes another run: a folder holds one
    plan, and its steps are taken once.
    """
    if checkpoint is not None:
        folder = checkpoint.path.parent.parent
        newest = list_checkpoints(checkpoint.path.parent)[-1:]
        if (folder / "plan.json").is_file() and newest == (checkpoint,):
            run = open_run(folder)
            if replace(run.plan(), name=job.plan.name) == job.plan:
                return run
    return create_run(
        Path(job.train.runs_dir),
        job.train.run_name,
        name_was_given=_name_was_given(job),
        plan=job.plan,
        run_toml=resolved_toml(job) if job.sources else FROM_PLAN,
        environment=describe_environment(os.environ),
    )


FROM_PLAN = "# Started from Python with a plan: plan.json says what was run.\n"


def _name_was_given(job: Job) -> bool:
    sources = {row.key: row.source for row in job.sources}
    return not sources.get("train.run_name", "derived").startswith("derived")
