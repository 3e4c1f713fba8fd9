# SPDX-License-Identifier: Apache-2.0
"""Run jobs on local ranks, from the first process to the last, and say how each ended.

Before ranks take steps, Ctrl-C and SIGTERM end everything; later they become a request to stop at
the next step boundary. The ranks of a pool stay alive between jobs: for proofs and tests, which run
many short ones.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from echelon.core.cluster import Backend
from echelon.launch.context import LostRank
from echelon.launch.desync.ring import ring_folder
from echelon.launch.environment import wanted_port
from echelon.launch.local.job_monitor import run_job
from echelon.launch.local.messages import (
    ElasticRanks,
    Limits,
    Notice,
    RankJob,
    TargetFunction,
    name_target,
)
from echelon.launch.local.rank_processes import RankProcesses
from echelon.launch.root_cause import RankFailure
from echelon.launch.stop import StopRequest, stop_request

JOB_TIMEOUT_S = 120.0


class StopRelay:
    """Pass a request to stop on to ranks that answer it with a result."""

    def __init__(self, stop: StopRequest, processes: RankProcesses) -> None:
        """Nothing is passed on yet."""
        self._stop, self._processes, self._passed_on = stop, processes, False

    def poll(self, answering: bool) -> None:
        """Pass the request on, once; KeyboardInterrupt if it came before a rank was `answering`."""
        self._stop.check()
        if answering:
            self._stop.begin_answers()
        if self._stop.answered and not self._passed_on:
            self._passed_on = True
            for process in self._processes.ranks:
                process.send(Notice.STOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Say how ranks talk, how long they may be quiet, and whose output the terminal shows.

    `port` is where local ranks meet: "auto" takes MASTER_PORT, or any free port without it. Where
    ranks are `elastic`, the run goes on without some, and this process hosts the store.
    """

    backend: Backend = "gloo"
    limits: Limits = field(default_factory=Limits)
    port: int | Literal["auto"] = "auto"
    shown_rank: int | tuple[int, ...] | None = 0
    elastic: ElasticRanks | None = None


DEFAULT_OPTIONS = LaunchOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Say how a run ended: what the ranks returned, or which one failed first.

    Under torchrun each process knows its own `rank` and result only; started here, `rank` is 0 and
    `results` holds those of all ranks. `stop_requested` is True after Ctrl-C or SIGTERM. `lost`
    are ranks without which the run went on: the result of one that did not come back is None.
    """

    results: tuple[Any, ...]
    failure: RankFailure | None = None
    stop_requested: bool = False
    rank: int = 0
    lost: tuple[LostRank, ...] = ()

    def require(self) -> tuple[Any, ...]:
        """Return the results; raise what failed: the user's error as it was, or a RankFailure."""
        if self.failure is None:
            return self.results
        if self.failure.error is not None:
            raise self.failure.error from None
        raise self.failure


def run_ranks(
    target: str | TargetFunction,
    argument: object,
    *,
    world_size: int,
    labels: Sequence[str] = (),
    log_dir: Path | None = None,
    options: LaunchOptions = DEFAULT_OPTIONS,
) -> RunOutcome:
    """Call ``target(context, argument)`` on `world_size` local ranks; all end before this returns.

    `argument` is JSON. `labels` names the place of each rank in the mesh. Rank r writes to
    ``log_dir/rank-000r.log``. Ctrl-C, SIGTERM and SIGHUP end all ranks and raise
    KeyboardInterrupt, until a rank calls `RankProgress.answer_stop`. From there on they become
    `RankContext.stop_requested`, and only a second Ctrl-C raises KeyboardInterrupt.
    """
    names = tuple(labels) or ("",) * world_size
    named = name_target(target)
    port = wanted_port() if options.port == "auto" else options.port
    lost: list[LostRank] = []
    with (
        _log_directory(log_dir) as logs,
        _ring_directory(options.limits) as rings,
        stop_request() as stop,
        stop.noted(),
    ):
        processes = RankProcesses(
            world_size,
            logs,
            port=port,
            shown_rank=options.shown_rank,
            backend=options.backend,
            # What modules of others do when imported may not bear a fork.
            preloaded=(named.module,) if named.module.startswith("echelon.") else (),
            store_rank=0 if options.elastic is None else None,
            each_wait=stop.check,
        )
        try:
            with processes:
                processes.ensure(world_size)
                job = RankJob(
                    number=1,
                    target=named,
                    argument=argument,
                    labels=names,
                    backend=options.backend,
                    port=processes.store_port,
                    limits=options.limits,
                    introduce=True,
                    rings=rings,
                    elastic=options.elastic,
                )
                relay = StopRelay(stop, processes)
                results = run_job(processes, job, relay.poll, lost.append)
                processes.let_leave()
        except RankFailure as failure:
            _tell_others(failure, names)
            return RunOutcome(
                results=(), failure=failure, stop_requested=stop.answered, lost=tuple(lost)
            )
    return RunOutcome(results=tuple(results), stop_requested=stop.answered, lost=tuple(lost))


def _tell_others(failure: RankFailure, labels: tuple[str, ...]) -> None:
    others = [str(rank) for rank in range(len(labels)) if rank != failure.rank]
    if others:
        plural = "ranks" if len(others) > 1 else "rank"
        # A rank may have left its progress bar on the terminal.
        clear_line = "\r\x1b[K" if sys.stderr.isatty() else ""
        said = f"{plural} {', '.join(others)} stopped for {failure.who}"
        print(clear_line + said, file=sys.stderr, flush=True)


@contextmanager
def _ring_directory(limits: Limits) -> Iterator[str]:
    """Yield the folder of fingerprints; "" where there are to be none."""
    if limits.desync_s is None:
        yield ""
    else:
        with ring_folder() as folder:
            yield str(folder)


@contextmanager
def _log_directory(wanted: Path | None) -> Iterator[Path]:
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="echelon-logs-") as directory:
            yield Path(directory)
    else:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted


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
