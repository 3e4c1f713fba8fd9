"""Replicas on threads beside ranks, the same batch: `python -m bench.threads`.

In one run, step by step in turn: `ec.threaded`, N replicas on threads of rank 0 while the others
wait, and the engine on N ranks; both train the same decoder. Three numbers of each, as medians: the
seconds of a step; the bytes that go through the primary (of ranks: that one rank sends); and the
share of forward and backward in which a thread is blocked: it neither runs nor queues for a core,
as Linux counts them, so it waits for the lock of the interpreter. Ranks have an interpreter each;
what they wait for each other is not counted. Nothing is promised about who is faster.
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
from torch import nn

import echelon as ec
from bench.harness.interleave import end_cleanly
from echelon.config.load import load_job
from echelon.core.event import EventList
from echelon.core.plan import Plan
from echelon.cost.bytes.data import DATA_AXIS
from echelon.cost.bytes.sent import bytes_sent
from echelon.cost.bytes.threads import THREADS_AXIS, ByRows, ThreadedPass, ThreadedStep, step_bytes
from echelon.launch.context import RankContext
from echelon.launch.host import ThreadClock
from echelon.launch.local.supervisor import RankPool
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Hold the medians of one way to split the batch."""

    step_s: float
    primary_bytes: int
    formula_bytes: int
    blocked: float


def plan_of(size: str, replicas: int, microbatches: int) -> Plan:
    """Return the plan of the ranks; threads take the same batch."""
    batch = f"batch.global_sequences={2 * replicas * microbatches}"
    split = (f"mesh.dp_replicate={replicas}", "batch.microbatch_sequences=2")
    return load_job("nano", (*SIZES[size], batch, *split)).plan


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


class LossOfRows(nn.Module):
    """A decoder that returns the sum of the token losses of its rows."""

    def __init__(self, plan: Plan) -> None:
        """Begin with small random values."""
        super().__init__()
        self.decoder = Decoder(plan.model)
        for parameter in self.decoder.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, rows_BT: torch.Tensor) -> torch.Tensor:
        """Return the sum of losses, of tokens [B, T + 1]."""
        ids_B = torch.arange(len(rows_BT))
        return self.decoder(None, TokenBatch.from_rows(rows_BT[:, :-1], rows_BT[:, 1:], ids_B))


class ThreadedSteps:
    """Steps of the decoder on threads of one process."""

    def __init__(self, plan: Plan) -> None:
        """Replicate it as often as the plan has data ranks."""
        self.plan, self.events = plan, EventList()
        net = LossOfRows(plan)
        self.model = ec.threaded(net, replicas=plan.mesh.dp, events=self.events)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def __call__(self, step: int) -> list[float]:
        """Take a step; return its seconds, the bytes through the primary, the share blocked."""
        numbers, generator = self.plan.mathematics, torch.Generator().manual_seed(step)
        shape = (numbers.global_sequences, numbers.sequence_length + 1)
        rows_BT = torch.randint(0, self.plan.model.vocab, shape, generator=generator)
        self.events.events.clear()
        workers = [thread.seconds for thread in self.model.threads]
        before = [(worker.wall_s, worker.blocked_s) for worker in workers]
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with self.model.step():
            for part_BT in rows_BT.chunk(self.plan.num_microbatches):
                losses = self.model(part_BT)
                (losses.sum() / (numbers.global_sequences * numbers.sequence_length)).backward()
        self.optimizer.step()
        seconds = time.perf_counter() - start
        pairs = list(zip(workers, before, strict=True))
        wall_s = sum(worker.wall_s - wall for worker, (wall, _) in pairs)
        blocked_s = sum(worker.blocked_s - blocked for worker, (_, blocked) in pairs)
        return [seconds, self.events.bytes_by_axis()[THREADS_AXIS], blocked_s / wall_s]

    def close(self) -> None:
        """End the threads."""
        self.model.close()


