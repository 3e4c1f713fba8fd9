# SPDX-License-Identifier: Apache-2.0
"""The evaluator of TF_CONFIG: a process beside the ranks that validates their checkpoints.

It is no rank. It hears from rank 0, through the store of the launch, where the run is, and reads
checkpoints from its folder, which it must see as rank 0 does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.api.training import TASK_KEY
from echelon.config.job import Job
from echelon.core.errors import EnvironmentProblem
from echelon.core.optional import optional_package
from echelon.core.rulebook.launch import RANK_NEVER_JOINED

if TYPE_CHECKING:
    from echelon.launch.environment import LaunchedRank
    from echelon.launch.process_group import Store
    from echelon.training.evaluator import CheckpointLoss
    from echelon.training.loop import RankTask


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
