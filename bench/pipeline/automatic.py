"""Search for schedules beside every fixed one: makespan, distance from the lower bound, seconds.

    python -m bench.pipeline.automatic --ranks 2,4,8,16

No process runs a model here: makespans are simulated, in units of F. One line is one shape of
times: F, B and W of a stage, a transfer, how heavy the last stage is, and BW over B + W.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from echelon.schedule.automatic import FoundSchedule, find_schedule
from echelon.schedule.check import check_schedule
from echelon.schedule.simulate import Durations


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Say what a search is given; `limit` is in microbatches per rank, 0 for none."""

    num_ranks: int
    num_microbatches: int
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    transfer: float = 0.0
    last_stage: float = 1.0
    fused: float = 1.0
    limit: int = 0
    folded: bool = False

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Return one stage on each rank, or two as a V."""
        ranks = tuple(range(self.num_ranks))
        return ranks + ranks[::-1] if self.folded else ranks

    def durations(self) -> Durations:
        """Return the times of the stages."""
        stages = len(self.stage_ranks)
        weights = [1.0] * (stages - 1) + [self.last_stage]
        half = tuple(weight * self.input_gradient for weight in weights)
        rest = tuple(weight * self.weight_gradient for weight in weights)
        return Durations(
            forward_s=tuple(weights),
            input_gradient_s=half,
            weight_gradient_s=rest,
            backward_s=tuple(self.fused * (b + w) for b, w in zip(half, rest, strict=True)),
            transfer_s=(self.transfer,) * (stages - 1),
        )

    def find(self) -> FoundSchedule:
        """Search."""
        limits = (self.limit,) * self.num_ranks if self.limit else None
        return find_schedule(
            self.stage_ranks, self.num_microbatches, self.durations(), most_in_flight=limits
        )

    def __str__(self) -> str:
        """Return the cells of a table's row."""
        times = f"1 : {self.input_gradient:g} : {self.weight_gradient:g}"
        stages = f"{self.num_ranks}{' V' if self.folded else ''}"
        cells = (
            stages,
            self.num_microbatches,
            times,
            f"{self.transfer:g}",
            f"{self.last_stage:g}",
            f"{self.fused:g}",
            self.limit or "none",
        )
        return " | ".join(str(cell) for cell in cells)


HEAD = (
    "| p | m | F : B : W | transfer | last stage | BW / (B + W) | limit | best fixed | its time "
    "| found | gain % | bound | gap % | search s |"
)


def shapes(ranks: list[int], *, fused: list[float], folded: bool) -> Iterator[Shape]:
    """Yield every shape of the table."""
    gradients = ((1.0, 1.0), (1.2, 0.8))
    for p, per_rank, times, transfer, last, both in product(
        ranks, (1, 2, 4), gradients, (0.0, 0.2, 0.5), (1.0, 1.5), fused
    ):
        for limit in (2 * p if folded else p, 0):
            yield Shape(
                num_ranks=p,
                num_microbatches=p * per_rank,
                input_gradient=times[0],
                weight_gradient=times[1],
                transfer=transfer,
                last_stage=last,
                fused=both,
                limit=limit,
                folded=folded,
            )


def measured(shape: Shape) -> dict[str, object]:
    """Search once and return the row; the schedule found is checked."""
    start = time.process_time()
    found = shape.find()
    seconds = time.process_time() - start
    check_schedule(found.schedule)
    name, fixed = min(found.fixed.items(), key=lambda item: item[1])
    return {
        "shape": asdict(shape),
        "best_fixed": name,
        "fixed": dict(found.fixed),
        "best_fixed_s": fixed,
        "found_s": found.makespan_s,
        "gain": 1 - found.makespan_s / fixed,
        "bound_s": found.lower_bound_s,
        "gap": found.makespan_s / found.lower_bound_s - 1,
        "search_cpu_s": seconds,
    }


def line(shape: Shape, row: dict[str, object]) -> str:
    """Return one line of the table."""
    return (
        f"| {shape} | {row['best_fixed']} | {row['best_fixed_s']:.2f} | {row['found_s']:.2f} "
        f"| {100 * float(str(row['gain'])):.2f} | {row['bound_s']:.2f} "
        f"| {100 * float(str(row['gap'])):.2f} | {row['search_cpu_s']:.2f} |"
    )


def main() -> None:
    """Print the table line by line, then what it comes to."""
    parser = argparse.ArgumentParser(description="Search for schedules beside every fixed one.")
    parser.add_argument("--ranks", default="2,4,8,16", help="default: %(default)s")
    parser.add_argument("--fused", default="1", help="BW over B + W (default: %(default)s)")
    parser.add_argument("--folded", action="store_true", help="two stages a rank, as a V")
    parser.add_argument("--json", type=Path, help="write every row to this file")
    options = parser.parse_args()
    ranks = [int(one) for one in options.ranks.split(",")]
    fused = [float(one) for one in options.fused.split(",")]
    print(HEAD)
    print("|" + " --- |" * HEAD.count(" | ") + " --- |")
    rows: list[dict[str, object]] = []
    for shape in shapes(ranks, fused=fused, folded=options.folded):
        rows.append(measured(shape))
        print(line(shape, rows[-1]), flush=True)
    gaps = [float(str(row["gap"])) for row in rows]
    gains = [float(str(row["gain"])) for row in rows]
    seconds = [float(str(row["search_cpu_s"])) for row in rows]
    print(
        f"\n{len(rows)} shapes: {sum(gap < 1e-9 for gap in gaps)} found at the bound, gap at most "
        f"{100 * max(gaps):.2f} %; {sum(gain > 1e-9 for gain in gains)} faster than the best fixed "
        f"one, by up to {100 * max(gains):.2f} %; {max(seconds):.1f} s for the longest search"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
