"""Run one job on local ranks, from the first process to the last, and say how it ended."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from echelon.core.cluster import Backend
from echelon.core.errors import RunFailed
from echelon.core.rulebook.launch import RUN_INTERRUPTED
from echelon.launch.crew import Crew
from echelon.launch.culprit import RankFailure
from echelon.launch.environment import wanted_port
from echelon.launch.messages import Dismiss, Job, StopRequest
from echelon.launch.stop_signals import StopSignals, handle_stop_signals
from echelon.launch.target import TargetFunction, name_target
from echelon.launch.watch import Limits, Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Say how ranks talk, how long they may be quiet, and whose output the terminal shows.

    `port` is where local ranks meet: "auto" takes MASTER_PORT, or any free port without it.
    """

    backend: Backend = "gloo"
    limits: Limits = field(default_factory=Limits)
    port: int | Literal["auto"] = "auto"
    shown_rank: int | None = 0


DEFAULT_OPTIONS = LaunchOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Say how a run ended: what the ranks returned, or which one failed first.

    Under torchrun each process knows its own `rank` and result only; started here, `rank` is 0 and
    `results` holds those of all ranks. `stop_requested` is True after Ctrl-C or SIGTERM.
    """

    results: tuple[Any, ...]
    failure: RankFailure | None = None
    stop_requested: bool = False
    rank: int = 0

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
    ``log_dir/rank-000r.log``. Ctrl-C and SIGTERM become `RankContext.stop_requested`; a second
    Ctrl-C raises RunFailed at once.
    """
    names = tuple(labels) or ("",) * world_size
    named = name_target(target)
    port = wanted_port() if options.port == "auto" else options.port
    stop = StopSignals()
    with _log_directory(log_dir) as logs, handle_stop_signals(stop.take):
        crew = Crew(world_size, logs, port=port, shown_rank=options.shown_rank)
        try:
            with crew:
                crew.ensure(world_size)
                _send_job(crew, named, argument, names, options)
                watch = Watch(crew, names, options.limits)
                results = watch.results(_pass_on(stop, crew))
                for process in crew.ranks:
                    process.send(Dismiss())
                crew.dismiss()
        except RankFailure as failure:
            _tell_others(failure, names)
            return RunOutcome(results=(), failure=failure, stop_requested=stop.requested)
        except KeyboardInterrupt:
            raise RunFailed(
                RUN_INTERRUPTED.problem("interrupted twice; every rank was ended at once")
            ) from None
    return RunOutcome(results=tuple(results), stop_requested=stop.requested)


def _send_job(
    crew: Crew, target: Any, argument: object, labels: tuple[str, ...], options: LaunchOptions
) -> None:
    limits = options.limits
    for process in crew.ranks:
        process.send(
            Job(
                number=1,
                target=target,
                argument=argument,
                labels=labels,
                backend=options.backend,
                port=crew.store_port,
                join_timeout_s=limits.rendezvous_s,
                collective_timeout_s=limits.collective_s,
                introduce=True,
            )
        )


def _pass_on(stop: StopSignals, crew: Crew) -> Callable[[], None]:
    """Return what passes a stop request on to the ranks, once."""
    sent = False

    def each_poll() -> None:
        nonlocal sent
        if stop.received is not None and not sent:
            sent = True
            name = stop.received.name
            _say(f"{name}: stopping at the end of this step (Ctrl-C again ends at once)")
            for process in crew.ranks:
                process.send(StopRequest())

    return each_poll


def _tell_others(failure: RankFailure, labels: tuple[str, ...]) -> None:
    others = [str(rank) for rank in range(len(labels)) if rank != failure.rank]
    if others:
        plural = "ranks" if len(others) > 1 else "rank"
        _say(f"{plural} {', '.join(others)} stopped for {failure.who}")


def _say(text: str) -> None:
    """Print one line, over the progress bar that a rank may have left on the terminal."""
    clear_line = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(clear_line + text, file=sys.stderr, flush=True)


@contextmanager
def _log_directory(wanted: Path | None) -> Iterator[Path]:
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="echelon-logs-") as directory:
            yield Path(directory)
    else:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted
