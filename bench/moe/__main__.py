"""Measure one block of experts, forward and backward: `python -m bench.moe`.

    block       on one rank, with one thread and with all: beside the block of transformers
    ranks       over two expert ranks of one thread: beside half of what one such rank needs
    dispatch    how tokens travel: flat, padded, in chunks, and on four ranks in two hops

8 experts, of which a token meets 2, in fp32; all cases of a size are alive and take turns. Exit 1
where a target is missed, 2 where a case does not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.interleave import Contest, end_cleanly, on_one_host, say
from bench.harness.report import Row, rows
from bench.harness.spec import Size
from bench.moe.spec import MoECase, Variant, moe_case, parse_size

PARTS = ("block", "ranks", "dispatch")
MAKERS = ("grouped_mm", "eager")
BESIDE_TRANSFORMERS = 0.95
BESIDE_HALF = 1.15
AGREE = 1e-4
"""Cases without drops tell the same of their results to this part of it."""

OURS = Variant()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEOptions:
    """Hold what was asked for; every part has sizes of its own where none are given."""

    parts: tuple[str, ...]
    sizes: tuple[Size, ...]
    rounds: int
    steps: int
    threads: int
    logs: Path
    json: Path | None = None

    def sizes_of(self, part: str) -> tuple[Size, ...]:
        """Return the sizes at which a part is measured."""
        return self.sizes or tuple(parse_size(text) for text in _SIZES[part])


_SIZES = {
    "block": ("4096x512x1408", "1024x1024x2816", "1024x256x512"),
    "ranks": ("4096x512x1408",),
    "dispatch": ("2048x512x1408",),
}


@dataclass(slots=True)
class Outcome:
    """Hold what was measured, and which targets were missed."""

    figures: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    missed: int = 0
    failed: bool = False


def main() -> int:
    """Measure what was asked for."""
    options = read_options()
    end_cleanly()
    outcome = measure(options)
    if options.json is not None:
        options.json.write_text(json.dumps(outcome.figures, indent=1) + "\n")
    print(f"load {os.getloadavg()[0]:.1f} at the end; logs in {options.logs}")
    return 2 if outcome.failed else int(outcome.missed > 0)


def read_options(arguments: Sequence[str] | None = None) -> MoEOptions:
    """Return the options of the command line; exits with a usage error."""
    parser = argparse.ArgumentParser(prog="python -m bench.moe", description=__doc__)
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="comma-separated: %(default)s")
    add("--sizes", default="", help="TOKENSxHIDDENxFFN, comma-separated (default: by part)")
    add("--rounds", type=int, default=3, help="turns of every case (default: %(default)s)")
    add("--steps", type=int, default=2, help="timed steps a turn (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="all threads (%(default)s)")
    add("--json", type=Path, help="write every figure to this file")
    add("--logs", type=Path, help="folder for the output of ranks (default: a new one)")
    given = parser.parse_args(arguments)
    parts = tuple(part for part in given.parts.split(",") if part)
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown parts {unknown}; known: {', '.join(PARTS)}")
    try:
        sizes = tuple(parse_size(text) for text in given.sizes.split(",") if text)
    except ValueError as error:
        parser.error(str(error))
    logs = given.logs or Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    logs.mkdir(parents=True, exist_ok=True)
    return MoEOptions(
        parts=parts,
        sizes=sizes,
        rounds=given.rounds,
        steps=given.steps,
        threads=given.threads,
        logs=logs.absolute(),
        json=given.json,
    )


def measure(options: MoEOptions) -> Outcome:
    """Print a table per part and size, and below it what it is judged by."""
    outcome = Outcome()
    for part in options.parts:
        for size in options.sizes_of(part):
            cases = cases_of(part, options.threads)
            say(f"{part}, {size.name}")
            entered = _take_turns(options, size, cases)
            found = {row.label: row for row in rows(entered.rounds)}
            print("\n" + "\n".join(table(part, size, cases, entered, found)), flush=True)
            outcome.failed = outcome.failed or bool(entered.failures)
            outcome.figures += [
                {"part": part, "size": size.name, "label": label, **asdict(one)}
                for label, taken in entered.rounds.items()
                for one in taken
            ]
            for line, met in [*agreement(cases, found), *judged(part, options.threads, found)]:
                outcome.missed += not met
                print(f"{line}: {'met' if met else 'MISSED'}", flush=True)
    return outcome


def cases_of(part: str, threads: int) -> list[MoECase]:
    """Return what takes turns in a part; the first case is what the others are set beside."""
    if part == "block":
        makers = [OURS, *(Variant(maker=maker) for maker in MAKERS)]
        return [moe_case(one, threads=count) for count in {1: 1, threads: 1} for one in makers]
    if part == "ranks":
        return [moe_case(OURS), moe_case(OURS, ranks=2)]
    ways = [OURS, Variant(chunks=2), Variant(chunks=4), Variant(capacity_factor=1.25)]
    return [
        *(moe_case(one, ranks=2) for one in ways),
        *(moe_case(one, ranks=4) for one in [*ways, Variant(dispatch="two-hop")]),
    ]


def _take_turns(options: MoEOptions, size: Size, cases: Sequence[MoECase]) -> Contest:
    with contextlib.ExitStack() as stack:
        entered = Contest(logs=options.logs, size=size)
        for case in cases:
            entered.enter(case, stack, on_one_host)
        for number in range(options.rounds):
            say(f" round {number + 1} of {options.rounds}")
            for label in list(entered.groups):
                entered.keep(label, warmup=1, steps=options.steps)
    return entered


def table(
    part: str, size: Size, cases: Sequence[MoECase], entered: Contest, found: dict[str, Row]
) -> list[str]:
    """Return the lines of a table: medians over rounds."""
    tokens = size.sequence * size.global_sequences
    lines = [
        f"{part}: {tokens} tokens, hidden {size.hidden}, ffn {size.ffn}",
        "",
        "| case | s | spread | CPU s | of the first | MB sent a rank | MB on the wire a rank |",
        "|---|---|---|---|---|---|---|",
    ]
    first = found.get(cases[0].label)
    for case in cases:
        row = found.get(case.label)
        if row is None:
            lines.append(f"| {case.label} | did not run: {entered.failures[case.label]} |||||||")
            continue
        ranks = case.mode.dp
        recorded = entered.rounds[case.label][-1].recorded_bytes or {}
        by_axis = ", ".join(
            f"{axis} {count / ranks / 1e6:.2f}" for axis, count in sorted(recorded.items()) if count
        )
        wire = "-" if row.sent_bytes is None else f"{row.sent_bytes / ranks / 1e6:.2f}"
        ratio = "-" if first is None else f"{row.step_s / first.step_s:.3f}"
        lines.append(
            f"| {case.label} | {row.step_s:.3f} | {row.spread:.0%} | {row.cpu_s:.3f} | {ratio}"
            f" | {by_axis or '-'} | {wire if ranks > 1 else '-'} |"
        )
    return lines


def agreement(cases: Sequence[MoECase], found: dict[str, Row]) -> list[tuple[str, bool]]:
    """Return whether all cases that drop nothing computed the same."""
    whole = [c.label for c in cases if Variant.parse(c.variant).capacity_factor is None]
    told = [found[label].last_loss or 0.0 for label in whole if label in found]
    if not told:
        return []
    apart = max(abs(one - told[0]) for one in told) / abs(told[0])
    return [(f"results of {len(told)} cases differ by {apart:.1e} of them", apart <= AGREE)]


def judged(part: str, threads: int, found: dict[str, Row]) -> list[tuple[str, bool]]:
    """Return what a part is judged by, and whether each target is met."""
    if part == "ranks":
        return _beside(found, moe_case(OURS, ranks=2), moe_case(OURS), 0.5, BESIDE_HALF)
    if part != "block":
        return []
    verdicts: list[tuple[str, bool]] = []
    for count in {1: 1, threads: 1}:
        for maker in MAKERS:
            their = moe_case(Variant(maker=maker), threads=count)
            ours = moe_case(OURS, threads=count)
            verdicts += _beside(found, ours, their, 1.0, BESIDE_TRANSFORMERS)
    return verdicts


def _beside(
    found: dict[str, Row], ours: MoECase, other: MoECase, part: float, target: float
) -> list[tuple[str, bool]]:
    """Return whether one case takes at most `target` of a part of the seconds of another."""
    if ours.label not in found or other.label not in found:
        return []
    ratio = found[ours.label].step_s / (part * found[other.label].step_s)
    of = "" if part == 1.0 else f"{part:g} x "
    line = f"{ours.label} / {of}{other.label} = {ratio:.3f}x, target <= {target:.2f}x"
    return [(line, ratio <= target)]


if __name__ == "__main__":
    sys.exit(main())
