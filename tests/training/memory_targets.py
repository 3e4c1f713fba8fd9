"""What a rank runs under a cap on its memory."""

from __future__ import annotations

import resource
from pathlib import Path

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches
from tests.parallel.one_device import make_rows


def private_bytes() -> int:
    """Return the private writable memory of this process, heap and anonymous maps."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmData in /proc/self/status")


def train_capped(context: RankContext, argument: tuple[Plan, int, int]) -> list[float]:
    """Take steps with at most `cap` bytes more than the rank has now; return the losses."""
    plan, cap, num_steps = argument
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + cap, hard))
    try:
        engine = TrainEngine(plan, Recorder(context.rank, NoEvents()), context.device)
        losses: list[float] = []
        for step in range(num_steps):
            batches = rank_batches(plan, make_rows(plan, step), engine.data_rank, step)
            losses.append(engine.step(batches, step).loss)
        engine.close()
        return losses
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
