"""Measure Echelon and its peers side by side on this machine: `python -m bench train`.

All cases of a mode are alive at once and take turns, so a busy moment of the machine hits every
one alike; ratios are those of medians over rounds. Where not all of them fit into memory at once
there are several heats, with Echelon in each. The limit is what one process with one thread needs,
spread over the cores (and lengthened by a pipeline's bubble).

`--modes zero` has every ZeRO stage on two and four ranks, each beside the frameworks that serve it:
there memory is compared with the leanest peer and bytes with those of Echelon's formulas, too. With
--own-module Echelon trains the peers' own module; then losses must be equal. Exit 1 where a target
is missed, 0 where all are met.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.harness.catalogue import OURS, Case, ours, single
from bench.harness.interleave import (
    Contest,
    Options,
    add_options,
    contest,
    read_options,
    say,
)
from bench.harness.plans import bench_plan
from bench.harness.ranks import Measurement
from bench.harness.report import (
    TARGET_FAR_FROM_LIMIT,
    Row,
    met_word,
    rows,
    table,
    unequal_losses,
    verdicts_of,
)
from bench.harness.spec import ZERO_MODES, Mode, Size
from echelon.cost.bytes.sent import bytes_sent_by_axis

RANKS_AT_ONCE = 12


def main() -> int:
    """Measure the chosen modes, print tables and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m bench train", description=__doc__)
    add_options(parser, steps=4)
    at_once = f"ranks of peers that are alive at once ({RANKS_AT_ONCE}; each takes about 1 GB)"
    parser.add_argument("--ranks-at-once", type=int, default=RANKS_AT_ONCE, help=at_once)
    arguments = parser.parse_args()
    options = read_options(arguments)
    started = time.monotonic()
    results: list[dict[str, Any]] = []
    met: list[bool] = []
    alone = single(options.peers_home)
    limiting = (alone,) if options.num_peers else ()
    with contest(limiting, logs=options.logs, size=options.size) as reference:
        for mode in options.modes:
            say(f"{mode.name} ({time.monotonic() - started:.0f} s)")
            reference.rounds[alone.label] = []
            heats = [
                _heat(cases, options, reference)
                for cases in group_cases(options.cases(mode), arguments.ranks_at_once)
            ]
            met += _judge(mode, options, heats, rows(reference.rounds))
            for number, heat in enumerate(heats):
                for label, taken in heat.rounds.items():
                    named = {"mode": mode.name, "heat": number, "label": label}
                    results += [{**named, **asdict(one)} for one in taken]
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    for label, reason in reference.failures.items():
        say(f"no limits: {label} did not run: {reason}")
    print(
        f"{met.count(True)} of {len(met)} targets met"
        f" ({options.size.name}, load {os.getloadavg()[0]:.1f}; logs in {options.logs})"
    )
    return 0 if all(met) else 1


def group_cases(cases: Sequence[Case], ranks_at_once: int) -> list[tuple[Case, ...]]:
    """The cases that are alive together: Echelon in every heat, peers in one each."""
    own = tuple(case for case in cases if case.label == OURS)
    others = [case for case in cases if case.label != OURS]
    if not others:
        return [own]
    size = max(1, ranks_at_once // others[0].mode.world_size)
    return [(*own, *others[start : start + size]) for start in range(0, len(others), size)]


def _heat(cases: Sequence[Case], options: Options, reference: Contest) -> Contest:
    """Run the rounds of cases; each case of `reference` has a turn in every round."""

    def before(label: str) -> None:
        if label == next(iter(entered.groups)):
            for alone in list(reference.groups):
                reference.keep(alone, warmup=0, steps=1)

    with contest(cases, logs=options.logs, size=options.size) as entered:
        entered.take_rounds(
            options.rounds, warmup=options.warmup, steps=options.steps, before=before
        )
    return entered


def _judge(
    mode: Mode, options: Options, heats: Sequence[Contest], limits: Sequence[Row]
) -> list[bool]:
    """Print the table and the verdicts of one mode; for each, whether it is met."""
    rounds: dict[str, list[Measurement]] = {}
    failures: dict[str, str] = {}
    for heat in heats:
        failures.update(heat.failures)
        for label, taken in heat.rounds.items():
            rounds.setdefault(label, []).extend(taken)
    print(f"\n{table(mode, rows(rounds), failures)}")
    met: list[bool] = [False] * (OURS in failures)
    for line, good in mode_verdicts(mode, options.own_module, heats, limits):
        print(f"{mode.name} {line}")
        met.append(good)
    if options.own_module:
        wrong = unequal_losses(rows(rounds))
        print("".join(f"{mode.name} {line}: NOT EQUAL\n" for line in wrong), end="")
        met += [False] * len(wrong)
    elif mode.name in ZERO_MODES and rounds.get(OURS):
        line, same = said_line(mode, options.size, rounds[OURS][-1].recorded_bytes or {})
        print(f"{mode.name} {line}")
        met.append(same)
    sys.stdout.flush()
    return met


def mode_verdicts(
    mode: Mode, own_module: bool, heats: Sequence[Contest], limits: Sequence[Row]
) -> list[tuple[str, bool]]:
    """The lines of a mode's verdicts, and whether each is met.

    A tie is enough where the peer has nothing left to gain; never for a stage that shares out
    state, nor for the peers' own module.
    """
    flat = own_module or mode.zero_stage > 0
    wall = mode.limit_s(limits[0].step_s, os.cpu_count() or 1) if limits else None
    found = verdicts_of(
        [rows(heat.rounds) for heat in heats],
        limits=(None, None) if flat else (wall, limits[0].cpu_s if limits else None),
        seconds_target=TARGET_FAR_FROM_LIMIT if flat else None,
        lean=own_module or mode.name in ZERO_MODES,
    )
    return [(one.line(), one.met) for one in found]


def said_line(mode: Mode, size: Size, events: Mapping[str, int]) -> tuple[str, bool]:
    """Bytes of a step of all ranks, by formulas and by events; and whether they are equal."""
    plan = bench_plan(ours(mode).settings(size))
    formulas: Counter[str] = Counter()
    for rank in range(mode.world_size):
        formulas.update(bytes_sent_by_axis(plan, rank))
    same = dict(formulas) == dict(events)
    by_axis, by_events = (
        ", ".join(f"{axis} {count}" for axis, count in said.items()) for said in (formulas, events)
    )
    return f"bytes: formulas say {by_axis}; events say {by_events}: {met_word(same)}", same


if __name__ == "__main__":
    sys.exit(main())
