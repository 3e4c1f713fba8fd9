"""Offload costs what optimizer state takes over the link of a host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.cost.lattice.offload import HOST_LINK_BYTES_PER_S, REACHED, offload_seconds
from echelon.planner.ranked import estimate_choice, work_of_choice
from echelon.planner.search import search
from tests.planner.requests import small


def test_state_that_rests_on_the_host_travels_every_step() -> None:
    request = small(pins=["zero=1", "pp=1"])
    best = search(replace(request, top=1)).best
    assert best is not None
    choice = replace(best.choice, offload=True)
    work = work_of_choice(request, choice)
    slower = estimate_choice(request, choice).seconds["optimizer"]
    slower -= estimate_choice(request, best.choice).seconds["optimizer"]
    held = estimate_choice(request, best.choice).bytes["optimizer"]
    assert slower == pytest.approx(held / (REACHED * HOST_LINK_BYTES_PER_S), rel=0.02)
    assert float(offload_seconds(work, 1e9)) == pytest.approx(
        12e9 / (REACHED * HOST_LINK_BYTES_PER_S)
    )
    assert float(offload_seconds(work_of_choice(request, best.choice), 1e9)) == 0.0
    on_host = replace(work, software=replace(work.software, host_adds=1.0))
    assert float(offload_seconds(on_host, 1e9)) == 0.0
