"""Parameter servers rehearsed: no fault, bytes of the formulas, peaks of the walk."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.core.errors import InfeasiblePlan
from echelon.rehearsal.run import rehearse

SERVED = ("mesh.dp_replicate=2", "servers.count=2")


def test_workers_and_servers_are_rehearsed() -> None:
    """S06: exchanges of all ranks have one order; each server is a rank of its own."""
    found = rehearse(load_job("nano", [*SERVED, "precision.parameters=bf16"]).plan, workers=1)

    assert not found.faults
    assert [one.rank for one in sorted(found.ranks, key=lambda one: one.rank)] == [0, 1, 2, 3]
    for one in found.ranks:
        assert one.sent == found.sent[one.rank]
        off = sum(found.planned[one.rank].values()) / one.peak_bytes - 1.0
        # A worker's planned peak has a copy of a bucket that is written while others leave.
        assert abs(off) < (0.001 if one.rank > 1 else 0.03), (one.rank, off)


def test_an_order_that_is_not_known_is_not_rehearsed() -> None:
    """S07: refused before anything is built."""
    plan = load_job("nano", [*SERVED, "servers.updates=asynchronous"]).plan
    with pytest.raises(InfeasiblePlan) as refused:
        rehearse(plan, workers=1)
    assert refused.value.rules == ("asynchronous-order-is-not-known",)
