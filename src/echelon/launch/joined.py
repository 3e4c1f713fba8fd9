"""Join a run that torchrun (or another launcher that sets RANK and WORLD_SIZE) has started."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from echelon.launch.context import Progress, RankContext
from echelon.launch.culprit import Fault, FaultKind, RankFailure
from echelon.launch.environment import Place, check_world_size, read_place
from echelon.launch.handshake import introduce
from echelon.launch.host_memory import keep_freed_memory
from echelon.launch.messages import Raised
from echelon.launch.output import copy_to_log, log_name
from echelon.launch.process_group import device_of, process_group
from echelon.launch.rank import call_target, describe_error
from echelon.launch.sentinel import TICK_S, Sentinel
from echelon.launch.stop_signals import handle_stop_signals
from echelon.launch.store import PrefixStore, Store, open_place
from echelon.launch.supervisor import DEFAULT_OPTIONS, LaunchOptions, RunOutcome
from echelon.launch.target import TargetFunction, find_target, name_target

_VERDICT_S = 8.0
_READ_S = 2.5 * TICK_S


def run_joined(
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
    place = read_place()
    check_world_size(place, len(labels))
    keep_freed_memory()
    names = tuple(labels)
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        copy_to_log(log_dir / log_name(place.rank))
    limits = options.limits
    function = find_target(name_target(target))
    progress = Progress()
    stores = [_attempt(open_place(place, limits.join_s), place.attempt)]
    # A rank that hosts the store talks to it over a second connection: the first may block.
    stores.append(_attempt(open_place(place.as_client(), limits.join_s), place.attempt))
    sentinel = Sentinel(stores[1], rank=place.rank, labels=names, progress=progress, limits=limits)
    # A launcher sends several signals for one Ctrl-C, and kills those that take too long itself.
    with handle_stop_signals(lambda *_: progress.request_stop()):
        try:
            introduce(
                stores[0],
                rank=place.rank,
                labels=names,
                argument=argument,
                timeout_s=limits.join_s,
            )
            sentinel.start()
            with _joined(place, names, stores[0], progress, options) as context:
                result = call_target(function, context, argument)
                progress.enter("the end of the other ranks")
                sentinel.finish()
                _wait_for_all(stores[0], place.world_size, limits.collective_s)
        except BaseException as error:
            fault = _blame(sentinel, place.rank, describe_error(error))
            failure = RankFailure(fault, names[fault.rank])
            return RunOutcome(
                results=(),
                failure=failure,
                stop_requested=progress.stop_requested(),
                rank=place.rank,
            )
    return RunOutcome(results=(result,), stop_requested=progress.stop_requested(), rank=place.rank)


@contextmanager
def _joined(
    place: Place,
    labels: tuple[str, ...],
    store: Store,
    progress: Progress,
    options: LaunchOptions,
) -> Iterator[RankContext]:
    """Hold the process group of this run open, and yield what a target knows of its place."""
    device = device_of(options.backend, place.local_rank)
    group = process_group(
        options.backend,
        PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout_s=options.limits.collective_s,
    )
    with group:
        yield RankContext(
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            device=device,
            store=PrefixStore("target", store),
            progress=progress,
            label=labels[place.rank],
        )


def _attempt(store: Store, attempt: str) -> Store:
    """Return the part of the store that belongs to this attempt.

    After a restart torchrun keeps its store, and Gloo would connect to the addresses of the dead.
    """
    return PrefixStore(f"echelon/{attempt}", store)


def _blame(sentinel: Sentinel, rank: int, raised: Raised) -> Fault:
    """Tell all ranks what this one raised; an echo first waits for its cause to be found."""
    kind = FaultKind.CONNECTION if raised.connection else FaultKind.RAISED
    fault = Fault(
        rank=rank,
        kind=kind,
        at=raised.at,
        summary=raised.summary,
        detail=raised.traceback,
        error=raised.error,
    )
    if raised.connection:
        time.sleep(_VERDICT_S)
    first = sentinel.blame(fault)
    time.sleep(_READ_S)
    return first


def _wait_for_all(store: Store, world_size: int, timeout_s: float) -> None:
    if store.add("done", 1) == world_size:
        store.set("all-done", "1")
    store.wait(["all-done"], timedelta(seconds=timeout_s))
