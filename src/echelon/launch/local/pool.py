# SPDX-License-Identifier: Apache-2.0
"""Ranks that stay alive between jobs: for proofs and tests, which run many short ones."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from echelon.core.cluster import Backend
from echelon.launch.local.elastic_ranks import ElasticRanks
from echelon.launch.local.job_monitor import run_job
from echelon.launch.local.messages import (
    Limits,
    RankJob,
    TargetFunction,
    name_target,
)
from echelon.launch.local.rank_processes import RankProcesses

JOB_TIMEOUT_S = 120.0


class RankPool(AbstractContextManager["RankPool"]):
    """Keep up to `max_world` local ranks; each job gets a fresh process group on the first n.

    Ranks start with the first job that needs them. A job that fails ends the ranks it ran on; the
    next job gets new ones, so a pool is usable whatever happened. Use as a context manager.
    """

    def __init__(
        self,
        max_world: int,
        *,
        backend: Backend = "gloo",
        preloaded: Sequence[str] = (),
        still_s: float | None = None,
    ) -> None:
        """Prepare a pool; nothing is started yet. Modules `preloaded` are imported once for all.

        With `still_s`, ranks that all wait while none computes are ended after so many seconds.
        """
        self._directory = tempfile.TemporaryDirectory(prefix="echelon-pool-")
        self._processes = RankProcesses(
            max_world, Path(self._directory.name), backend=backend, preloaded=tuple(preloaded)
        )
        self._backend: Backend = backend
        self._max_world = max_world
        self._still_s = still_s
        self._jobs = 0

    def __exit__(self, *_: object) -> None:
        """End all ranks."""
        self.close()

    def run(
        self,
        target: str | TargetFunction,
        argument: object = None,
        world_size: int = 1,
        *,
        labels: Sequence[str] = (),
        timeout_s: float = JOB_TIMEOUT_S,
        elastic: ElasticRanks | None = None,
    ) -> list[Any]:
        """Return ``target(context, argument)`` of every rank, in the order of ranks.

        `target` is ``"package.module:function"`` or a top-level function. Arguments and results
        are pickled. RankFailure names the rank that failed first and carries its traceback. The
        job goes on without ranks that are `elastic`, but the first, which hosts the store.
        """
        if not 1 <= world_size <= self._max_world:
            raise ValueError(f"world size {world_size} in a pool of {self._max_world} ranks")
        named = name_target(target)
        try:
            self._processes.ensure(world_size)
            self._jobs += 1
            job = RankJob(
                number=self._jobs,
                target=named,
                argument=argument,
                labels=tuple(labels) or ("",) * world_size,
                backend=self._backend,
                port=self._processes.store_port,
                limits=Limits(step_s=timeout_s, job_s=timeout_s, still_s=self._still_s),
                introduce=False,
                elastic=elastic,
            )
            return run_job(self._processes, job)
        except BaseException:
            self._processes.discard(after_s=0.0)
            raise

    def begin(self) -> None:
        """Begin to start ranks, and return at once: the first job will not wait as long."""
        self._processes.begin()

    def renew(self) -> None:
        """End all ranks: the next job runs in processes that have imported nothing of the last."""
        self._processes.discard(after_s=0.0)

    def close(self) -> None:
        """End all ranks and remove their logs."""
        self._processes.close()
        self._directory.cleanup()
