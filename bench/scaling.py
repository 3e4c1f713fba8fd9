"""Measure how Echelon scales over data-parallel ranks: `python -m bench scaling`.

Two definitions, for T(n, b) the seconds of a step of b sequences on n ranks:

- *strong*: the same global batch on more ranks. Speed-up T(1, b) / T(n, b); efficiency: that / n.
- *weak*: the same batch on each rank. Efficiency T(1, b) / T(n, n b).

Source: Gustafson, "Reevaluating Amdahl's Law", 1988. The figures are printed as measured: with more
ranks than cores neither can reach 1, and a busy machine shows in the spread. One rank is the same
engine with one thread; the cases take turns as in `bench train`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness.catalogue import ours
from bench.harness.interleave import Contest, add_turns, end_cleanly, logs_folder, on_one_host
from bench.harness.ranks import CaseFailed
from bench.harness.report import markdown, spread_of
from bench.harness.spec import SIZES, Mode, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Name one thing that is timed: how many ranks share how many sequences."""

    name: str
    ranks: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Hold the seconds per step of one rank, of n ranks on its batch, and of n ranks on n of it."""

    ranks: int
    one_s: float
    strong_s: float
    weak_s: float

    @property
    def speed_up(self) -> float:
        """Return how many times faster n ranks finish the same batch."""
        return self.one_s / self.strong_s

    @property
    def strong_efficiency(self) -> float:
        """Return the speed-up over the number of ranks."""
        return self.speed_up / self.ranks

    @property
    def weak_efficiency(self) -> float:
        """Return the time of one rank over that of n ranks with as much work each."""
        return self.one_s / self.weak_s


def loads(size: Size, ranks: int) -> tuple[Load, ...]:
    """Return what is timed; ValueError where the batch is not shared out evenly."""
    sequences = size.global_sequences
    if sequences % ranks:
        raise ValueError(f"{sequences} sequences cannot be shared out to {ranks} ranks")
    return (
        Load(name="one", ranks=1, sequences=sequences),
        Load(name="strong", ranks=ranks, sequences=sequences),
        Load(name="weak", ranks=ranks, sequences=ranks * sequences),
    )


def measure(
    size: Size, chosen: Sequence[Load], *, rounds: int, steps: int, logs: Path
) -> dict[str, list[float]]:
    """Return the seconds per step of each load, one per round; CaseFailed where one cannot run."""
    with contextlib.ExitStack() as stack:
        entered = Contest(logs=logs, size=size)
        for load in chosen:
            case = ours(Mode(name=f"dp{load.ranks}-{load.name}", dp=load.ranks))
            entered.size = replace(size, global_sequences=load.sequences)
            entered.enter(replace(case, label=load.name), stack, on_one_host)
        entered.take_rounds(rounds, warmup=1, steps=steps)
    if entered.failures:
        raise CaseFailed("; ".join(f"{name}: {why}" for name, why in entered.failures.items()))
    return {name: [one.step_s for one in taken] for name, taken in entered.rounds.items()}


def scaling_of(ranks: int, taken: Mapping[str, Sequence[float]]) -> Scaling:
    """Return the scaling that the medians over rounds show."""
    middle = {name: statistics.median(values) for name, values in taken.items()}
    return Scaling(
        ranks=ranks, one_s=middle["one"], strong_s=middle["strong"], weak_s=middle["weak"]
    )


def report(chosen: Sequence[Load], taken: Mapping[str, Sequence[float]]) -> str:
    """Return the times as a Markdown table, and both efficiencies with their definitions."""
    lines: list[list[str]] = []
    for load in chosen:
        values = taken[load.name]
        cells = (f"{statistics.median(values):.3f}", f"{spread_of(values):.0%}")
        lines.append([load.name, str(load.ranks), str(load.sequences), *cells])
    n, b = chosen[-1].ranks, chosen[0].sequences
    found = scaling_of(n, taken)
    return "\n".join(
        [
            markdown(("load", "ranks", "sequences", "step s", "spread"), lines),
            f"strong scaling, the same {b} sequences on {n} ranks: speed-up T(1) / T({n}) = "
            f"{found.speed_up:.2f}, efficiency T(1) / ({n} T({n})) = {found.strong_efficiency:.2f}",
            f"weak scaling, {b} sequences on each rank: efficiency T(1) / T({n}) = "
            f"{found.weak_efficiency:.2f}",
        ]
    )


def main() -> int:
    """Measure, and print what was measured."""
    parser = argparse.ArgumentParser(prog="python -m bench scaling", description=__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="spec", help="size of the model (default: %(default)s)")
    add("--ranks", type=int, default=2, help="data-parallel ranks beside one (default: 2)")
    add_turns(parser, steps=4)
    options = parser.parse_args()
    size = SIZES[options.size]
    try:
        chosen = loads(size, options.ranks)
    except ValueError as error:
        sys.exit(f"error: {error}")
    logs = logs_folder(options.logs)
    end_cleanly()
    try:
        taken = measure(size, chosen, rounds=options.rounds, steps=options.steps, logs=logs)
    except CaseFailed as error:
        sys.exit(f"error: {error}")
    print(report(chosen, taken))
    if options.json is not None:
        options.json.write_text(json.dumps(taken, indent=1) + "\n")
    print(f"{size.name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; logs in {logs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
