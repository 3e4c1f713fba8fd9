"""Keep all cases of a mode alive and let them take turns: A B C, A B C, ...

Options, start-up, rounds and orderly ends of the benches that compare live cases.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.catalogue import DEFAULT_PEERS, Case, chosen_modes, ours, own_module, peers
from bench.harness.hosts import Host, one_host, remove_leftovers
from bench.harness.ranks import CaseFailed, CaseSkipped, Measurement, RankGroup
from bench.harness.spec import MODES, SIZES, Mode, Size

STALE_LOCK_S = 60.0

HostMaker = Callable[[], contextlib.AbstractContextManager[Sequence[Host]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Hold what the commands have in common."""

    modes: tuple[Mode, ...]
    size: Size
    rounds: int
    steps: int
    warmup: int
    num_peers: int
    with_echelon: bool
    peers_home: Path
    json: Path | None
    logs: Path
    own_module: bool = False

    def cases(self, mode: Mode) -> tuple[Case, ...]:
        """Return the cases of a mode: Echelon first, then the fastest known peers."""
        mine = own_module(mode, self.peers_home) if self.own_module else ours(mode)
        others = peers(mode, self.peers_home, at_most=self.num_peers, own_module=self.own_module)
        return ((mine,) if self.with_echelon else ()) + others


def add_turns(parser: argparse.ArgumentParser, *, steps: int) -> None:
    """Add the flags of rounds, and of where results go."""
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="turns of every case (default: %(default)s)")
    add("--steps", type=int, default=steps, help="timed steps a turn (default: %(default)s)")
    add("--json", type=Path, help="write every measurement to this file")
    add("--logs", type=Path, help="folder for the output of ranks (default: a new one)")


def logs_folder(given: Path | None) -> Path:
    """The folder for the output of ranks, which is there then."""
    logs = given or Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    logs.mkdir(parents=True, exist_ok=True)
    return logs.absolute()


def add_options(parser: argparse.ArgumentParser, *, steps: int) -> None:
    """Add the common flags of commands that compare modes."""
    add = parser.add_argument
    add("--modes", default=",".join(MODES), help="comma-separated: %(default)s")
    add("--size", choices=SIZES, default="spec", help="size of the model (default: %(default)s)")
    add_turns(parser, steps=steps)
    add("--warmup", type=int, default=1, help="untimed steps a turn (default: %(default)s)")
    add("--peers", type=int, default=2, help="how many, the fastest known first (%(default)s)")
    add("--no-echelon", action="store_true", help="measure the peers only")
    own = "train the peers' module with ec.parallelize, instead of Echelon's own model"
    add("--own-module", action="store_true", help=own)
    add("--peers-home", type=Path, default=DEFAULT_PEERS, help="where setup_peers.sh put them")


def read_options(arguments: argparse.Namespace) -> Options:
    """The common options; exits with a usage error on an unknown mode, and cleanly from then on."""
    try:
        modes = chosen_modes(arguments.modes)
    except ValueError as error:
        sys.exit(f"error: {error}")
    options = Options(
        modes=modes,
        size=SIZES[arguments.size],
        rounds=arguments.rounds,
        steps=arguments.steps,
        warmup=arguments.warmup,
        num_peers=arguments.peers,
        with_echelon=not arguments.no_echelon,
        peers_home=arguments.peers_home.absolute(),
        json=arguments.json,
        logs=logs_folder(arguments.logs),
        own_module=arguments.own_module,
    )
    python = options.peers_home / "venv" / "bin" / "python"
    if options.num_peers and not python.exists():
        sys.exit(f"error: {python} is missing; run: bench/setup_peers.sh {options.peers_home}")
    _remove_stale_locks(options.peers_home)
    end_cleanly()
    return options


def _remove_stale_locks(peers_home: Path) -> None:
    """Remove the locks that DeepSpeed's loader leaves when it is killed: it waits for them forever.

    The operators are built beforehand, so a loader holds its lock for moments only.
    """
    for lock in peers_home.glob("torch_extensions/*/lock"):
        if time.time() - lock.stat().st_mtime > STALE_LOCK_S:
            lock.unlink(missing_ok=True)
            say(f"removed {lock}, left over by a run that was killed")


def end_cleanly() -> None:
    """Turn signals into an exit that runs every `finally`, and clear what killed runs left."""
    asked_to_end = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def leave(number: int, _: object) -> None:
        for other in asked_to_end:
            signal.signal(other, signal.SIG_IGN)  # a second one must not cut the cleaning short
        sys.exit(128 + number)

    for number in asked_to_end:
        signal.signal(number, leave)
    for name in remove_leftovers():
        print(f"removed {name}, left over by a run that was killed", file=sys.stderr)


@dataclass(slots=True)
class Contest:
    """The live cases of one mode, what they took so far, and why some are out."""

    logs: Path
    size: Size
    rounds: dict[str, list[Measurement]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    groups: dict[str, tuple[RankGroup, Sequence[Host]]] = field(default_factory=dict)

    def enter(self, case: Case, stack: contextlib.ExitStack, make_hosts: HostMaker) -> None:
        """Start a case and run its first step, which is never measured."""
        case_stack = contextlib.ExitStack()
        try:
            hosts = case_stack.enter_context(make_hosts())
            group = RankGroup(case, case.settings(self.size), hosts, self.logs)
            case_stack.enter_context(group)
            group.run(warmup=0, steps=1)
        except (CaseFailed, CaseSkipped) as error:
            case_stack.close()
            self._out(case.label, error)
            return
        except BaseException:
            case_stack.close()
            raise
        stack.push(case_stack)
        self.groups[case.label] = (group, hosts)
        self.rounds[case.label] = []

    def turn(self, label: str, *, warmup: int, steps: int) -> Measurement | None:
        """Let one case run; None where it fails, after which it is out."""
        group, _ = self.groups[label]
        try:
            taken = group.run(warmup=warmup, steps=steps)
        except (CaseFailed, CaseSkipped) as error:
            self._out(label, error)
            group.close()
            del self.groups[label]
            return None
        say(f"  {label}: {taken.step_s:.3f} s, CPU {taken.cpu_s:.3f} s")
        return taken

    def keep(self, label: str, *, warmup: int, steps: int) -> None:
        """Let one case run and keep what it took."""
        taken = self.turn(label, warmup=warmup, steps=steps)
        if taken is not None:
            self.rounds[label].append(taken)

    def take_rounds(
        self, rounds: int, *, warmup: int, steps: int, before: Callable[[str], None] | None = None
    ) -> None:
        """Let all cases take turns, and keep what they took; `before` is told whose turn it is."""
        for number in range(rounds):
            say(f" round {number + 1} of {rounds}")
            for label in list(self.groups):
                if before is not None:
                    before(label)
                if label in self.groups:
                    self.keep(label, warmup=warmup, steps=steps)

    def _out(self, label: str, error: Exception) -> None:
        lines = str(error).strip().splitlines()
        self.failures[label] = " ".join(lines)[:300]
        say(f"  {label} did not run: {self.failures[label]}")


@contextlib.contextmanager
def contest(
    cases: Iterable[Case], *, logs: Path, size: Size, hosts: HostMaker | None = None
) -> Iterator[Contest]:
    """Yield a contest with every case started that can start (on one host); ends them all."""
    with contextlib.ExitStack() as stack:
        entered = Contest(logs=logs, size=size)
        for case in cases:
            entered.enter(case, stack, hosts or on_one_host)
        yield entered


@contextlib.contextmanager
def on_one_host() -> Iterator[Sequence[Host]]:
    """Yield the one host of a case that needs no links."""
    with one_host() as host:
        yield (host,)


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)
