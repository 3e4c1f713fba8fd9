"""What fingerprints cost: `python -m bench.desync`.

How soon mistakes are named tells `python -m tests.launch.desync.table`.

The ranks of one run take steps with fingerprints and without by turns, so that whatever
else the machine does meets both. Told are the medians of a step's wall and CPU seconds on the
slowest rank, the median of the ratios of neighbouring steps, and, as those scatter by more than
what is looked for, the CPU seconds of the fingerprints alone: of one operation in a loop, times the
operations of a step. Exit 1 where the latter are 1 % of a step or more.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from bench.harness.interleave import say
from echelon.config.load import load_job
from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.messages import Limits
from echelon.launch.local.supervisor import LaunchOptions, run_ranks
from echelon.parallel.transport.communicator import Communicator
from echelon.parallel.transport.recorder import Recorder
from echelon.proof.oracle.batches import global_batch
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches

ONE_PERCENT = 0.01
SPLITS: Mapping[str, tuple[str, ...]] = {
    "dp 2": ("mesh.pp=1", "mesh.tp=1", "mesh.sequence_parallel=false", "mesh.dp_replicate=2"),
    "tp 2": ("mesh.pp=1", "mesh.tp=2", "mesh.dp_replicate=1"),
    "pp 2": ("mesh.pp=2", "mesh.tp=1", "mesh.sequence_parallel=false", "mesh.dp_replicate=1"),
}
"""What nano.toml is split over."""
_LOOP = 20_000


def measure_rank(context: RankContext, argument: Mapping[str, Any]) -> dict[str, Any]:
    """Take steps with fingerprints and without by turns; return their seconds on this rank."""
    torch.set_num_threads(1)
    plan = Plan.from_json(argument["plan"])
    recorder = Recorder(context.rank, NoEvents(), context.progress)
    engine = TrainEngine(plan, recorder, context.device)
    kept = recorder._fingerprints
    assert kept is not None, "the supervisor keeps rings"
    runs = engine.runs_for(plan.mathematics.sequence_length)
    found: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    count = 0
    for step in range(argument["warmup"] + 2 * argument["pairs"]):
        which = "on" if (step // 2 + step) % 2 == 0 else "off"
        recorder._fingerprints = kept if which == "on" else None
        rows = global_batch(plan, step % 4)
        batches = rank_batches(plan, rows, engine.data_rank, step, runs=runs)
        before = context.progress.ring._count if context.progress.ring is not None else 0
        began, cpu = time.perf_counter(), time.process_time()
        engine.step(batches, step)
        if step >= argument["warmup"]:
            took = (time.perf_counter() - began, time.process_time() - cpu)
            found[which].append(took)
            if which == "on" and context.progress.ring is not None:
                count = context.progress.ring._count - before
    recorder._fingerprints = kept
    return {**found, "operations": count, "one_s": _seconds_of_one(recorder, engine)}


def _seconds_of_one(recorder: Recorder, engine: TrainEngine) -> float:
    """Return the CPU seconds of one operation's fingerprint: begun, waited for, ended."""
    communicator = next(
        group.communicator
        for group in (engine.groups.world, engine.groups.data, engine.groups.tensor)
        if group.communicator is not None
    )
    tensor = torch.zeros(64, 64)
    with_prints = _loop(recorder, communicator, tensor)
    recorder._fingerprints = None
    return with_prints - _loop(recorder, communicator, tensor)


def _loop(recorder: Recorder, communicator: Communicator, tensor: torch.Tensor) -> float:
    began = time.process_time()
    for _ in range(_LOOP):
        number = recorder.begun(communicator, "dp", "all_reduce", "gradients.bucket0", tensor)
        with recorder.waiting("gradients.bucket0", number):
            pass
    return (time.process_time() - began) / _LOOP


def cost(pairs: int) -> bool:
    """Print a row for each split; return whether all are within what is allowed."""
    print(
        "| split | operations a step | step on, off (ms) | CPU on, off (ms) | "
        "ratio of neighbours | one operation (us) | share of a step |"
    )
    good = True
    for split, settings in SPLITS.items():
        plan = load_job("nano", [*settings, "batch.microbatch_sequences=2"]).plan
        world = plan.mesh.world_size
        outcome = run_ranks(
            "bench.desync:measure_rank",
            {"plan": plan.to_json(), "warmup": 4, "pairs": pairs},
            world_size=world,
            options=LaunchOptions(limits=Limits(desync_s=60.0), shown_rank=None),
        )
        slowest = max(outcome.require(), key=lambda one: median(took for took, _ in one["on"]))
        wall, cpu = (
            [median(took[index] for took in slowest[which]) for which in ("on", "off")]
            for index in (0, 1)
        )
        ratio = median(
            on[1] / off[1] for on, off in zip(slowest["on"], slowest["off"], strict=True)
        )
        one_s, count = slowest["one_s"], slowest["operations"]
        share = one_s * count / cpu[1]
        good = good and share < ONE_PERCENT
        print(
            f"| {split} | {count} | {wall[0] * 1e3:.2f}, {wall[1] * 1e3:.2f} | "
            f"{cpu[0] * 1e3:.2f}, {cpu[1] * 1e3:.2f} | {ratio:.4f} | "
            f"{one_s * 1e6:.2f} | {share:.2%} |",
            flush=True,
        )
    return good


def main() -> int:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60, help="steps with, and as many without")
    options = parser.parse_args()
    good = cost(options.pairs)
    say("within what is allowed" if good else "ABOVE what is allowed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
