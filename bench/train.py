"""Measure Echelon and its peers side by side on this machine: `python -m bench.train`.

All cases of a mode are alive at once and take turns, so a busy moment of the machine hits every
one alike; ratios are those of medians over rounds. The limit is what one process with one thread
needs, spread over the cores (and lengthened by a pipeline's bubble). Exit 1 where a target is
missed, 0 where all are met. With --own-module it trains the peers' own module; then losses must be
equal, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from bench.harness.catalogue import OURS, single
from bench.harness.interleave import (
    Contest,
    add_options,
    contest,
    end_cleanly,
    on_one_host,
    read_options,
    say,
    take_rounds,
)
from bench.harness.report import (
    Verdict,
    compare,
    compare_modules,
    rows,
    table,
    unequal_losses,
)
from bench.harness.spec import Mode


def main() -> int:
    """Measure the chosen modes, print tables and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m bench.train", description=__doc__)
    add_options(parser, steps=4)
    options = read_options(parser.parse_args())
    end_cleanly()
    started = time.monotonic()
    results: list[dict[str, Any]] = []
    verdicts: list[Verdict] = []
    failed = False
    alone = single(options.peers_home)
    with contest((alone,) if options.num_peers else (), options, on_one_host) as reference:
        reference.rounds.setdefault(alone.label, [])
        for mode in options.modes:
            say(f"{mode.name} ({time.monotonic() - started:.0f} s)")
            entered = take_rounds(options.cases(mode), options, reference, alone.label)
            failed = failed or OURS in entered.failures
            verdicts += _judge(mode, entered, reference, own_module=options.own_module)
            wrong = unequal_losses(rows(entered.rounds)) if options.own_module else []
            for line in wrong:
                print(f"{mode.name} {line}: NOT EQUAL")
            failed = failed or bool(wrong)
            for label, taken in entered.rounds.items():
                results += [{"mode": mode.name, "label": label, **asdict(one)} for one in taken]
    for label, reason in reference.failures.items():
        say(f"no limits: {label} did not run: {reason}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    missed = [verdict for verdict in verdicts if not verdict.met]
    print(
        f"{len(verdicts) - len(missed)} of {len(verdicts)} targets met"
        f" ({options.size.name}, load {os.getloadavg()[0]:.1f}; logs in {options.logs})"
    )
    return 1 if missed or failed else 0


def _judge(mode: Mode, entered: Contest, reference: Contest, *, own_module: bool) -> list[Verdict]:
    """Print the table of one mode and return its verdicts."""
    found = rows(entered.rounds)
    print(f"\n{table(mode, found, entered.failures)}")
    limits = rows(reference.rounds)
    wall = mode.limit_s(limits[0].step_s, os.cpu_count() or 1) if limits else None
    cpu = limits[0].cpu_s if limits else None
    verdicts = compare(found, wall_limit_s=wall, cpu_limit_s=cpu)
    if own_module:
        verdicts = compare_modules(found)
    for verdict in verdicts:
        print(f"{mode.name} {verdict.line()}")
    sys.stdout.flush()
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
