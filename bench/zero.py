"""Measure every ZeRO stage beside its peers on this machine: `python -m bench.zero`.

Stages 0 to 3 on two and on four data-parallel ranks, each beside the frameworks that serve it, all
of them alive at once and taking turns as in `bench.train`. Wall and CPU seconds are compared with
the fastest peer of the stage, peak resident memory with the peer that needs least, the bytes that
the kernel counted with those that Echelon's formulas say and its events record. Across two hosts
with slow links: `python -m bench.cluster --modes zero3-2`. Exit 1 where a target is missed, 0 where
all are met.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from bench.catalogue import OURS, single
from bench.interleave import (
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
from bench.report import rows
from bench.spec import SIZES, ZERO_MODES, Mode
from bench.zero_report import floor_bytes, judge, said_bytes, zero_table

ALL_PEERS = 9


def main() -> int:
    """Measure the chosen modes, print tables and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m bench.zero", description=__doc__)
    add_options(parser, steps=4, modes=ZERO_MODES, num_peers=ALL_PEERS)
    parser.add_argument(
        "--floors",
        action="store_true",
        help="also run every case with a tiny model: how much of its peak is not the model's",
    )
    arguments = parser.parse_args()
    options = read_options(arguments)
    end_cleanly()
    started = time.monotonic()
    results: list[dict[str, Any]] = []
    missed = judged = 0
    alone = single(options.peers_home)
    with contest((alone,) if options.num_peers else (), options, on_one_host) as reference:
        reference.rounds.setdefault(alone.label, [])
        for mode in options.modes:
            say(f"{mode.name} ({time.monotonic() - started:.0f} s)")
            floors = _floors(mode, options) if arguments.floors else {}
            entered = take_rounds(mode, options, reference, alone.label)
            met = _judge(mode, options, entered, reference, floors)
            missed += met.count(False)
            judged += len(met)
            for label, taken in entered.rounds.items():
                results += [{"mode": mode.name, "label": label, **asdict(one)} for one in taken]
    for label, reason in reference.failures.items():
        say(f"no limits: {label} did not run: {reason}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(
        f"{judged - missed} of {judged} targets met"
        f" ({options.size.name}, load {os.getloadavg()[0]:.1f}; logs in {options.logs})"
    )
    return 1 if missed else 0


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
    entered: Contest,
    reference: Contest,
    floors: Mapping[str, int],
) -> list[bool]:
    """Print the table and the verdicts of one mode; return for each whether it is met."""
    own = entered.rounds.get(OURS, [])
    said = said_bytes(mode, options.size, own)
    text = zero_table(mode, entered.rounds, entered.failures, said=said, floors=floors)
    print(f"\n{text}")
    limits = rows(reference.rounds)
    verdicts = judge(
        mode,
        rows(entered.rounds),
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
    if OURS in entered.failures:
        met.append(False)
    sys.stdout.flush()
    return met


if __name__ == "__main__":
    sys.exit(main())
