"""The peak of a server, by hand."""

from __future__ import annotations

from echelon.core.plan import Precision
from echelon.cost.peak.rank_peak import PeakWalk
from echelon.cost.peak.servers import server_peak_buffers
from echelon.layout.servers import plan_server_ranges
from tests.parallel.servers.test_server import served_plan


def test_three_buckets_of_all_workers_arrive_at_a_time() -> None:
    """S06: W x the largest three ranges in a row, in the dtype of the reduction."""
    plan = served_plan(4, 2)
    sizes = [len(ranges[0]) for ranges in plan_server_ranges(plan)]
    widest = max(sum(sizes[place : place + 3]) for place in range(len(sizes)))

    found, where = server_peak_buffers(plan, 4)

    assert (found, where) == (4 * widest * 8, "the sums of gradients")


def test_a_server_holds_optimizer_state_and_workers_none() -> None:
    """S06: terms of the peak of each."""
    plan = served_plan(2, 2, precision=Precision(parameters="bf16"))
    walk = PeakWalk(plan)

    worker, server = walk.peak(0).terms, walk.peak(2).terms

    assert worker["optimizer"] == 0
    assert server["optimizer"] == 3 * server["gradients"] == 6 * server["parameters"]
    assert server["activations"] == 0
    assert [one.rank for one in walk.by_place()] == [0, 2]
