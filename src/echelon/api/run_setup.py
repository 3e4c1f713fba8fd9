"""Prepare a run before its ranks: data, the checkpoint to go on from, the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from echelon.config.job import Job
from echelon.config.run_files import run_files, same_run
from echelon.core.disk import disk_errors, flush_folder, write_durably
from echelon.core.errors import CheckpointError
from echelon.observe.environment import describe_environment
from echelon.observe.run_directory import RunDirectory, create_run, open_run
from echelon.train.checkpoint.folder import StoredCheckpoint, find_checkpoint, list_checkpoints
from echelon.train.checkpoint.identity import RunIdentity, data_problems, identity_problems
from echelon.train.checkpoint.index import STATE_FILE, read_index
from echelon.train.checkpoint.load import file_problems
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
    checkpoint = None if resume is None else find_checkpoint(resume)
    say(f"reading {job.data.source} ...")
    data = prepared_data(job.data.source, job.data.tokenizer, job.train.runs_dir)
    dataset = _checked_data(job, data)
    if checkpoint is not None:
        _check_checkpoint(job, checkpoint, dataset)
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
    training, validation = dataset, dataset
    if job.data.validation_fraction > 0:
        training, validation = dataset.split(job.data.validation_fraction)
    length = job.plan.mathematics.sequence_length
    training.num_samples(length)
    if job.train.validate_every != "never":
        validation.num_samples(length)
    return dataset


def _check_checkpoint(job: Job, checkpoint: StoredCheckpoint, dataset: TokenDataset) -> None:
    """Raise CheckpointError where it is not whole or not of this run; ranks compare checksums."""
    identity = RunIdentity.of(job.plan, dataset.index.tokenizer.hash)
    path, where = checkpoint.path, str(checkpoint.path)
    index = read_index(path)
    problems = [
        *file_problems(path, index),
        *identity_problems(index, identity, where=where, accept=MAY_CHANGE),
    ]
    if not problems:
        # What is no JSON is damaged, which the checksums of the ranks tell better.
        with suppress(ValueError):
            state = json.loads((path / STATE_FILE).read_bytes())
            problems.extend(data_problems(state, dataset.index.hash, where=where))
    if problems:
        raise CheckpointError(problems)


def _run_of(job: Job, checkpoint: StoredCheckpoint | None) -> RunDirectory:
    """Return the run that the checkpoint belongs to where this goes on with it, else a new one.

    An older checkpoint, another split, another length or another name after --set makes another
    run: a folder holds one plan, and its steps are taken once.
    """
    named_by = job.source_of("train.run_name")
    name_was_given = named_by != "" and not named_by.startswith("derived")
    if checkpoint is not None:
        # The run file is often that of the resumed run: it names what this may not go on with.
        name_was_given = named_by.startswith("--set")
        folder = checkpoint.path.parent.parent
        newest = list_checkpoints(checkpoint.path.parent)[-1:]
        renamed = name_was_given and job.train.run_name != folder.resolve().name
        if (folder / "plan.json").is_file() and newest == (checkpoint,) and not renamed:
            run = open_run(folder)
            if same_run(run.plan(), job.plan):
                return run
    files = run_files(job)
    run = create_run(
        Path(job.train.runs_dir),
        job.train.run_name,
        name_was_given=name_was_given,
        plan=job.plan,
        run_toml=files.run_toml,
        environment=describe_environment(os.environ),
    )
    with disk_errors(f"to write into {run.path}"):
        for name, text in files.beside.items():
            write_durably(run.path / name, text.encode())
        flush_folder(run.path)
    return run