class RankSteps:
    """Steps of the engine on one of the ranks."""

    def __init__(self, plan: Plan, context: RankContext) -> None:
        """Build this rank's part."""
        self.events = EventList()
        self.engine = TrainEngine(plan, Recorder(context.rank, self.events), context.device)

    def __call__(self, step: int) -> list[float]:
        """Take a step; return its seconds, the bytes that the rank sent, the share blocked."""
        engine = self.engine
        batches, timed = batches_of(engine.plan, engine.data_rank, step), [0.0, 0.0]
        self.events.events.clear()
        _time_actions(engine, timed)
        start = time.perf_counter()
        engine.step(batches, step)
        seconds = time.perf_counter() - start
        return [seconds, self.events.bytes_by_axis()[DATA_AXIS], timed[1] / timed[0]]

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


def take_turns(context: RankContext, argument: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    """Take steps on threads and on ranks in turn; return rows of (seconds, bytes, blocked)."""
    plan = plan_of(argument["size"], context.world_size, argument["microbatches"])
    ways: dict[str, ThreadedSteps | RankSteps] = {"ranks": RankSteps(plan, context)}
    if context.rank == 0:
        ways["threads"] = ThreadedSteps(plan)
    rows: dict[str, list[list[float]]] = {"threads": [], "ranks": []}
    for step in range(argument["rounds"] + 1):
        for name in ("threads", "ranks") if step % 2 else ("ranks", "threads"):
            _meet(context, f"{name}-{step}")
            if name not in ways:
                continue
            row = ways[name](step)
            if step:  # the first step allocates
                rows[name].append(row)
    _meet(context, "end")
    for way in ways.values():
        way.close()
    return rows


def _meet(context: RankContext, place: str) -> None:
    """Wait until all ranks are here, on a pipe and not on a core."""
    context.store.add(place, 1)
    while context.store.add(place, 0) < context.world_size:
        time.sleep(0.002)


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


def formula_bytes(plan: Plan) -> dict[str, int]:
    """Return the bytes of a step by the formulas: through the primary, and of one rank."""
    numbers, microbatches = plan.mathematics, plan.num_microbatches
    state = sum(parameter.nbytes for parameter in LossOfRows(plan).parameters())
    rows = numbers.global_sequences // microbatches
    losses = ByRows(each=4)
    pass_of_rows = ThreadedPass(
        rows=rows,
        inputs=ByRows(cut=rows * (numbers.sequence_length + 1) * 8),
        outputs=losses,
        seeds=losses,
        gradients=state,
    )
    step = ThreadedStep(replicas=plan.mesh.dp, state=state, passes=[pass_of_rows] * microbatches)
    sent = [term.bytes for term in bytes_sent(plan, 0) if term.axis == DATA_AXIS]
    return {"threads": sum(term.bytes for term in step_bytes(step)), "ranks": sum(sent)}


def figures(
    plan: Plan, rows: Sequence[Mapping[str, Sequence[Sequence[float]]]]
) -> dict[str, Figures]:
    """Return the medians: of a step the slowest rank's seconds, of ranks the mean share."""
    found: dict[str, Figures] = {}
    for name, formula in formula_bytes(plan).items():
        ranks = [one[name] for one in rows if one[name]]
        steps = list(zip(*ranks, strict=True))
        found[name] = Figures(
            step_s=statistics.median(max(row[0] for row in step) for step in steps),
            primary_bytes=int(statistics.median(row[1] for row in ranks[0])),
            formula_bytes=formula,
            blocked=statistics.median(statistics.fmean(row[2] for row in step) for step in steps),
        )
    return found


def report(found: Mapping[str, Figures], replicas: int) -> str:
    """Return the table."""
    names = {"threads": f"{replicas} threads", "ranks": f"{replicas} ranks"}
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
    plan = plan_of(arguments.size, arguments.replicas, arguments.microbatches)
    told = {name: getattr(arguments, name) for name in ("size", "rounds", "microbatches")}
    with RankPool(arguments.replicas) as pool:
        rows = pool.run("bench.threads:take_turns", told, arguments.replicas, timeout_s=600.0)
    found = figures(plan, rows)
    print(report(found, arguments.replicas))
    if arguments.json is not None:
        kept = {"replicas": arguments.replicas, **told}
        kept |= {name: asdict(one) for name, one in found.items()}
        arguments.json.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return int(any(one.primary_bytes != one.formula_bytes for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
