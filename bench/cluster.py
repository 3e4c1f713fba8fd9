"""Measure Echelon and its peers across two hosts with slow links: `python -m bench cluster`.

A host is a network namespace, its uplink shaped to 200 Mbit/s: transfer takes time but no CPU, so
overlap and placement show, which loopback hides. Consecutive ranks share a host, so tensor (or
data) neighbours stay inside where a mode has four ranks. Echelon also runs on links that are not
shaped; the difference is its exposed transfer time, which is told. Needs root, `ip` and `tc`. Exit
1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.harness.catalogue import OURS
from bench.harness.hosts import Link, linked_hosts, require_root
from bench.harness.interleave import Contest, Options, add_options, contest, read_options, say
from bench.harness.ranks import Measurement
from bench.harness.report import fastest_peer, met_word, own_row, rows, table
from bench.harness.spec import ZERO_MODES, Mode

WALL_TARGET = 0.95
ZERO_WALL_TARGET = 0.90
NUM_HOSTS = 2


def main() -> int:
    """Measure the chosen modes, print tables and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m bench cluster", description=__doc__)
    add_options(parser, steps=2)
    parser.add_argument("--mbit", type=float, default=200.0, help="uplink of a host (200)")
    arguments = parser.parse_args()
    options = read_options(arguments)
    require_root("shaped links")
    link = Link(bits_per_s=arguments.mbit * 1e6)
    results: list[dict[str, Any]] = []
    missed = 0
    for mode in options.modes:
        say(mode.name)
        entered, free = _measure(mode, options, link)
        missed += _judge(mode, entered, free, with_echelon=options.with_echelon)
        for label, taken in {**entered.rounds, f"{OURS}, free links": free}.items():
            results += [{"mode": mode.name, "label": label, **asdict(one)} for one in taken]
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(
        f"{missed} targets missed ({options.size.name}, {arguments.mbit:.0f} Mbit/s,"
        f" load {os.getloadavg()[0]:.1f}; logs in {options.logs})"
    )
    return 1 if missed else 0


def _measure(mode: Mode, options: Options, link: Link) -> tuple[Contest, list[Measurement]]:
    """Run the rounds of one mode; also Echelon's turns on free links."""
    free: list[Measurement] = []

    def shape(label: str) -> None:
        hosts = entered.groups[label][1]
        if label == OURS:
            for host in hosts:
                host.shape(None)
            taken = entered.turn(label, warmup=options.warmup, steps=options.steps)
            free.extend([] if taken is None else [taken])
        for host in hosts:
            host.shape(link)

    cases = options.cases(mode)
    hosts = lambda: linked_hosts(NUM_HOSTS)  # noqa: E731
    with contest(cases, logs=options.logs, size=options.size, hosts=hosts) as entered:
        entered.take_rounds(
            options.rounds, warmup=options.warmup, steps=options.steps, before=shape
        )
    return entered, free


def _judge(mode: Mode, entered: Contest, free: Sequence[Measurement], *, with_echelon: bool) -> int:
    """Print the table and the verdict of one mode; 1 where it is missed."""
    found = rows(entered.rounds)
    print(f"\n{table(mode, found, entered.failures)}")
    for label, taken in entered.rounds.items():
        uplinks = [one.uplink_bytes for one in taken if one.uplink_bytes is not None]
        if uplinks:
            count = statistics.median(uplinks)
            print(f"{mode.name} {label}: busiest uplink {count / 1e6:.1f} MB per step")
    mine, peer, missed = own_row(found), fastest_peer(found), False
    if mine is None:
        return int(with_echelon)
    if peer is not None:
        ratio, target = mine.step_s / peer.step_s, wall_target(mode)
        missed = ratio > target
        print(
            f"{mode.name} wall: {OURS} {mine.step_s:.3f} s, {peer.label} {peer.step_s:.3f} s"
            f" = {ratio:.3f}x, target <= {target:.2f}x: {met_word(not missed)}"
        )
    if free:
        free_s = statistics.median(one.step_s for one in free)
        exposed_s = mine.step_s - free_s
        print(f"{mode.name} exposed transfer: {mine.step_s:.3f} - {free_s:.3f} = {exposed_s:.3f} s")
    sys.stdout.flush()
    return int(missed)


def wall_target(mode: Mode) -> float:
    """The ratio to the fastest peer that a mode must reach on slow links."""
    return ZERO_WALL_TARGET if mode.name in ZERO_MODES else WALL_TARGET


if __name__ == "__main__":
    sys.exit(main())
