"""How much of attention over context ranks is exposed transfer: waits, and what they were for.

A rank waits for an exchange until what comes is there. Until the last rank has begun the exchange
it waits for that rank; after that, for the transfer. The clock is that of the machine, which all
ranks share. With `--mbit` each rank is on a host of its own behind a shaped link.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.context.options import ContextOptions
from bench.context.spec import OUR_KINDS, Heads, attention_case, fits, label_of
from bench.context.table import read_ranks
from bench.harness.hosts import Link, can_make_namespaces, linked_hosts
from bench.harness.interleave import Contest, on_one_host, say

TARGET = 0.15
TARGET_KIND, TARGET_RANKS, TARGET_LENGTH = "ring", 2, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Hold the seconds of one rank over its steps: all, working, waiting for ranks, for bytes."""

    total_s: float
    work_s: float
    late_s: float
    transfer_s: float

    @property
    def waited(self) -> float:
        """Return the part of the time spent waiting, for whatever reason."""
        return (self.late_s + self.transfer_s) / self.total_s

    @property
    def transferring(self) -> float:
        """Return the part of the time spent waiting for transfers that both ends had begun."""
        return self.transfer_s / self.total_s


def exposures(turns: Sequence[dict[str, Any]]) -> list[Exposure]:
    """Return what each rank's time went into, from what the ranks wrote of the same steps."""
    launched: dict[tuple[int, str], float] = {}
    for turn in turns:
        for name, begin, _ in turn["exchanges"]:
            key = _step_at(turn, begin), name
            launched[key] = max(launched.get(key, begin), begin)
    found: list[Exposure] = []
    for turn in turns:
        late = transfer = 0.0
        for name, begin, end in turn["waits"]:
            last = min(max(launched[_step_at(turn, begin), name], begin), end)
            late += last - begin
            transfer += end - last
        found.append(
            Exposure(
                total_s=sum(end - begin for _, begin, end in turn["steps"]),
                work_s=sum(end - begin for _, begin, end in turn["work"]),
                late_s=late,
                transfer_s=transfer,
            )
        )
    return found


def _step_at(turn: dict[str, Any], second: float) -> int:
    """Return in which step of a rank something began."""
    steps = turn["steps"]
    return next(i for i, (_, begin, end) in enumerate(steps) if begin <= second <= end)


def worst(rounds: Sequence[Sequence[Exposure]]) -> Exposure:
    """Return the rank that waits most in the round that is the median by that."""
    each = sorted((max(ranks, key=_waited) for ranks in rounds), key=_waited)
    return each[len(each) // 2]


def _waited(one: Exposure) -> float:
    return one.waited


def measure_exposed(options: ContextOptions) -> int:
    """Print a table for all lengths and kinds, and the verdict; return 1 where it is missed."""
    if options.mbit is not None and not can_make_namespaces():
        print("error: shaped links need root, `ip` and `tc` (Linux)", file=sys.stderr)
        return 3
    link = "free links" if options.mbit is None else f"{options.mbit:g} Mbit/s a rank"
    results: list[dict[str, Any]] = []
    verdicts: list[str] = []
    missed = failed = False
    for heads in options.heads:
        print(f"\nheads {heads}, {link}, forward and backward; the rank that waits most\n")
        print("| kind | positions | s | at work | waits | for the other rank | for transfer |")
        print("|---|---|---|---|---|---|---|")
        for length in options.lengths:
            for label, one in _measure_length(options, heads, length):
                if isinstance(one, str):
                    print(f"| {label} | {length} | did not run: {one} | | | | |")
                    failed = True
                    continue
                told = worst(one)
                step_s = statistics.median(e.total_s for ranks in one for e in ranks)
                print(_line(label, length, told, step_s / options.steps), flush=True)
                results.append(
                    {"heads": str(heads), "label": label, "length": length, **asdict(told)}
                )
                judged = (label_of(TARGET_KIND, TARGET_RANKS), TARGET_LENGTH, None)
                if (label, length, options.mbit) == judged:
                    met = told.waited < TARGET
                    missed = missed or not met
                    verdicts.append(
                        f"heads {heads}, {label}, {length} positions: exposed {told.waited:.1%},"
                        f" target < {TARGET:.0%}: {'met' if met else 'MISSED'}"
                    )
    print("\n" + "\n".join(verdicts))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 2 if failed else int(missed)


def _line(label: str, length: int, told: Exposure, step_s: float) -> str:
    return (
        f"| {label} | {length} | {step_s:.3f} | {told.work_s / told.total_s:.1%}"
        f" | {told.waited:.1%} | {told.late_s / told.total_s:.1%} | {told.transferring:.1%} |"
    )


def _measure_length(
    options: ContextOptions, heads: Heads, length: int
) -> Iterator[tuple[str, list[list[Exposure]] | str]]:
    """Yield for every kind what its ranks' time went into, round by round, or why not."""
    pairs = [
        (kind, ranks)
        for ranks in options.ranks
        for kind in options.kinds
        if kind in OUR_KINDS and fits(kind, ranks, heads)
    ]
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echelon-context-")))
        entered = Contest(logs=options.logs, size=heads.size(length))
        for kind, ranks in pairs:
            case = attention_case(kind, ranks, scratch, check=False, dtype=options.dtype)
            if options.mbit is None:
                entered.enter(case, stack, on_one_host)
            else:
                entered.enter(case, stack, lambda n=ranks: linked_hosts(n))
        if options.mbit is not None:
            for host in (host for _, hosts in entered.groups.values() for host in hosts):
                host.shape(Link(bits_per_s=options.mbit * 1e6))
        found: dict[str, list[list[Exposure]]] = {label: [] for label in entered.groups}
        for number in range(options.rounds):
            say(f" {length} positions, round {number + 1} of {options.rounds}")
            for kind, ranks in pairs:
                label = label_of(kind, ranks)
                if label in entered.groups and entered.turn(label, warmup=0, steps=options.steps):
                    turns = read_ranks(scratch / f"{kind}-{ranks}", "turn", ranks)
                    found[label].append(exposures(turns))
    for kind, ranks in pairs:
        label = label_of(kind, ranks)
        yield label, entered.failures.get(label) or found[label]
