"""Measure Echelon and its peers across two hosts with slow links: `python -m bench.cluster`.

A host is a network namespace, its uplink shaped to 200 Mbit/s: transfer takes time but no CPU, so
overlap and placement show, which loopback hides. Consecutive ranks share a host, so tensor (or
data) neighbours stay inside where a mode has four ranks. Echelon also runs on links that are not
shaped; the difference is its exposed transfer time, set beside what the dependency graph of the
mode forces (`harness/exposed.py`). Where that is too little to be told from noise (a pipeline sends
a few MB), the exposed time is taken on links ten times slower. ZeRO modes are measured when named
(`--modes zero3-2 --peers 9`); their exposed time is told, not judged. Needs root, `ip` and `tc`.
Exit 1 where a target is missed.
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
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.harness.catalogue import OURS
from bench.harness.exposed import forced_s
from bench.harness.hosts import Host, Link, can_make_namespaces, linked_hosts
from bench.harness.interleave import (
    Contest,
    Options,
    add_options,
    contest,
    end_cleanly,
    read_options,
    say,
)
from bench.harness.ranks import Measurement
from bench.harness.report import fastest_peer, rows, table
from bench.harness.spec import ZERO_MODES, Mode
from bench.harness.work import NUM_HOSTS

NOISE = 0.05
SLOWER = 10
WALL_TARGET = 0.95
ZERO_WALL_TARGET = 0.90
EXPOSED_TARGET = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Hold Echelon's step on shaped and on free links, and what the graph forces between them."""

    link: Link
    shaped_s: float
    free_s: float
    forced_s: float

    @property
    def exposed_s(self) -> float:
        """Return the seconds that slow links add to a step."""
        return self.shaped_s - self.free_s

    @property
    def met(self) -> bool:
        """Return whether little more is exposed than is forced (nothing but noise, if nothing)."""
        allowed = EXPOSED_TARGET * self.forced_s if self.forced_s else NOISE * self.free_s
        return self.exposed_s <= allowed

    def facts(self) -> str:
        """Return what is exposed beside what is forced, as one line of text."""
        ratio = f"{self.exposed_s / self.forced_s:.2f}x" if self.forced_s else "nothing is forced"
        return (
            f"exposed transfer at {self.link.bits_per_s / 1e6:.0f} Mbit/s: {self.shaped_s:.3f} -"
            f" {self.free_s:.3f} = {self.exposed_s:.3f} s, forced {self.forced_s:.3f} s ="
            f" {ratio}"
        )

    def line(self) -> str:
        """Return the verdict as one line of text."""
        return f"{self.facts()}, target <= {EXPOSED_TARGET:.2f}x: {_word(self.met)}"


@dataclass(slots=True)
class OwnTurns:
    """Echelon's further turns in a mode: on free links and, where needed, on slower ones."""

    free: list[Measurement] = field(default_factory=list)
    slower: list[Measurement] = field(default_factory=list)


def main() -> int:
    """Measure the chosen modes, print tables and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    add_options(parser, steps=2)
    parser.add_argument("--mbit", type=float, default=200.0, help="uplink of a host (200)")
    arguments = parser.parse_args()
    options = read_options(arguments)
    if any(mode.cp > 1 for mode in options.modes):
        sys.exit("error: for context parallelism: python -m bench.context --exposed --mbit 200")
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
        entered, own = _measure(mode, options, link)
        missed += _judge(mode, options, link, entered, own)
        extra = {f"{OURS}, free links": own.free, f"{OURS}, slower links": own.slower}
        for label, taken in {**entered.rounds, **extra}.items():
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


def _measure(mode: Mode, options: Options, link: Link) -> tuple[Contest, OwnTurns]:
    """Run the rounds of one mode; also return Echelon's turns on other links."""
    own = OwnTurns()
    with contest(options.cases(mode), options, _hosts) as entered:
        for number in range(options.rounds):
            say(f" round {number + 1} of {options.rounds}")
            for label in list(entered.groups):
                if label == OURS:
                    _turn(entered, label, options, None, own.free)
                    if own.free and _lost_in_noise(mode, options, link, own.free):
                        _turn(entered, label, options, _slower(link), own.slower)
                _turn(entered, label, options, link, entered.rounds[label])
    return entered, own


def _lost_in_noise(mode: Mode, options: Options, link: Link, free: Sequence[Measurement]) -> bool:
    """Return whether what the link forces is too small a part of a step to be measured."""
    step_s = free[0].step_s
    return forced_s(options.size, mode, link, step_s) < NOISE * step_s


def _slower(link: Link) -> Link:
    return replace(link, bits_per_s=link.bits_per_s / SLOWER)


def _turn(
    entered: Contest, label: str, options: Options, link: Link | None, into: list[Measurement]
) -> None:
    """Shape the hosts of a case, let it run, keep what it took."""
    if label not in entered.groups:
        return
    _, hosts = entered.groups[label]
    for host in hosts:
        host.shape(link)
    taken = entered.turn(label, warmup=options.warmup, steps=options.steps)
    if taken is not None:
        into.append(taken)


def _judge(mode: Mode, options: Options, link: Link, entered: Contest, own: OwnTurns) -> int:
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
        target = wall_target(mode)
        missed += ratio > target
        print(
            f"{mode.name} wall: {OURS} {mine.step_s:.3f} s, {peer.label} {peer.step_s:.3f} s"
            f" = {ratio:.3f}x, target <= {target:.2f}x: {_word(ratio <= target)}"
        )
    if own.free:
        free_s = statistics.median(one.step_s for one in own.free)
        slower_s = [one.step_s for one in own.slower]
        taken_at = _slower(link) if slower_s else link
        exposure = Exposure(
            link=taken_at,
            shaped_s=statistics.median(slower_s) if slower_s else mine.step_s,
            free_s=free_s,
            forced_s=forced_s(options.size, mode, taken_at, free_s),
        )
        if mode.name in ZERO_MODES:
            print(f"{mode.name} {exposure.facts()}")
        else:
            missed += not exposure.met
            print(f"{mode.name} {exposure.line()}")
    sys.stdout.flush()
    return missed


def wall_target(mode: Mode) -> float:
    """Return the ratio to the fastest peer that a mode must reach on slow links."""
    return ZERO_WALL_TARGET if mode.name in ZERO_MODES else WALL_TARGET


def _word(met: bool) -> str:
    return "met" if met else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
