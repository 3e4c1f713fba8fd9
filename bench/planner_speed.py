"""Measure how fast the planner searches: plans per CPU-second, and the time to a whole answer.

`python -m bench planner_speed` searches the complete space of four cases on one core, timed event
by event and written as Plans at the end; it runs `echelon plan` for two whole answers, with all
that is recommended; then it computes plans of the first case one after the other, full time and
full memory, with nothing left out by a bound. CPU seconds are what counts, so other work on the
machine matters little, but for the seconds to the first line. `--markdown FILE` adds the
tables to a file. Exit 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from bench.harness.report import markdown
from echelon.planner.search.formulas import OptionTables, VectorizedFormulas
from echelon.planner.search.legal_meshes import Legality, legal_meshes
from echelon.planner.search.request import make_request
from echelon.planner.search.search import search
from echelon.planner.search.sweep import PLANS_AT_ONCE

PLANS_PER_S = 400_000
COMPUTED = 500_000
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name a search and the CPU seconds that it may take."""

    model: str
    cluster: str
    limit_s: float


FIRST_LINE_S = 1.0
ANSWERS = (
    Case(model="llama3-8b", cluster="8xh100", limit_s=1.0),
    Case(model="llama3.1-405b", cluster="16384xh100", limit_s=8.0),
)
"""Whole answers of the command, in a process of its own."""
CASES = (
    Case(model="gpt3-175b", cluster="1024xa100-80gb", limit_s=2.0),
    Case(model="gpt3-175b", cluster="4096xa100-80gb", limit_s=2.0),
    Case(model="llama3.1-405b", cluster="16384xh100", limit_s=5.0),
    Case(model="deepseek-v3", cluster="2048xh800", limit_s=10.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Hold what a search took, the median of some rounds, and what it saw."""

    case: Case
    cpu_s: float
    wall_s: float
    seen: int
    computed: int
    best: str

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        return (
            f"{self.case.model} on {self.case.cluster}",
            f"{self.seen:,}",
            f"{self.computed:,}",
            f"{self.cpu_s:.2f}",
            f"{self.case.limit_s:.0f}",
            f"{self.wall_s:.2f}",
            self.best,
        )


def main() -> int:
    """Measure, print tables, and return whether a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="a file that the tables are added to")
    arguments = parser.parse_args()
    measured = [measure(case) for case in CASES]
    rate = computed_per_s(CASES[0])
    header = ("case", "plans", "computed", "CPU s", "limit", "wall s", "best")
    text = markdown(header, [one.row() for one in measured])
    rows = [("echelon, every plan computed in full", f"{rate:,.0f}")]
    first = measured[0]
    rows.append(("echelon, plans of the space by CPU s", f"{first.seen / first.cpu_s:,.0f}"))
    answers = [answered(case) for case in ANSWERS]
    told = [
        (
            f"{one.case.model} on {one.case.cluster}",
            f"{one.cpu_s:.2f}",
            f"{one.case.limit_s:.0f}",
            f"{one.first_line_s:.2f}",
        )
        for one in answers
    ]
    text += "\n\n" + markdown(("whole answer", "CPU s", "limit", "first line s"), told)
    text += "\n\n" + markdown(("plans per CPU-second", "gpt3-175b, 1024 A100"), rows)
    print(text)
    if arguments.markdown:
        with arguments.markdown.open("a", encoding="utf-8") as stream:
            stream.write(f"\n{text}\n")
    missed = sum(one.cpu_s > one.case.limit_s for one in measured) + (rate < PLANS_PER_S)
    missed += sum(one.missed for one in answers)
    print(f"\n{missed} missed (load {os.getloadavg()[0]:.1f}, numpy {np.__version__})")
    return 1 if missed else 0


def measure(case: Case) -> Measured:
    """Search a case a few times, from the names to the Plans."""
    took: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        cpu, wall = time.process_time(), time.perf_counter()
        answer = search(make_request(case.model, cluster=case.cluster))
        took.append((time.process_time() - cpu, time.perf_counter() - wall))
    took.sort()
    cpu_s, wall_s = took[len(took) // 2]
    assert answer.best is not None
    mesh = answer.best.candidate.mesh
    best = f"{answer.best.estimate.step_s:.3g} s: tp{mesh.tp} cp{mesh.cp} pp{mesh.pp} dp{mesh.dp}"
    return Measured(
        case=case,
        cpu_s=cpu_s,
        wall_s=wall_s,
        seen=answer.num_legal,
        computed=answer.num_computed,
        best=best,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Hold what a whole answer of the command took: CPU seconds, and seconds to its first line."""

    case: Case
    cpu_s: float
    first_line_s: float

    @property
    def missed(self) -> bool:
        """Return whether it took longer than it may."""
        return self.cpu_s > self.case.limit_s or self.first_line_s > FIRST_LINE_S


def answered(case: Case) -> Answered:
    """Run the command a few times, and return the median of each."""
    cpu: list[float] = []
    first: list[float] = []
    command = [sys.executable, "-m", "echelon", "plan", case.model, "--cluster", case.cluster]
    for _ in range(ROUNDS):
        before, started = _children_s(), time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            first.append(time.perf_counter() - started)
            process.stdout.read()
        cpu.append(_children_s() - before)
    return Answered(case=case, cpu_s=median(cpu), first_line_s=median(first))


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def computed_per_s(case: Case) -> float:
    """Return how many plans get their full time and memory in a CPU-second."""
    request = make_request(case.model, cluster=case.cluster)
    rows = legal_meshes(request, request.cluster.num_devices, Legality(request.one_rank_run))
    expanded = OptionTables(request, offload=False)
    expanded.set_meshes(rows)
    formulas = VectorizedFormulas(request, rows)
    everything = np.arange(len(rows), dtype=np.int64)
    shares, orders = expanded.zero_options(everything), expanded.schedule_options(everything)
    share, order = expanded.pairs(len(rows), shares, orders)
    some = np.random.default_rng(0).permutation(len(share))[:COMPUTED]
    started = time.process_time()
    formulas.prepare(everything)
    for start in range(0, len(some), PLANS_AT_ONCE):
        part = some[start : start + PLANS_AT_ONCE]
        index = everything[shares.row[share[part]]]
        numbers = {name: column[share[part]] for name, column in shares.numbers.items()}
        numbers |= {name: column[order[part]] for name, column in orders.numbers.items()}
        seconds = formulas.seconds(index, **numbers, recompute=0.5).total
        held = formulas.bytes(index, **numbers, recompute=0.5).total
        assert np.isfinite(seconds).all()
        assert np.isfinite(held).all()
    return len(some) / (time.process_time() - started)


if __name__ == "__main__":
    sys.exit(main())
