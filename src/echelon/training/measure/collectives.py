# SPDX-License-Identifier: Apache-2.0
"""Measure collectives of 2 to all ranks, by the same calls as a run makes.

Groups of neighbours are measured one at a time, those of ranks that are apart together with the
groups beside them, as a run has them: all ranks of a node then send to other nodes at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from echelon.config.files.measurements import Journal, measurement_name
from echelon.core.event import NoEvents
from echelon.cost.fit.samples import Collective
from echelon.launch.context import RankContext
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.communicator import Communicator
from echelon.parallel.transport.recorder import Recorder

LEAST_RUNS = 3  # runs
MOST_RUNS = 64  # runs
NAME = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveJob:
    """Say what ranks measure: collectives of the first ranks, each for `window_s`.

    The first rank writes each into `journal`.
    """

    collectives: Sequence[Collective]
    window_s: float
    threads: int = 1
    journal: Journal | None = None


def measure_collectives(context: RankContext, job: CollectiveJob) -> list[float]:
    """Return the seconds of each collective, of its slowest rank: the same on every rank.

    Ranks outside of a collective wait for its end.
    """
    torch.set_num_threads(job.threads)
    recorder = Recorder(context.rank, NoEvents(), context.progress)
    shapes = sorted({(one.degree, one.stride) for one in job.collectives})
    groups = {shape: _group(context, *shape, recorder) for shape in shapes}
    found: list[float] = []
    for one in job.collectives:
        context.progress.mark(f"measuring {one}")
        group = groups[one.degree, one.stride]
        seconds = 0.0 if group is None else _measured(group, one, context, job.window_s)
        slowest = torch.tensor([seconds], dtype=torch.float64, device=context.device)
        with context.progress.waits_for("the other ranks"):
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.append(float(slowest))
        if job.journal is not None and context.rank == 0:
            job.journal.append(measurement_name(one), found[-1])
    return found


def _group(context: RankContext, degree: int, stride: int, recorder: Recorder) -> Group | None:
    """Return this rank's group of `degree` ranks `stride` apart, None where it is in none."""
    own: Group | None = None
    for first in range(stride):
        ranks = [first + stride * place for place in range(degree)]
        made = dist.new_group(ranks)  # All ranks make all groups.
        if context.rank in ranks:
            assert isinstance(made, dist.ProcessGroup), "this rank is a member"
            own = Group("tp", ranks, context.rank, Communicator(ranks, made), recorder)
    return own


def _measured(group: Group, one: Collective, context: RankContext, window_s: float) -> float:
    run = _prepared(group, one, context.device)
    run()
    start = _now(context.device)
    run()
    # All members must run it as often: the first one says how many fill the window.
    once = torch.tensor([_now(context.device) - start], device=context.device)
    group.all_reduce(once, name=NAME)
    mean = max(float(once) / group.size, 1e-7)
    found: list[float] = []
    for _ in range(max(LEAST_RUNS, min(MOST_RUNS, int(window_s / mean)))):
        start = _now(context.device)
        run()
        found.append(_now(context.device) - start)
    # A message goes there and comes back.
    return median(found) / 2 if one.kind == "send" else median(found)


def _prepared(group: Group, one: Collective, device: torch.device) -> Callable[[], object]:
    """Return a function that runs one collective on every member, to its end."""
    piece_numel = max(1, one.num_bytes // (4 * group.size))
    whole = torch.zeros(piece_numel * group.size, device=device)
    piece = torch.zeros(piece_numel, device=device)
    other = torch.empty_like(whole)

    def send() -> None:
        # There and back between neighbours; a rank without one (of an odd number) looks on.
        peer = group.index ^ 1
        if peer >= group.size:
            return
        if group.index < peer:
            group.send(whole, peer, name=NAME, tag=1).wait()
            group.receive(other, peer, name=NAME, tag=2).wait()
        else:
            group.receive(other, peer, name=NAME, tag=1).wait()
            group.send(whole, peer, name=NAME, tag=2).wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(whole, name=NAME),
        "all_gather": lambda: group.all_gather(whole, piece, name=NAME),
        "reduce_scatter": lambda: group.reduce_scatter(piece, whole, name=NAME),
        "all_to_all": lambda: group.all_to_all(other, whole, name=NAME),
        "send": send,
    }
    return calls[one.kind]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
