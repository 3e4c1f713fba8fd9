"""Measure Echelon and its peers across two hosts with slow links: `python -m bench.cluster`.

A host is a network namespace, its uplink shaped to 200 Mbit/s: transfer takes time but no CPU, so
overlap and placement show, which loopback hides. Consecutive ranks share a host, so tensor (or
data) neighbours stay inside where a mode has four ranks. Echelon also runs on links that are not
shaped; the difference is its exposed transfer time, set beside what the dependency graph of the
mode forces (`bench/exposed.py`). Needs root, `ip` and `tc`. Exit 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.catalogue import OURS
from bench.exposed import forced_s
from bench.hosts import Host, Link, can_make_namespaces, linked_hosts
from bench.interleave import (
    Contest,
    Options,
    add_options,
    contest,
    end_cleanly,
    read_options,
    say,
)
from bench.ranks import Measurement
from bench.report import fastest_peer, rows, table
from bench.spec import Mode

NUM_HOSTS = 2
WALL_TARGET = 0.95
EXPOSED_TARGET = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Hold Echelon's step on shaped and on free links, and what the graph forces between them."""

    shaped_s: float
    free_s: float
    forced_s: float

    @property
    def exposed_s(self) -> float:
        """Return the seconds that slow links add to a step."""
        return self.shaped_s - self.free_s

    @property
    def ratio(self) -> float:
        """Return exposed over forced transfer time."""
        return self.exposed_s / self.forced_s


def main() -> int:
    """Measure the chosen modes, print tables and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    add_options(parser, steps=2)
    parser.add_argument("--mbit", type=float, default=200.0, help="uplink of a host (200)")
    arguments = parser.parse_args()
    options = read_options(arguments)
    if not can_make_namespaces():
        print("error: shaped links need root, `ip` and `tc` (Linux)", file=sys.stderr)
        return 3
    end_cleanly()
    link = Link(bits_per_s=arguments.mbit * 1e6)
    started = time.monotonic()
    results: list[dict[str, Any]] = []
    missed = 0
    for mode in options.modes:
        say(f"{mode.name} ({time.monotonic() - started:.0f} s)")
        entered, free = _measure(mode, options, link)
        missed += _judge(mode, options, link, entered, free)
        for label, taken in {**entered.rounds, f"{OURS}, free links": free}.items():
            results += [{"mode": mode.name, "label": label, **asdict(one)} for one in taken]
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(
        f"{missed} targets missed ({options.size.name}, {arguments.mbit:.0f} Mbit/s,"
        f" load {os.getloadavg()[0]:.1f}; logs in {options.logs})"
    )
    return 1 if missed else 0


@contextlib.contextmanager
def _hosts() -> Iterator[Sequence[Host]]:
    with linked_hosts(NUM_HOSTS) as hosts:
        yield hosts


def _measure(mode: Mode, options: Options, link: Link) -> tuple[Contest, list[Measurement]]:
    """Run the rounds of one mode; also return Echelon's turns on links that are not shaped."""
    free: list[Measurement] = []
    with contest(options.cases(mode), options, _hosts) as entered:
        for number in range(options.rounds):
            say(f" round {number + 1} of {options.rounds}")
            for label in list(entered.groups):
                if label == OURS:
                    _turn(entered, label, options, None, free)
                if label in entered.groups:
                    _turn(entered, label, options, link, entered.rounds[label])
    return entered, free


def _turn(
    entered: Contest, label: str, options: Options, link: Link | None, into: list[Measurement]
) -> None:
    """Shape the hosts of a case, let it run, keep what it took."""
    _, hosts = entered.groups[label]
    for host in hosts:
        host.shape(link)
    taken = entered.turn(label, warmup=options.warmup, steps=options.steps)
    if taken is not None:
        into.append(taken)


def _judge(
    mode: Mode, options: Options, link: Link, entered: Contest, free: Sequence[Measurement]
) -> int:
    """Print the table and the verdicts of one mode; return how many targets it misses."""
    found = rows(entered.rounds)
    print(f"\n{table(mode, found, entered.failures)}")
    for label, taken in entered.rounds.items():
        uplinks = [one.uplink_bytes for one in taken if one.uplink_bytes is not None]
        if uplinks:
            count = statistics.median(uplinks)
            print(f"{mode.name} {label}: busiest uplink {count / 1e6:.1f} MB per step")
    mine = next((row for row in found if row.label == OURS), None)
    if mine is None:
        return int(options.with_echelon)
    missed = 0
    peer = fastest_peer(found)
    if peer is not None:
        ratio = mine.step_s / peer.step_s
        missed += ratio > WALL_TARGET
        print(
            f"{mode.name} wall: {OURS} {mine.step_s:.3f} s, {peer.label} {peer.step_s:.3f} s"
            f" = {ratio:.3f}x, target <= {WALL_TARGET:.2f}x: {_word(ratio <= WALL_TARGET)}"
        )
    free_s = statistics.median(one.step_s for one in free)
    exposure = Exposure(
        shaped_s=mine.step_s,
        free_s=free_s,
        forced_s=forced_s(options.size, mode, link, free_s),
    )
    missed += exposure.ratio > EXPOSED_TARGET
    print(
        f"{mode.name} exposed transfer: {exposure.shaped_s:.3f} - {exposure.free_s:.3f} ="
        f" {exposure.exposed_s:.3f} s, forced {exposure.forced_s:.3f} s = {exposure.ratio:.2f}x,"
        f" target <= {EXPOSED_TARGET:.2f}x: {_word(exposure.ratio <= EXPOSED_TARGET)}"
    )
    sys.stdout.flush()
    return missed


def _word(met: bool) -> str:
    return "met" if met else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
