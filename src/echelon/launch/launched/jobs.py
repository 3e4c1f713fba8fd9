# SPDX-License-Identifier: Apache-2.0
"""Many short jobs on the ranks that torchrun started: what `RankPool` does with ranks of ours.

The first rank drives: it says in the store what the first n ranks are to run, takes part itself,
and reads what they returned. The others wait for the next job. Each job has a process group of its
own. What the drive returns, every rank returns.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

from echelon.core.errors import EnvironmentProblem
from echelon.core.rulebook.islands import LOST_ISLANDS_NEED_OUR_LAUNCHER
from echelon.launch.context import RankContext
from echelon.launch.environment import read_launched_rank, read_node_size
from echelon.launch.launched.rank import JoinedLaunch, run_joined, wait_for_ranks
from echelon.launch.local.messages import (
    ElasticRanks,
    TargetFunction,
    TargetReference,
    find_target,
    name_target,
)
from echelon.launch.local.rank import call_target
from echelon.launch.local.supervisor import JOB_TIMEOUT_S, LaunchOptions, RunOutcome
from echelon.launch.process_group import PrefixStore

POLL_S = 20.0
"""Seconds for which a rank waits for the next job before it asks again."""
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Say on what host and device a rank runs, and which of how many ranks of its node it is."""

    host: str
    local_rank: int
    node_size: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchedJob:
    """Ask the first `world_size` ranks to call `target`; `result` is what the drive returned."""

    target: TargetReference | None
    argument: object
    world_size: int = 1
    timeout_s: float = JOB_TIMEOUT_S


class LaunchedPool:
    """Run jobs on the first n ranks of a launch, from its first rank."""

    def __init__(self, joined: JoinedLaunch) -> None:
        """Begin with the first job."""
        self._joined = joined
        self._jobs = count(1)

    @property
    def num_ranks(self) -> int:
        """Return how many ranks the launch has."""
        return self._joined.place.world_size

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
        """Return ``target(context, argument)`` of the first ranks, in their order.

        Arguments and results are pickled; ranks have the labels of the launch. A rank that fails
        ends all of them: EnvironmentProblem where some are to be `elastic`.
        """
        assert not labels, "a launch has labels already"
        if elastic is not None:
            raise EnvironmentProblem(
                LOST_ISLANDS_NEED_OUR_LAUNCHER.problem(
                    "a job that goes on without lost ranks, where torchrun has started the ranks",
                    suggestions=("the same command without torchrun",),
                )
            )
        number = next(self._jobs)
        job = _LaunchedJob(
            target=name_target(target),
            argument=argument,
            world_size=world_size,
            timeout_s=timeout_s,
        )
        store = self._joined.store
        store.set(_key(number), _packed(job))
        own = _take_part(self._joined, number, job)
        others = (store.get(f"{_key(number)}/{rank}") for rank in range(1, world_size))
        return [own, *map(_unpacked, others)]

    def end(self, result: object) -> None:
        """Tell all ranks that there are no more jobs, and what came of them."""
        job = _LaunchedJob(target=None, argument=result)
        self._joined.store.set(_key(next(self._jobs)), _packed(job))


def run_launched_jobs(
    drive: Callable[[LaunchedPool], object],
    argument: object,
    *,
    labels: Sequence[str],
    options: LaunchOptions,
) -> RunOutcome:
    """Call `drive` on the first rank of this launch and serve it on the others.

    All ranks return what it returned; they must have the same `argument`. What any rank raises ends
    all of them.
    """

    def work(joined: JoinedLaunch) -> object:
        if joined.place.rank == 0:
            pool = LaunchedPool(joined)
            result = drive(pool)
            pool.end(result)
        else:
            result = _serve(joined)
        joined.leave()
        return result

    return run_joined(work, argument, labels=labels, options=options)


def tell_place(context: RankContext, _: object) -> RankPlace:
    """Return where this rank runs."""
    import torch

    on_gpu = context.device.type == "cuda"
    return RankPlace(
        host=socket.gethostname(),
        local_rank=read_launched_rank().local_rank,
        node_size=read_node_size(),
        device=torch.cuda.get_device_name(context.device) if on_gpu else "cpu",
    )


def _serve(joined: JoinedLaunch) -> object:
    """Take part in each job that has a place for this rank, until there are no more."""
    for number in count(1):
        joined.progress.mark("waiting for the next job")
        with joined.progress.waits_for("the next job"):
            job = _next_job(joined, number)
        if job.target is None:
            return job.argument
        if joined.place.rank < job.world_size:
            result = _take_part(joined, number, job)
            joined.store.set(f"{_key(number)}/{joined.place.rank}", _packed(result))
    raise AssertionError("numbers end")


def _next_job(joined: JoinedLaunch, number: int) -> _LaunchedJob:
    while True:
        # The first rank may fit for long; a store that is gone is the watchdog's to tell.
        with suppress(RuntimeError):
            joined.store.wait([_key(number)], timedelta(seconds=POLL_S))
            return _unpacked(joined.store.get(_key(number)))
        time.sleep(_RETRY_S)


def _take_part(joined: JoinedLaunch, number: int, job: _LaunchedJob) -> object:
    """Run this rank's part of a job in a process group of the ranks that it has."""
    assert job.target is not None, "it is not the last one"
    store = PrefixStore(f"{_key(number)}/ranks", joined.store)
    with joined.ranks(store, job.world_size, timeout_s=job.timeout_s) as context:
        result = call_target(find_target(job.target), context, job.argument)
        # One that leaves its group early would end the last collective of the others.
        with joined.progress.waits_for("the end of the job"):
            wait_for_ranks(store, job.world_size, job.timeout_s)
        return result


def _packed(value: object) -> str:
    """Return any value as text, which is what a store takes."""
    return pickle.dumps(value).hex()


def _unpacked(text: bytes) -> Any:
    return pickle.loads(bytes.fromhex(text.decode("ascii")))


def _key(number: int) -> str:
    return f"job/{number}"
