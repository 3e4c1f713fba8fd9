"""What ranks keep until they sum with the rank that holds copies of the same stages."""

from __future__ import annotations

from typing import Any

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.recorder import Recorder
from echelon.train.engine import TrainEngine
from echelon.train.subject import rank_batches
from tests.parallel.one_device import make_rows


def kept_for_the_mirror(context: RankContext, plan: Plan) -> list[bool]:
    """Take a step; return, for each bucket, whether more than its own memory was kept."""
    engine = TrainEngine(plan, Recorder(context.rank, NoEvents()), context.device)
    reduction: Any = engine.model.reduction
    next_hop, kept = reduction._next_hop, list[bool]()

    def note(flight: Any) -> None:
        kept.append(flight.wire is not flight.target)
        next_hop(flight)

    reduction._next_hop = note
    engine.step(rank_batches(plan, make_rows(plan, 0), engine.data_rank, 0), 0)
    return kept
