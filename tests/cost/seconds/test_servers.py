"""Seconds of parameter servers: a server's link is the bottleneck while W > S."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.planner.predict.estimate import estimate_plan


def gathers(workers: int, servers: int) -> float:
    """Return the seconds in which parameters come back, less what does not depend on bytes."""
    sets = [f"mesh.dp_replicate={workers}", f"servers.count={servers}", "cluster.preset=64xcpu"]
    sets += [f"batch.global_sequences={2 * workers}", "model.layers=48"]
    return estimate_plan(load_job("nano", sets).plan).seconds["gather"]


def test_two_servers_halve_what_one_takes() -> None:
    """S06, A15: W model / S through each link, one way; W = S and W < S are a worker's own link."""
    one, two, four, eight = (gathers(4, servers) for servers in (1, 2, 4, 8))

    assert one / two == pytest.approx(2.0, rel=0.02)
    assert two / four == pytest.approx(2.0, rel=0.02)
    assert four == pytest.approx(eight, rel=0.02)
