"""Which reduction and which gathering a rank of the grid has."""

from __future__ import annotations

from echelon.core.event import EventList
from echelon.core.plan import Plan
from echelon.layout.stage import part_of
from echelon.parallel.data import GradientReduction
from echelon.parallel.servers.messages import WorkerMessages
from echelon.parallel.servers.worker import GradientPush, PulledParameters
from echelon.parallel.servers.worker_parts import gradient_reduction, parameter_gathering
from echelon.parallel.transport.device_mesh import RankGroups, rank_groups
from echelon.parallel.transport.recorder import Recorder
from echelon.parallel.zero import ParameterGathering
from echelon.rehearsal.groups import RehearsedCompletion
from echelon.rehearsal.log import RankLog
from echelon.rehearsal.shapes import ShapesOnly
from tests.parallel.layouts import plan_of
from tests.parallel.servers.test_server import served_plan
from tests.training.servers.test_served import with_updates


def groups_of(plan: Plan) -> RankGroups:
    """Return the groups of rank 0, which talk to nobody."""
    shapes = ShapesOnly(RankLog(0), None)
    return rank_groups(plan, Recorder(0, EventList()), RehearsedCompletion(shapes))


def test_workers_push_and_others_sum() -> None:
    """S06, S07: by the plan alone."""
    plain, served = plan_of(dp=2), served_plan(2, 1)
    apart = with_updates(served, 1)

    assert type(gradient_reduction(plain, groups_of(plain))) is GradientReduction
    assert type(gradient_reduction(served, groups_of(served))) is GradientPush
    assert type(gradient_reduction(apart, groups_of(apart))) is WorkerMessages
    gatherings = [
        parameter_gathering(plan, part_of(plan, 0), [], groups_of(plan)) for plan in (plain, served)
    ]
    assert [type(one) for one in gatherings] == [ParameterGathering, PulledParameters]
