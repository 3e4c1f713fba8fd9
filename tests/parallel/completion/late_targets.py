"""What ranks do with groups whose collectives complete late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from echelon.core.event import EventList
from echelon.launch.context import RankContext
from echelon.parallel.completion.completion import Completion
from echelon.parallel.completion.late import LateCompletion
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.layouts import plan_of


def every_operation(context: RankContext, folder: str) -> list[dict[str, Any]]:
    """Return what each operation gives, without and with late completion."""
    late = LateCompletion(context.rank, 0, Path(folder, f"races-{context.rank}"))
    return [_results(context, Completion()), _results(context, late)]


def _results(context: RankContext, completion: Completion) -> dict[str, Any]:
    events = EventList()
    plan = plan_of(tp=context.world_size)
    group = rank_groups(plan, Recorder(context.rank, events), completion).tensor
    n, index, after = group.size, group.index, (group.index + 1) % group.size
    before = (index - 1) % n
    x = torch.arange(2.0 * n).view(2 * n, 1) + 10 * index
    started: dict[str, tuple[torch.Tensor, Pending]] = {}

    def start(name: str, result: torch.Tensor, pending: Pending) -> None:
        started[name] = result, pending

    total = x.clone()
    start("sum", total, group.all_reduce(total, name="sum", async_op=True))
    whole = x.new_empty(4 * n * n, 1)[: 2 * n * n]
    start("gather", whole, group.all_gather(whole, x, name="gather", async_op=True))
    own = x.new_empty(2, 1)
    start("scatter", own, group.reduce_scatter(own, x, name="scatter", async_op=True))
    kept = x.clone()
    place = kept[2 * index : 2 * index + 2]
    start("in place", kept, group.all_gather(kept, place, name="in place", async_op=True))
    turned = torch.empty_like(x)
    start("turn", turned, group.all_to_all(turned, x, name="turn", async_op=True))
    came = x.new_empty(index + 1)
    sends, receives = {after: x.new_ones(after + 1)}, {before: came}
    start("exchange", came, group.exchange(sends, receives, name="exchange"))
    arrived = torch.empty_like(x)
    send = group.send(x, after, name="send", tag=5)
    start("receive", arrived, group.receive(arrived, before, name="receive", tag=5))
    early = {name: bool(result.isnan().any()) for name, (result, _) in started.items()}
    results: dict[str, torch.Tensor] = {}
    for name, (result, pending) in started.items():
        pending.wait()
        results[name] = result
    send.wait()
    return {
        "early": early,
        "results": results,
        "rows": group.gather_rows(x[:, 0], name="rows"),
        "sent": events.bytes_by_axis(),
        "alone": _alone(completion, context.rank),
        "operations": completion.num_operations,
    }


def _alone(completion: Completion, rank: int) -> list[float]:
    """Return what a group of one does to a tensor: it completes at once."""
    group: Group = completion.group("tp", (rank,), None, Recorder(rank, EventList()))
    x, y = torch.ones(2), torch.zeros(2)
    group.all_reduce(x, name="sum")
    for move in (group.all_gather, group.reduce_scatter, group.all_to_all):
        move(y, x, name="move")
        x = x + y
    group.exchange({}, {}, name="nothing").wait()
    return x.tolist()
