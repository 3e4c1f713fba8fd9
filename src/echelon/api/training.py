# SPDX-License-Identifier: Apache-2.0
"""`ec.train`: a job becomes a run: its folder, its data, its ranks.

All that can be known is checked before the first process starts. Started by us, one process
prepares the run and then starts the ranks; under torchrun the ranks are there already, rank 0
prepares the run, and the others are told of it through the store.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.api.given_plan import GivenPlan, job_of_plan, plan_from_given
from echelon.config.job import Job
from echelon.config.rules.finders import require_trainable, require_yes_to_assumed
from echelon.core.errors import ConfigError, EchelonError, EnvironmentProblem
from echelon.core.optional import optional_package
from echelon.core.rulebook.islands import LOST_ISLANDS_NEED_OUR_LAUNCHER
from echelon.core.rulebook.launch import RANK_NEVER_JOINED

if TYPE_CHECKING:
    from echelon.launch.context import RankContext
    from echelon.launch.environment import LaunchedRank
    from echelon.launch.local.supervisor import LaunchOptions
    from echelon.launch.process_group import Store
    from echelon.telemetry.run_directory import RunDirectory
    from echelon.training.evaluator import CheckpointLoss
    from echelon.training.loop import RankTask, TrainSummary


JOINED_RANK = "echelon.api.training:train_joined_rank"
TRAIN_RANK = "echelon.training.loop:train_rank"
TASK_KEY = "task"
"""Where rank 0 tells the other ranks in the store what they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a run: its folder, the data it read, and the summary that all ranks agree on.

    `rank` is 0 but under torchrun, where every process has its own.
    """

    run: Path
    data: Path
    summary: TrainSummary
    rank: int = 0

    def _repr_html_(self) -> str | None:
        """Return the page of the run without a script; None where its folder is gone."""
        from echelon.page.notebook import run_html

        try:
            return run_html(self.run)
        except EchelonError:
            return None


def train(
    run: str | Path | GivenPlan,
    *,
    data: str | None = None,
    settings: Sequence[str] = (),
    resume: str | Path | None = None,
    allow_overcommit: bool = False,
) -> TrainResult:
    """Train a run.toml, a preset or a plan, on ranks that are started and ended here.

    `data` ("stdlib", a path or a URL) takes the place of `data.source`; `settings` are
    "table.key=value". An answer of `ec.plan` stands for its plan, and a plan trains for the steps
    of its learning-rate schedule. `resume` is a run or a checkpoint to go on from. Raises
    EnvironmentProblem if the ranks need more memory than this host has free; `allow_overcommit`
    starts them all the same.
    """
    if not isinstance(run, str | Path):
        if settings:
            raise TypeError("a plan is resolved already: settings belong to ec.plan")
        job = job_of_plan(plan_from_given(run), data)
    else:
        from echelon.config.load import load_job
        from echelon.core.settings.value_types import toml_text

        over = [] if data is None else [f"data.source={toml_text(data)}"]
        job = load_job(
            run, [*over, *settings], world_size=launched_world_size(), servers=launched_servers()
        )
    return train_job(
        job, resume=None if resume is None else Path(resume), allow_overcommit=allow_overcommit
    )


def launched_world_size() -> int | None:
    """Return the number of ranks that a launcher has started; None without a launcher."""
    from echelon.launch.environment import is_launched, read_launched_rank

    return read_launched_rank().world_size if is_launched() else None


def launched_servers() -> int | None:
    """Return how many of them TF_CONFIG has started as parameter servers; None where it has not."""
    from echelon.launch.environment import is_launched, read_launched_rank

    return read_launched_rank().servers if is_launched() else None


def train_job(
    job: Job,
    *,
    resume: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    allow_overcommit: bool = False,
) -> TrainResult:
    """Train `job` and return how it ended; `say` is told what happens before the ranks speak."""
    require_trainable(job.plan, job.sources)
    require_yes_to_assumed(job.plan, job.sources)
    from echelon.launch.environment import is_launched, local_start_note

    if not is_launched():
        require_paths(job, resume)
    _require_data_and_room(job, allow_overcommit=allow_overcommit, say=say)
    optional_package("torch", extra="train", purpose="training")
    from echelon.launch.room import require_kernels

    plan = job.plan
    require_kernels(
        plan.layout.kernels, plan.cluster.backend, set_by=job.source_of("kernels.provider")
    )
    if is_launched():
        return _train_joined(job, resume)
    if note := local_start_note():
        say(note)
    _require_trackers(job)
    return _train_here(job, resume, say)


def _require_data_and_room(job: Job, *, allow_overcommit: bool, say: Callable[[str], None]) -> None:
    """Raise ConfigError if nothing names the data, EnvironmentProblem if memory is short."""
    from echelon.config.rules.training import data_problems
    from echelon.launch.room import overcommitted, ranks_of_this_host, room_problems

    unnamed = data_problems(job)
    room = room_problems(job.plan, ranks_of_this_host(job.plan.mesh.world_size))
    if allow_overcommit:
        room = overcommitted(room, say)
    if problems := [*unnamed, *room]:
        raise (EnvironmentProblem if room else ConfigError)(problems)


def _train_here(job: Job, resume: Path | None, say: Callable[[str], None]) -> TrainResult:
    from echelon.api.observing import trace_plan, trace_run
    from echelon.api.run_setup import prepare_run
    from echelon.core.serialize import to_json
    from echelon.launch.environment import require_start_here
    from echelon.launch.local.supervisor import run_ranks
    from echelon.launch.process_group import require_devices
    from echelon.telemetry.observer import telling_ranks
    from echelon.telemetry.trackers.start import mirrored_run

    mesh, backend = job.plan.mesh, job.plan.cluster.backend
    require_devices(backend, mesh.world_size, set_by=job.source_of("cluster.preset"))
    require_start_here(backend)  # before the run has a folder
    _require_offload_dir(job, range(mesh.world_size))
    run, task = prepare_run(job, resume, say)
    with run.locked():
        try:
            trace_plan(job, run.path)
            with mirrored_run(job, run.path, say):
                outcome = run_ranks(
                    TRAIN_RANK,
                    to_json(task),
                    world_size=mesh.world_size,
                    labels=_labels(job),
                    log_dir=run.logs,
                    options=_options(job),
                )
        except KeyboardInterrupt:
            return _interrupted(run, task)
        results = outcome.require()
        # One that did not come back to a run, or too late, has none.
        summary = next(one for rank in telling_ranks(job.plan) if (one := results[rank]))
        try:
            trace_run(job, run.path, say=say)
        except KeyboardInterrupt:
            say("no measured trace: interrupted")
            summary = replace(summary, stopped=True)
        return TrainResult(run=run.path, data=Path(task.data), summary=summary)


def _interrupted(run: RunDirectory, task: RankTask) -> TrainResult:
    """Return the result of a run whose ranks were ended: the checkpoint that it has, if any.

    KeyboardInterrupt where there is none. A folder without a step is removed then: the same command
    begins anew.
    """
    from echelon.telemetry.run_directory import RunDirectory
    from echelon.telemetry.summary import step_losses
    from echelon.training.checkpoint.folder import find_checkpoint, list_checkpoints
    from echelon.training.loop import TrainSummary

    stored = list_checkpoints(run.checkpoints)
    if not stored:
        if not step_losses(run.path):
            run.remove()
        if task.resume is None:
            raise KeyboardInterrupt
        stored = (find_checkpoint(Path(task.resume)),)
        run = RunDirectory(stored[-1].path.parent.parent)
    summary = TrainSummary(
        steps=stored[-1].step,
        stopped=True,
        loss=None,
        first_validation=None,
        last_validation=None,
        num_validations=0,
        checkpoint=str(stored[-1].path),
    )
    return TrainResult(run=run.path, data=Path(task.data), summary=summary)


def _train_joined(job: Job, resume: Path | None) -> TrainResult:
    from echelon.launch.environment import check_servers, read_launched_rank
    from echelon.launch.launched.rank import run_launched_rank

    place = read_launched_rank()
    if job.plan.mathematics.local_sgd.is_elastic:
        least = job.plan.mathematics.local_sgd.min_islands
        raise EnvironmentProblem(
            LOST_ISLANDS_NEED_OUR_LAUNCHER.problem(
                f"local_sgd.min_islands = {least}, and {place.launcher} has started the ranks",
                key="local_sgd.min_islands",
                set_by=job.source_of("local_sgd.min_islands"),
                suggestions=(
                    'local_sgd.min_islands = "all"',
                    f"echelon train without {place.launcher}",
                ),
            )
        )
    check_servers(place, job.plan.mesh.servers)
    if place.rank == 0:
        _require_trackers(job)
    # The last rank of a host finds the bytes of all of them, before any rank has reserved its own.
    _require_offload_dir(job, range(place.rank - place.local_rank, place.rank + 1))
    if resume is None:
        _require_weights(job)
    argument = {"job": job.for_ranks(), "resume": None if resume is None else str(resume)}
    outcome = run_launched_rank(JOINED_RANK, argument, labels=_labels(job), options=_options(job))
    return replace(outcome.require()[0], rank=outcome.rank)


def require_paths(job: Job, resume: Path | None) -> None:
    """Refuse files and folders that are not there, before torch is imported."""
    from echelon.training.checkpoint.folder import find_checkpoint
    from echelon.training.data.index import INDEX_FILE_NAME
    from echelon.training.data.sources import require_source
    from echelon.training.data.tokenizer import require_tokenizer

    if resume is None:
        _require_weights(job)
    else:
        find_checkpoint(resume)
    if not job.data.mixture:
        require_source(job.data.source)
        if not (Path(job.data.source) / INDEX_FILE_NAME).is_file():  # Prepared data has its own.
            require_tokenizer(job.data.tokenizer)


def _require_offload_dir(job: Job, ranks: range) -> None:
    from echelon.config.rules.finders import require_offload_dir

    require_offload_dir(job.plan, ranks, job.source_of("zero.offload_dir"))


def _require_weights(job: Job) -> None:
    """Raise CheckpointError where the file to start from is not one of this model's weights."""
    if job.train.weights != "none":
        from echelon.core.parameters import base_shape
        from echelon.training.weights.files import find_weights, require_optimizer

        found = find_weights(Path(job.train.weights), base_shape(job.plan.model))
        if job.train.weights_optimizer:
            require_optimizer(found, job)
    if job.train.adapters != "none":
        from echelon.training.weights.adapters import find_adapters

        find_adapters(Path(job.train.adapters), job.plan.model)


