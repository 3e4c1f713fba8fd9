"""Measure collectives of 2 to all ranks of a pool, by the same calls as a run makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from echelon.core.event import NoEvents
from echelon.cost.fit.samples import Collective
from echelon.launch.context import RankContext
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder

LEAST_RUNS = 3  # runs
MOST_RUNS = 64  # runs
NAME = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveJob:
    """Say what ranks measure: collectives of the first `degree` of them, each for `window_s`."""

    collectives: Sequence[Collective]
    window_s: float
    threads: int = 1


def measure_collectives(context: RankContext, job: CollectiveJob) -> list[float]:
    """Return the seconds of each collective, of its slowest rank: the same on every rank.

    Ranks outside of a collective wait for its end.
    """
    torch.set_num_threads(job.threads)
    recorder = Recorder(context.rank, NoEvents(), context.progress)
    degrees = sorted({one.degree for one in job.collectives})
    groups = {degree: _group(context, degree, recorder) for degree in degrees}
    found: list[float] = []
    for one in job.collectives:
        context.progress.mark(f"measuring {one}")
        group = groups[one.degree]
        seconds = 0.0 if group is None else _measured(group, one, context, job.window_s)
        slowest = torch.tensor([seconds], dtype=torch.float64, device=context.device)
        with context.progress.waits_for("the other ranks"):
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.append(float(slowest))
    return found


def _group(context: RankContext, degree: int, recorder: Recorder) -> Group | None:
    ranks = list(range(degree))
    made = dist.new_group(ranks)
    if context.rank >= degree:
        return None
    assert isinstance(made, dist.ProcessGroup), "this rank is a member"
    return Group("tp", ranks, context.rank, made, recorder)


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
