"""Measure every ZeRO stage beside its peers on this machine: `python -m bench.zero`.

Stages 0 to 3 on two and on four data-parallel ranks, each beside the frameworks that serve it,
which take turns as in `bench.train`. Where not all of them fit into memory at once there are
several heats, with Echelon in each. Wall and CPU seconds are compared with the fastest peer of the
stage, peak resident memory with the peer that needs least, the bytes that the kernel counted with
those that Echelon's formulas say and its events record. Across two hosts with slow links:
`python -m bench.cluster --modes zero3-2`. Exit 1 where a target is missed, 0 where all are met.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from bench.harness.catalogue import OURS, Case, single
from bench.harness.interleave import (
    Contest,
    Options,
    add_options,
    contest,
    end_cleanly,
    on_one_host,
    read_options,
    say,
    take_rounds,
)
from bench.harness.ranks import Measurement
from bench.harness.report import rows
from bench.harness.spec import SIZES, ZERO_MODES, Mode
from bench.zero.report import floor_bytes, judge, step_bytes, zero_table

ALL_PEERS = 9
RANKS_AT_ONCE = 12


def main() -> int:
    """Measure the chosen modes, print tables and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m bench.zero", description=__doc__)
    add_options(parser, steps=4, modes=ZERO_MODES, num_peers=ALL_PEERS)
    at_once = f"ranks of peers that are alive at once ({RANKS_AT_ONCE}; each takes about 1 GB)"
    parser.add_argument("--ranks-at-once", type=int, default=RANKS_AT_ONCE, help=at_once)
    floors = "also run every case with a tiny model: how much of its peak is not the model's"
    parser.add_argument("--floors", action="store_true", help=floors)
    arguments = parser.parse_args()
    options = read_options(arguments)
    end_cleanly()
    started = time.monotonic()
    results: list[dict[str, Any]] = []
    met: list[bool] = []
    for mode in options.modes:
        say(f"{mode.name} ({time.monotonic() - started:.0f} s)")
        floors = _floors(mode, options) if arguments.floors else {}
        reference, heats = _measure(mode, options, arguments.ranks_at_once)
        met += _judge(mode, options, heats, reference, floors)
        for number, heat in enumerate(heats):
            for label, taken in heat.rounds.items():
                named = {"mode": mode.name, "heat": number, "label": label}
                results += [{**named, **asdict(one)} for one in taken]
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(
        f"{met.count(True)} of {len(met)} targets met"
        f" ({options.size.name}, load {os.getloadavg()[0]:.1f}; logs in {options.logs})"
    )
    return 0 if all(met) else 1


def group_cases(cases: Sequence[Case], ranks_at_once: int) -> list[tuple[Case, ...]]:
    """Return the cases that are alive together: Echelon in every heat, peers in one each."""
    own = tuple(case for case in cases if case.label == OURS)
    others = [case for case in cases if case.label != OURS]
    if not others:
        return [own]
    size = max(1, ranks_at_once // others[0].mode.world_size)
    return [(*own, *others[start : start + size]) for start in range(0, len(others), size)]


def _measure(mode: Mode, options: Options, ranks_at_once: int) -> tuple[Contest, list[Contest]]:
    """Run the heats of one mode; at stage 0, whose targets know a limit, with what it is."""
    alone = single(options.peers_home)
    limited = mode.zero_stage == 0 and options.num_peers
    with contest((alone,) if limited else (), options, on_one_host) as reference:
        heats = [
            take_rounds(cases, options, reference, alone.label)
            for cases in group_cases(options.cases(mode), ranks_at_once)
        ]
    return reference, heats


def _floors(mode: Mode, options: Options) -> dict[str, int]:
    """Return the peak of every case that runs with a tiny model, by its label."""
    tiny = replace(options, size=SIZES["tiny"])
    floors: dict[str, int] = {}
    for case in tiny.cases(mode):
        with contest((case,), tiny, on_one_host) as entered:
            for label in list(entered.groups):
                entered.keep(label, warmup=1, steps=1)
            floors.update({k: floor_bytes(taken) for k, taken in entered.rounds.items() if taken})
    return floors


def _judge(
    mode: Mode,
    options: Options,
    heats: Sequence[Contest],
    reference: Contest,
    floors: Mapping[str, int],
) -> list[bool]:
    """Print the table and the verdicts of one mode; return for each whether it is met."""
    rounds: dict[str, list[Measurement]] = {}
    failures: dict[str, str] = {}
    for heat in heats:
        failures.update(heat.failures)
        for label, taken in heat.rounds.items():
            rounds.setdefault(label, []).extend(taken)
    said = step_bytes(mode, options.size, rounds.get(OURS, []))
    print(f"\n{zero_table(mode, rounds, failures, said=said, floors=floors)}")
    limits = rows(reference.rounds)
    verdicts = judge(
        mode,
        [rows(heat.rounds) for heat in heats],
        said,
        wall_limit_s=mode.limit_s(limits[0].step_s, os.cpu_count() or 1) if limits else None,
        cpu_limit_s=limits[0].cpu_s if limits else None,
    )
    for verdict in verdicts:
        print(f"{mode.name} {verdict.line()}")
    met = [verdict.met for verdict in verdicts]
    if said is not None:
        print(f"{mode.name} {said.line()}")
        met.append(said.equal)
    if OURS in failures:
        met.append(False)
    sys.stdout.flush()
    return met


if __name__ == "__main__":
    sys.exit(main())