def _require_trackers(job: Job) -> None:
    from echelon.telemetry.trackers.start import require_trackers

    require_trackers(job.observe.trackers, set_by=job.source_of("observe.trackers"))


def _labels(job: Job) -> tuple[str, ...]:
    return tuple(map(job.plan.mesh.label, range(job.plan.mesh.world_size)))


def _options(job: Job) -> LaunchOptions:
    from echelon.launch.local.messages import Limits, elastic_ranks
    from echelon.launch.local.supervisor import LaunchOptions
    from echelon.telemetry.observer import telling_ranks

    elastic = elastic_ranks(job.plan)
    # Calls of ranks that come and go are not those of one program.
    desync_s = job.train.desync_after_s or None if elastic is None else None
    return LaunchOptions(
        backend=job.plan.cluster.backend,
        limits=Limits(step_s=job.train.step_timeout_s, desync_s=desync_s),
        shown_rank=telling_ranks(job.plan),
        elastic=elastic,
    )


def train_joined_rank(context: RankContext, argument: Mapping[str, Any]) -> TrainResult:
    """Train this rank of the job in `argument`; the target of every rank under torchrun.

    Rank 0 prepares the run, and the others hear of it through the store.
    """
    from echelon.api.observing import trace_plan, trace_run
    from echelon.api.run_setup import prepare_run
    from echelon.core.serialize import to_json
    from echelon.telemetry.trackers.start import mirrored_run

    job = Job.from_ranks(argument["job"])
    if context.rank != 0:
        return _train_rank(context, _hear_task(context, job))
    context.progress.mark("preparing the run")
    resume = argument["resume"]
    run, task = prepare_run(job, None if resume is None else Path(resume), say=lambda _: None)
    with run.locked():
        context.store.set(TASK_KEY, json.dumps(to_json(task)))
        trace_plan(job, run.path)
        with mirrored_run(job, run.path, say=lambda text: print(text, file=sys.stderr)):
            result = _train_rank(context, task)
        trace_run(job, run.path)
        return result


