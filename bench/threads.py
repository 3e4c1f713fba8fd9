"""Replicas on threads beside ranks, the same batch: `python -m bench.threads`.

In one run, step by step in turn: DataParallel, N replicas on threads of rank 0 while the others
wait, and DistributedDataParallel, N ranks. Three numbers of each, as medians: the seconds of a
step; the bytes that go through the primary (of ranks: that one rank sends); and the share of
forward and backward in which a thread is blocked: it neither runs nor queues for a core, as Linux
counts them, so it waits for the lock of the interpreter. Ranks have an interpreter each; what they
wait for each other is not counted. Nothing is promised about who is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness.interleave import end_cleanly
from echelon.config.load import load_job
from echelon.core.choices.threads import THREADS_AXIS
from echelon.core.event import EventList
from echelon.core.plan import Plan
from echelon.cost.bytes.data import DATA_AXIS
from echelon.cost.bytes.sent import bytes_sent
from echelon.launch.context import RankContext
from echelon.launch.host import ThreadClock
from echelon.launch.local.supervisor import RankPool
from echelon.models.batch import TokenBatch
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine

SIZES: Mapping[str, tuple[str, ...]] = {
    "tiny": ("batch.sequence_length=32",),
    "small": (
        *("model.layers=6", "model.hidden=256", "model.heads=8", "model.kv_heads=8"),
        *("model.head_dim=32", "model.ffn=768", "model.vocab=8192", "batch.sequence_length=128"),
    ),
}
"""Settings of the models, on top of the preset "nano"."""
AXES = {"threads": THREADS_AXIS, "ranks": DATA_AXIS}
"""Where the bytes of each are found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Hold the medians of one way to split the batch."""

    step_s: float
    primary_bytes: int
    formula_bytes: int
    blocked: float


def plans_of(size: str, replicas: int, microbatches: int) -> dict[str, Plan]:
    """Return the same training on threads of one process, and on ranks of their own."""
    batch = f"batch.global_sequences={2 * replicas * microbatches}"
    shared = (*SIZES[size], batch)
    splits = {
        "threads": (f"threads.replicas={replicas}", f"batch.microbatch_sequences={2 * replicas}"),
        "ranks": (f"mesh.dp_replicate={replicas}", "batch.microbatch_sequences=2"),
    }
    return {name: load_job("nano", (*shared, *sets)).plan for name, sets in splits.items()}


def batches_of(plan: Plan, data_rank: int, step: int) -> list[TokenBatch]:
    """Return the microbatches of one data rank: random tokens, a function of the step."""
    numbers, size = plan.mathematics, plan.layout.microbatch_sequences
    generator = torch.Generator().manual_seed(step)
    shape = (numbers.global_sequences, numbers.sequence_length + 1)
    tokens_BT = torch.randint(0, plan.model.vocab, shape, generator=generator)
    first = data_rank * plan.num_microbatches * size
    return [
        TokenBatch.from_rows(
            rows[:, :-1], rows[:, 1:], torch.arange(start, start + size), step=step
        )
        for start in range(first, first + plan.num_microbatches * size, size)
        for rows in [tokens_BT[start : start + size]]
    ]


def take_turns(context: RankContext, argument: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    """Take steps on threads and on ranks in turn; return rows of (seconds, bytes, blocked)."""
    plans = plans_of(argument["size"], context.world_size, argument["microbatches"])
    events = {name: EventList() for name in plans}
    engines: dict[str, TrainEngine] = {}
    for name, plan in plans.items():
        if name == "ranks" or context.rank == 0:
            recorder = Recorder(context.rank, events[name])
            engines[name] = TrainEngine(plan, recorder, context.device)
    found: dict[str, list[list[float]]] = {name: [] for name in plans}
    for step in range(argument["rounds"] + 1):
        for name in ("threads", "ranks") if step % 2 else ("ranks", "threads"):
            _meet(context, f"{name}-{step}")
            if name not in engines:
                continue
            row = _step(engines[name], events[name], AXES[name], step)
            if step:  # the first step allocates
                found[name].append(row)
    _meet(context, "end")
    for engine in engines.values():
        engine.close()
    return found


def _meet(context: RankContext, place: str) -> None:
    """Wait until all ranks are here, on a pipe and not on a core."""
    context.store.add(place, 1)
    while context.store.add(place, 0) < context.world_size:
        time.sleep(0.002)


def _step(engine: TrainEngine, events: EventList, axis: str, step: int) -> list[float]:
    """Take a step; return its seconds, the bytes over an axis, and the share that is blocked."""
    batches = batches_of(engine.plan, engine.data_rank, step)
    events.events.clear()
    replicas = engine.model.replicas
    workers = [] if replicas is None else [one.seconds for one in replicas.threads]
    before = [(one.wall_s, one.blocked_s) for one in workers]
    timed = [0.0, 0.0]
    if replicas is None:
        _time_actions(engine, timed)
    start = time.perf_counter()
    engine.step(batches, step)
    seconds = time.perf_counter() - start
    for one, (wall_s, blocked_s) in zip(workers, before, strict=True):
        timed[0] += one.wall_s - wall_s
        timed[1] += one.blocked_s - blocked_s
    return [seconds, events.bytes_by_axis()[axis], timed[1] / timed[0]]


def _time_actions(engine: TrainEngine, timed: list[float]) -> None:
    """Add up, in the next step, seconds of forward and backward, and those blocked.

    What a rank waits for others is neither.
    """
    executor: Any = engine.model.executor
    run, recorder = type(executor).run, engine.groups.recorder

    def timed_run(*given: Any) -> Any:
        start, clock, waited = time.perf_counter(), ThreadClock.read(), recorder.waited_s
        result = run(executor, *given)
        wall_s = time.perf_counter() - start
        blocked_s = ThreadClock.read().blocked_since(clock, wall_s)
        waited = recorder.waited_s - waited
        timed[0] += wall_s - waited
        timed[1] += max(0.0, blocked_s - waited)
        del executor.run
        return result

    executor.run = timed_run


def figures(
    plans: Mapping[str, Plan], rows: Sequence[Mapping[str, Sequence[Sequence[float]]]]
) -> dict[str, Figures]:
    """Return the medians: of a step the slowest rank's seconds, of ranks the mean share."""
    found: dict[str, Figures] = {}
    for name, axis in AXES.items():
        ranks = [one[name] for one in rows if one[name]]
        steps = list(zip(*ranks, strict=True))
        terms = [term for term in bytes_sent(plans[name], 0) if term.axis == axis]
        found[name] = Figures(
            step_s=statistics.median(max(row[0] for row in step) for step in steps),
            primary_bytes=int(statistics.median(row[1] for row in ranks[0])),
            formula_bytes=sum(term.bytes for term in terms),
            blocked=statistics.median(statistics.fmean(row[2] for row in step) for step in steps),
        )
    return found


