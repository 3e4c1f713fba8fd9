# SPDX-License-Identifier: Apache-2.0
"""Join a run whose ranks a launcher has started: torchrun, srun, mpirun or another launcher."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch

from echelon.core.cluster import Backend
from echelon.launch.context import RankContext, RankProgress
from echelon.launch.desync.ring import new_ring, remove_ring
from echelon.launch.environment import LaunchedRank, check_world_size, read_launched_rank
from echelon.launch.gpus import dump_environment, gpu_environment
from echelon.launch.handshake import check_same_start
from echelon.launch.host import keep_freed_memory
from echelon.launch.launched.watchdog import WATCHDOG_INTERVAL_S, Watchdog
from echelon.launch.local.messages import Limits, TargetFunction, find_target, name_target
from echelon.launch.local.output import copy_to_log, log_name
from echelon.launch.local.rank import call_target, fault_from_error
from echelon.launch.local.supervisor import DEFAULT_OPTIONS, LaunchOptions, RunOutcome
from echelon.launch.process_group import (
    PrefixStore,
    Store,
    device_of,
    joined_ranks,
    open_launch_store,
)
from echelon.launch.root_cause import FaultKind, RankFailure, RankFault
from echelon.launch.stop import STOPPING, stop_request

ALL_DONE = "all-done"
"""What is in the store when all ranks have ended."""
_VERDICT_S = 8.0
_READ_S = 2.5 * WATCHDOG_INTERVAL_S


class FaultReport:
    """Tell all ranks what this one raised, once, as soon as it is known."""

    def __init__(self, watchdog: Watchdog, rank: int) -> None:
        """Tell by `watchdog`."""
        self._watchdog, self._rank = watchdog, rank
        self._first: RankFault | None = None

    def tell(self, error: BaseException) -> RankFault:
        """Return the fault that counts, and leave the others time to read it.

        That is not always this one; an echo of another first waits for its cause to be found.
        """
        if self._first is None:
            fault = fault_from_error(error, self._rank)
            if fault.kind is FaultKind.CONNECTION:
                time.sleep(_VERDICT_S)
            self._first = self._watchdog.publish_fault(fault)
            time.sleep(_READ_S)
        return self._first


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedLaunch:
    """Hold what this process knows of a launch whose ranks have all come: the watchdog watches."""

    place: LaunchedRank
    store: Store
    device: torch.device
    labels: tuple[str, ...]
    progress: RankProgress
    watchdog: Watchdog
    faults: FaultReport
    limits: Limits

    @contextmanager
    def ranks(
        self, store: Store, world_size: int, *, timeout_s: float = 0.0
    ) -> Iterator[RankContext]:
        """Hold a process group of the first ranks open; what is raised inside is told in it.

        To leave the group first could wait for collectives whose peers never come. A collective may
        take `timeout_s`, or as long as the limits say if that is more.
        """
        group = joined_ranks(
            store,
            self.device,
            rank=self.place.rank,
            labels=self.labels[:world_size],
            progress=self.progress,
            timeout_s=max(timeout_s, self.limits.collective_s),
        )
        with group as context:
            try:
                yield context
            except BaseException as error:
                self.faults.tell(error)
                raise

    def leave(self) -> None:
        """Wait for the end of the other ranks: one of them may host the store."""
        self.progress.enter("the end of the other ranks")
        self.watchdog.finish()
        wait_for_ranks(self.store, self.place.world_size, self.limits.collective_s)


def run_launched_rank(
    target: str | TargetFunction,
    argument: object,
    *,
    labels: Sequence[str],
    log_dir: Path | None = None,
    options: LaunchOptions = DEFAULT_OPTIONS,
) -> RunOutcome:
    """Call ``target(context, argument)`` as the one rank that the environment says this is.

    `results` of the outcome holds this rank's result. When another rank fails, this process says
    for whom it stops and exits with code 4 from wherever it is.
    """
    place = read_launched_rank()
    check_world_size(place, len(labels))
    if log_dir is not None:
        keep_log(log_dir, place.rank, options.backend)
    function = find_target(name_target(target))

    def work(joined: JoinedLaunch) -> object:
        with joined.ranks(joined.store, place.world_size) as context:
            result = call_target(function, context, argument)
            joined.leave()
            return result

    return run_joined(work, argument, labels=labels, options=options)


def keep_log(folder: Path, rank: int, backend: Backend) -> None:
    """Write what this rank prints into `folder` as well, and what NCCL dumps at a timeout."""
    folder.mkdir(parents=True, exist_ok=True)
    copy_to_log(folder / log_name(rank))
    os.environ.update(dump_environment(folder, backend))


def run_joined(
    work: Callable[[JoinedLaunch], object],
    argument: object,
    *,
    labels: Sequence[str],
    options: LaunchOptions,
) -> RunOutcome:
    """Join the launch that the environment tells of and do `work` in it; all have one `argument`.

    No process group is open yet. What `work` raises ends all ranks.
    """
    place, names, limits = read_launched_rank(), tuple(labels), options.limits
    if options.backend == "nccl":
        # Before the driver starts and the first group is made: they read it then.
        os.environ.update(gpu_environment())
    keep_freed_memory()
    progress = RankProgress()
    if limits.desync_s is not None:
        # Without room for a ring the run goes on: it only cannot be compared.
        with suppress(OSError):
            progress.ring = new_ring(place.rank)
    # A rank that hosts the store talks to it over a second connection: the first may block. After
    # a restart torchrun keeps its store, and Gloo would connect to the addresses of the dead.
    stores = [
        launch_store(one, limits.join_s) for one in (place, replace(place, store_is_hosted=True))
    ]
    watchdog = Watchdog(
        stores[1],
        rank=place.rank,
        labels=names,
        progress=progress,
        limits=limits,
        store_port=place.master_port,
    )
    faults = FaultReport(watchdog, place.rank)
    # A launcher sends several signals for one Ctrl-C, and kills those that take too long itself.
    line = STOPPING if place.rank == 0 else ""
    with stop_request() as stop, stop.answered_by(progress.request_stop, line=line, repeats=False):
        try:
            check_same_start(
                stores[0], rank=place.rank, labels=names, argument=argument, timeout_s=limits.join_s
            )
            watchdog.start()
            result = work(
                JoinedLaunch(
                    place=place,
                    store=stores[0],
                    device=device_of(options.backend, place.local_rank, launcher=place.launcher),
                    labels=names,
                    progress=progress,
                    watchdog=watchdog,
                    faults=faults,
                    limits=limits,
                )
            )
        except BaseException as error:
            fault = faults.tell(error)
            failure = RankFailure(fault, names[fault.rank])
            return RunOutcome(
                results=(),
                failure=failure,
                stop_requested=progress.stop_requested(),
                rank=place.rank,
            )
        finally:
            watchdog.leave()
            if progress.ring is not None:
                remove_ring(progress.ring.path)
    return RunOutcome(results=(result,), stop_requested=progress.stop_requested(), rank=place.rank)


def launch_store(place: LaunchedRank, timeout_s: float) -> Store:
    """Return the store of this attempt of a launch."""
    return PrefixStore(f"echelon/{place.attempt}", open_launch_store(place, timeout_s))


def wait_for_ranks(store: Store, world_size: int, timeout_s: float) -> None:
    """Wait until so many ranks have come here."""
    if store.add("done", 1) == world_size:
        store.set(ALL_DONE, "1")
    store.wait([ALL_DONE], timedelta(seconds=timeout_s))
