"""What four ranks do in ring attention: who sends which positions to whom, and which pairs meet.

The values at a position are its number, so that a message tells which positions it carries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from echelon.core.axis import Axis
from echelon.core.event import EventList
from echelon.core.plan import Context, Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.layout.context_work import chunk_runs
from echelon.models.batch import TokenBatch
from echelon.parallel.context import ContextAttention
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.context.targets import Met, noting
from tests.parallel.layouts import NANO, plan_of

RANKS, POSITIONS = 4, 16
CASES: Mapping[str, bool] = {"no mask, zigzag": False, "causal, zigzag": True}
"""Whether a query meets the keys before it only; each rank has a chunk of both ends."""

Note = dict[str, Any]


def ring_case(causal: bool) -> Plan:
    """Return a plan of one head of one block over four context ranks."""
    model = replace(NANO, layers=1, heads=1, kv_heads=1, causal=causal, max_positions=POSITIONS)
    return plan_of(
        model=model,
        sequence_length=POSITIONS,
        microbatch_sequences=1,
        microbatches=1,
        cp=RANKS,
        context=Context(kind="ring", ulysses_degree=1),
    )


def record_ring(pool: RankPool) -> Note:
    """Return what ranks note, by case."""
    found: Note = {"ranks": RANKS, "positions": POSITIONS, "cases": {}}
    for name, causal in CASES.items():
        plan = ring_case(causal)
        ranks = pool.run(attend_and_note, plan, world_size=RANKS)
        chunks = [list(_positions((run,))) for _, run in chunk_runs(plan.placement)]
        found["cases"][name] = {"chunks": chunks, "ranks": list(ranks)}
    return found


def attend_and_note(context: RankContext, plan: Plan) -> Note:
    """Attend at this rank's positions; return them, what it sent, and which chunks it met."""
    groups = rank_groups(plan, Recorder(context.rank, EventList()))
    attention = ContextAttention(plan, groups.ring, groups.ulysses, GradientStore(Reduction()))
    runs = plan.placement.runs(plan.mesh.coordinates(context.rank)[Axis.CP])
    own = list(_positions(runs))
    tokens = torch.zeros(1, POSITIONS, dtype=torch.int64)
    batch = TokenBatch.from_rows(tokens, tokens, torch.arange(1)).cut(runs)
    here = torch.tensor(own, dtype=torch.float64)
    zeros = torch.zeros(len(own), 1, 1, plan.model.head_dim, dtype=torch.float64)
    values = zeros + here[:, None, None, None]
    sent: list[Note] = []
    met: list[Met] = []
    with _noting_messages(sent), noting(met):
        attention.attend(zeros, zeros, values, plan.model, batch)
    return {"own": own, "sent": sent, "met": [_meeting(plan, one) for one in met]}


@contextmanager
def _noting_messages(into: list[Note]) -> Iterator[None]:
    """Note which positions each message of an exchange carries, to which rank."""
    exchange = Group.exchange

    def noted(
        group: Group,
        sends: Mapping[int, torch.Tensor],
        receives: Mapping[int, torch.Tensor],
        *,
        name: str,
    ) -> Pending:
        for place, tensor in sends.items():
            # Rows, then keys or values: those of a position are its number.
            carried = tensor[:, 1, 0, 0, 0].long().tolist()
            step = int(name.rpartition(".")[2])
            to, size = group.ranks[place], tensor.nbytes
            into.append({"step": step, "to": to, "positions": carried, "bytes": size})
        return exchange(group, sends, receives, name=name)

    with patch.object(Group, "exchange", noted):
        yield


def _meeting(plan: Plan, met: Met) -> Note:
    """Return how many pairs of each two chunks one call of attention was asked for."""
    queries, keys = (list(_positions(runs)) for runs in met[:2])
    chunk = {p: at for at, (_, run) in enumerate(chunk_runs(plan.placement)) for p in _of(run)}
    pairs: Counter[tuple[int, int]] = Counter()
    for tile in met[2]:
        for i, q in enumerate(queries[tile.q]):
            for j, k in enumerate(keys[tile.k]):
                pairs[chunk[q], chunk[k]] += tile.band.allows(i, j)
    return {"pairs": [[*both, many] for both, many in sorted(pairs.items()) if many]}


def _positions(runs: Sequence[Any]) -> Iterator[int]:
    return (position for run in runs for position in _of(run))


def _of(run: Any) -> list[int]:
    return [run.position(at) for at in range(run.count)]