def report(found: Mapping[str, Figures], replicas: int) -> str:
    """Return the table."""
    names = {"threads": f"DataParallel, {replicas} threads", "ranks": f"DDP, {replicas} ranks"}
    lines = [
        "| | seconds of a step | MB of the primary, or of a rank | waiting for the interpreter |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {names[name]} | {one.step_s:.4f} | {one.primary_bytes / 1e6:.3f} | "
        f"{100 * one.blocked:.0f} % |"
        for name, one in found.items()
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, and end with 1 where bytes are not those of the formulas."""
    parser = argparse.ArgumentParser(prog="python -m bench.threads", description=__doc__)
    add = parser.add_argument
    add("--replicas", type=int, default=2, help="threads, and ranks (default: %(default)s)")
    add("--size", choices=SIZES, default="small", help="of the model (default: %(default)s)")
    add("--rounds", type=int, default=9, help="steps of each (default: %(default)s)")
    add("--microbatches", type=int, default=2, help="of a step (default: %(default)s)")
    add("--json", type=Path, help="where to keep the figures")
    arguments = parser.parse_args()
    end_cleanly()
    plans = plans_of(arguments.size, arguments.replicas, arguments.microbatches)
    told = {name: getattr(arguments, name) for name in ("size", "rounds", "microbatches")}
    with RankPool(arguments.replicas) as pool:
        rows = pool.run("bench.threads:take_turns", told, arguments.replicas, timeout_s=600.0)
    found = figures(plans, rows)
    print(report(found, arguments.replicas))
    if arguments.json is not None:
        kept = {"replicas": arguments.replicas, **told}
        kept |= {name: asdict(one) for name, one in found.items()}
        arguments.json.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return int(any(one.primary_bytes != one.formula_bytes for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
