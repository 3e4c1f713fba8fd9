# SPDX-License-Identifier: Apache-2.0
"""Prepare a run before its ranks: data, the checkpoint to go on from, the folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from echelon.config.files.show import describe_same_run, run_files
from echelon.config.job import Job
from echelon.core.disk import disk_errors, flush_folder, write_durably
from echelon.core.errors import CheckpointError, DataError, Problem
from echelon.core.rulebook.data import DATA_ANSWERS_COUNTED, DATA_FILLS_BATCH
from echelon.core.rulebook.run import RESUME_WITHIN_STEPS
from echelon.core.settings.list_types import sources_of
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.held import stored_bytes
from echelon.launch.gpus import gpu_environment
from echelon.layout.context_work import attention_kernel_text
from echelon.telemetry.run_directory import RunDirectory, create_run, describe_environment, open_run
from echelon.training.checkpoint.folder import StoredCheckpoint, find_checkpoint, list_checkpoints
from echelon.training.checkpoint.identity import RunIdentity, data_problems, identity_problems
from echelon.training.checkpoint.index import read_index, read_state
from echelon.training.checkpoint.load import file_problems
from echelon.training.data.corpus import data_of_settings
from echelon.training.data.mixed_dataset import AnyDataset, MixedDataset, open_data
from echelon.training.loop import RankTask

OBSERVER = "echelon.telemetry.observer:observe_rank"

MAY_CHANGE = ("optimizer.total_steps",)
"""What of the mathematics a resumed run may change: it may be made longer."""


def prepare_run(
    job: Job, resume: Path | None, say: Callable[[str], None]
) -> tuple[RunDirectory, RankTask]:
    """Return the folder of a run and what its ranks are told; errors come before any rank does."""
    checkpoint = None if resume is None else find_checkpoint(resume)
    say(f"reading {', '.join(sources_of(job.data.mixture)) or job.data.source} ...")
    data = data_of_settings(job.data, job.train.runs_dir)
    dataset = _checked_data(job, data, say)
    if checkpoint is not None:
        _check_checkpoint(job, checkpoint, dataset)
    if job.plan.model.lora is not None:
        sizes = stored_bytes(job.plan.mathematics)
        say(
            f"a checkpoint takes {decimal_bytes(sizes.checkpoint)}, and the frozen weights below "
            f"all of them {decimal_bytes(sizes.base)} once"
        )
    run = _run_of(job, checkpoint)
    going_on = "" if checkpoint is None else f", from step {checkpoint.step}"
    if checkpoint is not None and checkpoint.step == job.train.steps:
        going_on += f" of {job.train.steps}: no step is left to take"
    say(f"training {job.plan.name} in {run.path}{going_on}")
    if job.observe.events:
        budget = decimal_bytes(job.observe.events_budget_bytes)
        say(f"events: {budget} at most; beyond, every k-th step (observe.events_budget_bytes)")
    task = RankTask(
        job=job,
        run_dir=str(run.path),
        data=str(data),
        observer=OBSERVER,
        resume=None if checkpoint is None else str(checkpoint.path),
    )
    return run, task


def _checked_data(job: Job, data: Path, say: Callable[[str], None]) -> AnyDataset:
    """Return the data once it is whole, fits the model, and has samples for a global batch."""
    dataset = open_data(data, verify=True, train_on=job.data.train_on)
    dataset.check_vocabulary(job.plan.model.vocab)
    training: AnyDataset = dataset
    validation: AnyDataset = dataset
    if job.data.validation_fraction > 0:
        training, validation = dataset.split(job.data.validation_fraction)
    length = job.plan.mathematics.sequence_length
    num_samples, batch = training.num_samples(length), job.plan.mathematics.global_sequences
    if num_samples < batch:
        raise DataError(_too_few_samples(job, training))
    if isinstance(training, MixedDataset):
        _check_sources(job, training, say)
    elif (times := job.train.steps * batch / num_samples) > 1:
        say(
            f"{job.train.steps} steps of {batch} sequences read the {num_samples} training samples "
            f"{times:.1f} times"
        )
    if job.train.validate_every != "never":
        validation.num_samples(length)
    _check_answers(job, training, validation, say)
    return dataset


def _check_answers(
    job: Job, training: AnyDataset, validation: AnyDataset, say: Callable[[str], None]
) -> None:
    """Raise DataError where nothing counts of what is read; say how much of chats does."""
    tokens, answers = training.num_tokens, training.num_answers()
    if answers and job.data.train_on == "all":
        say(f'{answers} of {tokens} tokens are of answers; data.train_on = "all" counts them all')
    if job.data.train_on == "all":
        return
    read = {"training": answers}
    if job.train.validate_every != "never":
        read["validation"] = validation.num_answers()
    if none := [name for name, count in read.items() if not count]:
        raise DataError(
            DATA_ANSWERS_COUNTED.problem(
                f"no token of the {' and the '.join(none)} part is of an answer: there is no loss",
                key="data.train_on",
                set_by=job.source_of("data.train_on"),
                suggestions=("a larger data.validation_fraction", 'data.train_on = "all"'),
            )
        )
    lengths, most = training.document_lengths(), job.plan.mathematics.sequence_length
    say(f"{answers} of {tokens} tokens count: those of answers")
    if cut := int((lengths > most).sum()):
        say(f"{cut} of {len(lengths)} chats are longer than {most} tokens: sequences cut them")


def _check_sources(job: Job, training: MixedDataset, say: Callable[[str], None]) -> None:
    """Raise DataError where a step reads samples of a source twice; say how often each is read."""
    plan, mixture, problems = job.plan, training.mixture, list[Problem]()
    length, batch = plan.mathematics.sequence_length, plan.mathematics.global_sequences
    most, given = mixture.most_in_a_step(batch), mixture.given(steps=job.train.steps, count=batch)
    for source, (name, part) in enumerate(zip(training.names, training.parts, strict=True)):
        num_samples, times = part.num_samples(length), given[source] / part.num_samples(length)
        if num_samples < most[source]:
            problems.append(
                DATA_FILLS_BATCH.problem(
                    f"a step may read {most[source]} sequences of {name}, whose training part is "
                    f"{num_samples} samples of {length} tokens ({num_samples} < {most[source]})",
                    key="data.mixture",
                    set_by=job.source_of("data.mixture"),
                    suggestions=(f"a smaller weight of {name}", "a smaller batch.global_sequences"),
                )
            )
        say(f"{name}: {given[source]} sequences, {times:.1f} times its {num_samples} samples")
    if problems:
        raise DataError(problems)


def _too_few_samples(job: Job, training: AnyDataset) -> Problem:
    """Return the problem of a training part with fewer samples than a global batch has."""
    plan, tokens = job.plan, training.num_tokens
    length, batch = plan.mathematics.sequence_length, plan.mathematics.global_sequences
    num_samples = training.num_samples(length)
    share = plan.mesh.dp * plan.layout.microbatch_sequences
    works: list[str] = []
    if fitting := num_samples // share * share:
        works.append(f"batch.global_sequences = {fitting}")
    if longest := (tokens - 2) // (batch - 1):
        works.append(f"batch.sequence_length = {longest} or less")
    return DATA_FILLS_BATCH.problem(
        f"batch.global_sequences = {batch}, and the {tokens} tokens of the training part are "
        f"{num_samples} samples of {length} tokens ({num_samples} < {batch})",
        key="batch.global_sequences",
        set_by=job.source_of("batch.global_sequences"),
        suggestions=works,
    )


def _check_checkpoint(job: Job, checkpoint: StoredCheckpoint, dataset: AnyDataset) -> None:
    """Raise CheckpointError where it is not whole or not of this run; ranks compare checksums."""
    identity = RunIdentity.from_plan(job.plan, dataset.index.tokenizer.hash)
    path, where = checkpoint.path, str(checkpoint.path)
    index = read_index(path)
    problems = [
        *file_problems(path, index),
        *identity_problems(index, identity, where=where, accept=MAY_CHANGE),
    ]
    if index.step > job.train.steps:
        problems.append(_beyond(job, checkpoint.path, index.step))
    if not problems:
        problems.extend(data_problems(read_state(path), dataset.index.hash, job.data, where=where))
    if problems:
        raise CheckpointError(problems)


def _beyond(job: Job, path: Path, step: int) -> Problem:
    """Return the problem of a checkpoint that has taken more steps than the run is long."""
    steps = job.train.steps
    earlier = [other for other in list_checkpoints(path.parent) if other.step < steps]
    works = [f"train.steps = {2 * step}", *(f"--resume {other.path}" for other in earlier[::-1])]
    return RESUME_WITHIN_STEPS.problem(
        f"{path} has taken {step} steps, and train.steps = {steps} ({step} > {steps}): there is no "
        "step left to take",
        key="train.steps",
        set_by=job.source_of("train.steps"),
        suggestions=works,
    )


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
            if describe_same_run(run.plan(), job.plan):
                return run
    run_toml, beside = run_files(job)
    run = create_run(
        Path(job.train.runs_dir),
        job.train.run_name,
        name_was_given=name_was_given,
        plan=job.plan,
        run_toml=run_toml,
        environment=describe_environment(
            os.environ, gpu_environment() if job.plan.cluster.backend == "nccl" else {}
        )
        | {"attention": attention_kernel_text(job.plan)},
    )
    with disk_errors(f"to write into {run.path}"):
        for name, text in beside.items():
            write_durably(run.path / name, text.encode())
        flush_folder(run.path)
    return run
