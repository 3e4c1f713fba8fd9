"""The table of synchronous and asynchronous servers: `python -m bench.parameter_servers`.

Two workers and two servers train a small model on CPU ranks. Each worker pauses before each step,
at random and by its own seed, so that sometimes one is late and sometimes the other: synchronous
ones wait for the later of both, asynchronous ones for neither while the bound allows. All runs take
turns in one pool of ranks. What is measured is told with its number, what is derived with its
formula; `--write FILE` puts the table between the marks of a page.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from echelon.core.choices.updates import Updates
from echelon.core.plan import Plan
from echelon.cost.bytes.servers import SERVERS_AXIS, through_server
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.proof.oracle.batches import global_batch
from echelon.proof.shrink import shrink
from echelon.training.subject import build_as_trained

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
TARGET = "bench.parameter_servers:run_rank"
"""What every rank runs, by a name that all processes find."""

SEEN_AGAIN = 4
"""Global batches, which come again and again: a small model learns them."""

KINDS: Mapping[str, Updates] = {
    "synchronous": Updates(),
    "asynchronous, bound 0": Updates(kind="asynchronous", max_staleness=0),
    "bound 2": Updates(kind="asynchronous", max_staleness=2),
    "bound 2, damping 1": Updates(kind="asynchronous", max_staleness=2, damping=1.0),
}
"""The columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """Say what one rank did in a run."""

    seconds: float
    losses: Sequence[float]
    sent: int
    staleness: Sequence[int]


def run_rank(context: RankContext, argument: Mapping[str, Any]) -> RankOutcome:
    """Take the steps of a run; a worker pauses before each. The target of every rank."""
    plan, steps = Plan.from_json(argument["plan"]), argument["steps"]
    random = Random(f"{argument['seed']}-{context.rank}")
    subject: Any = build_as_trained(context, plan)
    losses: list[float] = []
    sent = 0
    start = time.perf_counter()
    for step in range(steps):
        if not plan.mesh.is_server(context.rank):
            time.sleep(random.choice((0.0, argument["pause_s"])))
        report = subject.step(global_batch(plan, step % SEEN_AGAIN), step)
        losses.append(report.loss)
        sent += report.bytes_sent.get(SERVERS_AXIS, 0)
    seconds = time.perf_counter() - start
    after = subject.close()
    if plan.mesh.is_server(context.rank):
        sent += after.get(SERVERS_AXIS, 0)
    return RankOutcome(
        seconds=seconds,
        losses=losses,
        sent=sent,
        staleness=[one.staleness for one in subject.applied()],
    )


def served_plan(updates: Updates) -> Plan:
    """Return a small plan of two workers and two servers."""
    from echelon.config.load import load_job

    sets = ("mesh.dp_replicate=2", "servers.count=2", "optimizer.schedule=constant")
    plan = shrink(load_job("nano", (*sets, "optimizer.warmup_steps=0")).plan)
    optimizer = replace(plan.mathematics.optimizer, learning_rate=3e-3)
    numbers = replace(plan.mathematics, updates=updates, optimizer=optimizer)
    return replace(plan, mathematics=numbers)


def outcomes(pool: RankPool, *, steps: int, rounds: int, pause_s: float) -> dict[str, list[Any]]:
    """Return what the ranks of each kind did, round after round, in turns; the first is left out.

    In it processes import what they need.
    """
    found: dict[str, list[Any]] = {name: [] for name in KINDS}
    for round_ in range(rounds + 1):
        for name, updates in KINDS.items():
            plan = served_plan(updates)
            told = {"plan": plan.to_json(), "steps": steps, "pause_s": pause_s, "seed": round_}
            labels = [plan.mesh.label(rank) for rank in range(plan.mesh.world_size)]
            found[name].append(pool.run(TARGET, told, plan.mesh.world_size, labels=labels))
    return {name: every[1:] for name, every in found.items()}


def table_text(found: Mapping[str, Sequence[Any]], *, steps: int, pause_s: float) -> str:
    """Return the table in Markdown, with where each row is from."""
    rows: dict[str, list[str]] = {}
    for name, rounds in found.items():
        plan = served_plan(KINDS[name])
        updates, workers = plan.mathematics.updates, plan.mesh.num_workers
        stale = [k for ranks in rounds for k in ranks[workers].staleness]
        seconds = statistics.median(max(one.seconds for one in ranks[:workers]) for ranks in rounds)
        losses = [[statistics.fmean(step) for step in _steps(ranks, workers)] for ranks in rounds]
        first, last = (
            statistics.median(statistics.fmean(part(one)) for one in losses)
            for part in (lambda one: one[:SEEN_AGAIN], lambda one: one[-SEEN_AGAIN:])
        )
        pushed = sum(one.sent for one in rounds[0][:workers]) / workers
        cells = {
            "updates when each worker has done a step (derived)": str(updates.per_clock(workers)),
            "seconds of the run (measured, median)": f"{seconds:.2f}",
            "mean staleness (recorded)": f"{statistics.fmean(stale):.2f}" if stale else "0",
            "largest staleness (recorded) of what the bound allows (derived)": (
                f"{max(stale, default=0)} of {updates.most_stale(workers)}"
            ),
            "loss of the first and the last batches (measured)": f"{first:.3f} -> {last:.3f}",
            "bits of the synchronous losses (compared)": _same(found["synchronous"], rounds),
            "bytes a worker sends in a step (counted)": f"{pushed / steps:,.0f}",
            "bytes of the model through a server in a step (derived)": (
                f"{through_server(plan, 0):,}"
            ),
        }
        for row, cell in cells.items():
            rows.setdefault(row, []).append(cell)
    head = f"| {steps} steps, pauses of 0 or {1e3 * pause_s:.0f} ms | {' | '.join(found)} |"
    lines = [head, "|---" * (len(found) + 1) + "|"]
    return "\n".join([*lines, *(f"| {row} | {' | '.join(cells)} |" for row, cells in rows.items())])


def _steps(ranks: Sequence[RankOutcome], workers: int) -> Sequence[Sequence[float]]:
    """Return the losses of all workers, step by step."""
    return [*zip(*(one.losses for one in ranks[:workers]), strict=True)]


def _same(synchronous: Sequence[Any], rounds: Sequence[Any]) -> str:
    """Say whether the first worker had the losses of the synchronous run, bit for bit."""
    pairs = zip(synchronous, rounds, strict=True)
    return "yes" if all(one[0].losses == other[0].losses for one, other in pairs) else "no"


def with_table(page: str, table: str) -> str:
    """Return a page with another table between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Run all kinds, and print the table or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause-ms", type=float, default=60.0)
    parser.add_argument("--write", type=Path, default=None)
    chosen = parser.parse_args()
    pause_s = chosen.pause_ms / 1e3
    with RankPool(4) as pool:
        found = outcomes(pool, steps=chosen.steps, rounds=chosen.rounds, pause_s=pause_s)
    table = table_text(found, steps=chosen.steps, pause_s=pause_s)
    print(table)
    if chosen.write is not None:
        page = chosen.write.read_text(encoding="utf-8")
        chosen.write.write_text(with_table(page, table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
