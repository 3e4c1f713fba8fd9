"""Constants of links that are planted in times are found again, and stay plausible."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from echelon.core.cluster import Cluster, Device, Link
from echelon.cost.fit.links import (
    bus_bytes,
    fit_last_tier,
    fit_link,
    node_of,
    seconds_on_cluster,
)
from echelon.cost.fit.samples import (
    COLLECTIVES,
    Collective,
)
from echelon.cost.fit.samples import TimedCollective as Travelled


def _travelled(link: Link, noise: float = 0.0) -> list[Travelled]:
    sizes = [4**n * 1024 for n in range(9)]
    bare = [
        Travelled(collective=Collective(kind=kind, degree=degree, num_bytes=size), seconds=1.0)
        for degree, kind, size in product((2, 4, 8), COLLECTIVES, sizes)
    ]
    seconds = seconds_on_cluster(node_of(link), bare)
    seconds = seconds * np.exp(noise * np.random.default_rng(3).standard_normal(len(bare)))
    return [replace(one, seconds=float(s)) for one, s in zip(bare, seconds, strict=True)]


LINK = Link(name="wire", degree=8, bandwidth=5e10, latency_s=4e-6, efficiency=0.8, half_bytes=3e5)


def test_the_constants_of_a_link_are_found() -> None:
    found = fit_link(replace(LINK, latency_s=0.0, efficiency=1.0), _travelled(LINK), rated=True)
    assert found.link.bandwidth == 5e10
    assert found.link.efficiency == pytest.approx(0.8, rel=0.02)
    assert found.link.latency_s == pytest.approx(4e-6, rel=0.02)
    assert found.link.half_bytes == pytest.approx(3e5, rel=0.1)
    assert max(map(abs, found.errors)) < 0.02


def test_the_bandwidth_of_an_unknown_link_is_the_best_that_was_measured() -> None:
    timed = _travelled(LINK)
    found = fit_link(replace(LINK, bandwidth=1.0), timed)
    assert found.link.bandwidth == max(bus_bytes(one.collective) / one.seconds for one in timed)
    assert found.link.bandwidth * found.link.efficiency == pytest.approx(4e10, rel=0.05)


@pytest.mark.slow
def test_a_noisy_link_stays_plausible() -> None:
    link = fit_link(replace(LINK, bandwidth=1.0), _travelled(LINK, 1.0)).link
    assert 0.0 < link.efficiency <= 1.0
    assert link.latency_s > 0.0
    assert link.half_bytes > 0.0


@pytest.mark.system("S12")
def test_what_is_held_out_is_not_fitted_and_its_error_is_told() -> None:
    """S12: a link is fitted on a sweep; the error at sizes beside it is that of the prediction."""
    timed = _travelled(LINK)
    wrong = [replace(one, seconds=50.0 * one.seconds, fitted=False) for one in timed[::7]]
    found = fit_link(replace(LINK, bandwidth=1.0), [*timed, *wrong])
    assert found.link == fit_link(replace(LINK, bandwidth=1.0), timed).link
    assert len(found.errors) == len(timed) + len(wrong)
    assert max(found.errors[len(timed) :]) < -0.9


NETWORK = Link(name="net", degree=8, bandwidth=2e9, latency_s=5e-5, efficiency=0.7, half_bytes=1e6)


@pytest.mark.parametrize("node", [1, 4])
def test_a_network_is_found_beyond_the_link_of_a_node(node: int) -> None:
    near = (replace(LINK, degree=node),) if node > 1 else ()
    cluster = Cluster(
        name="nodes",
        device=Device(name="any", memory_bytes=1, memory_bandwidth=1.0),
        devices_per_node=node,
        nodes=8 // node,
        links=(*near, NETWORK),
    )
    groups = [(8 // node, node), *([(8, 1)] if node > 1 else [(2, 1), (4, 1)])]
    bare = [
        Travelled(
            collective=Collective(kind=kind, degree=degree, num_bytes=size, stride=stride),
            seconds=1.0,
        )
        for (degree, stride), kind in product(groups, COLLECTIVES)
        for size in (4**n * 1024 for n in range(9))
        if not (kind == "send" and stride < node)
    ]
    seconds = seconds_on_cluster(cluster, bare)
    timed = [replace(one, seconds=float(s)) for one, s in zip(bare, seconds, strict=True)]
    blank = replace(NETWORK, bandwidth=1.0, latency_s=0.0, efficiency=1.0, half_bytes=0.0)
    found = fit_last_tier(replace(cluster, links=(*near, blank)), timed).link
    assert found.bandwidth * found.efficiency == pytest.approx(1.4e9, rel=0.05)
    assert found.latency_s == pytest.approx(5e-5, rel=0.05)
    assert found.half_bytes == pytest.approx(1e6, rel=0.1)
