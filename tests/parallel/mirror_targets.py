"""What ranks keep until they sum with the rank that holds copies of the same stages."""

from __future__ import annotations

from typing import Any

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches
from tests.parallel.one_device import make_rows


def kept_for_the_mirror(context: RankContext, plan: Plan) -> list[bool]:
    """Take a step; return, for each bucket, whether more than its own memory was kept."""
    engine = TrainEngine(plan, Recorder(context.rank, NoEvents()), context.device)
    reduction: Any = engine.model.reduction
    next_hop, kept = reduction._start_next_sum, list[bool]()

    def note(flight: Any) -> None:
        kept.append(flight.sum is not flight.target)
        next_hop(flight)

    reduction._start_next_sum = note
    engine.step(rank_batches(plan, make_rows(plan, 0), engine.data_rank, 0), 0)
    return kept