def _hear_task(context: RankContext, job: Job) -> RankTask:
    from echelon.core.serialize import from_json
    from echelon.training.loop import RankTask

    with context.progress.waits_for("rank 0 to prepare the run"):
        context.store.wait([TASK_KEY], timedelta(seconds=job.train.step_timeout_s))
    return from_json(RankTask, json.loads(context.store.get(TASK_KEY)))


def _train_rank(context: RankContext, task: RankTask) -> TrainResult:
    from echelon.core.serialize import to_json
    from echelon.launch.launched.rank import keep_log
    from echelon.telemetry.run_directory import RunDirectory
    from echelon.training.loop import train_rank

    run = RunDirectory(Path(task.run_dir))
    keep_log(run.logs, context.rank, "nccl" if context.device.type == "cuda" else "gloo")
    summary = train_rank(context, to_json(task))
    assert summary is not None, "no rank comes back under torchrun"
    return TrainResult(run=run.path, data=Path(task.data), summary=summary, rank=context.rank)


def follow_run(
    job: Job, place: LaunchedRank, found: Callable[[CheckpointLoss], None]
) -> tuple[CheckpointLoss, ...]:
    """Validate each new checkpoint of the run that `place` evaluates; return all when it has ended.

    `found` is told each as it comes. EnvironmentProblem where the ranks do not come.
    """
    optional_package("torch", extra="train", purpose="evaluating")
    from echelon.training.checkpoint.index import read_index
    from echelon.training.evaluator import CheckpointEvaluator

    store, task = _hear(job, place)
    every: list[CheckpointLoss] = []
    resumed = -1 if task.resume is None else read_index(Path(task.resume)).step
    evaluator = CheckpointEvaluator(task)
    try:
        for one in evaluator.follow(lambda: run_has_ended(store), after=resumed):
            every.append(one)
            found(one)
    finally:
        evaluator.close()
    return tuple(every)


def _hear(job: Job, place: LaunchedRank) -> tuple[Store, RankTask]:
    """Return the store of the launch, and what rank 0 tells the others."""
    from echelon.core.serialize import from_json
    from echelon.launch.launched.rank import launch_store
    from echelon.launch.process_group import target_store
    from echelon.training.loop import RankTask

    limit = job.train.step_timeout_s
    store = launch_store(place, limit)
    try:
        told = target_store(store)
        told.wait([TASK_KEY], timedelta(seconds=limit))
        return store, from_json(RankTask, json.loads(told.get(TASK_KEY)))
    except RuntimeError as error:
        message = f"rank 0 said nothing of a run within {limit:g} s"
        raise EnvironmentProblem(RANK_NEVER_JOINED.problem(message)) from error


def run_has_ended(store: Store) -> bool:
    """Return whether all ranks have ended: they say so, or the one that hosts the store is gone."""
    from echelon.launch.launched.rank import ALL_DONE

    try:
        return store.check([ALL_DONE])
    except RuntimeError:
        return True
