"""What a run did moves the constants of its cluster: those that it shows, as far as it shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.cluster import Cluster
from echelon.core.plan import Plan
from echelon.cost.fit.run import (
    GroupCollective,
    ObservedTime,
    StageAction,
    fit_run,
    predicted_seconds,
)
from echelon.cost.fit.samples import Collective

SIZES = (2**12, 2**16, 2**20, 2**24)


def _plan() -> Plan:
    sets = ["cluster.preset=8xcpu-core", "mesh.pp=2", "mesh.tp=2", "pipeline.schedule=1f1b"]
    return load_job("nano", sets).plan


def _slower(cluster: Cluster, matmul: float, latency_s: float) -> Cluster:
    efficiency = replace(cluster.device.efficiency, matmul=matmul)
    (link,) = cluster.links
    return replace(
        cluster,
        device=replace(cluster.device, efficiency=efficiency),
        links=(replace(link, latency_s=latency_s),),
    )


def _observed(plan: Plan, cluster: Cluster) -> list[ObservedTime]:
    whats = [StageAction(kind=kind, stage=stage) for kind in ("F", "BW") for stage in (0, 1)]
    travels = [
        GroupCollective(
            collective=Collective(kind="all_reduce", degree=2, num_bytes=size), stride=1, axis="tp"
        )
        for size in SIZES
    ]
    bare = [ObservedTime(operation=what, seconds=1.0, count=9) for what in (*whats, *travels)]
    seconds = predicted_seconds(plan, cluster, bare)
    return [replace(one, seconds=float(s)) for one, s in zip(bare, seconds, strict=True)]


def test_a_run_on_its_own_cluster_changes_nothing() -> None:
    plan = _plan()
    found = fit_run(plan, _observed(plan, plan.cluster))
    assert max(map(abs, found.before)) < 1e-9
    assert max(map(abs, found.after)) < 1e-3
    before, after = plan.cluster.device.efficiency, found.cluster.device.efficiency
    assert after.matmul == pytest.approx(before.matmul, rel=0.01)
    assert found.cluster.links[0].latency_s == pytest.approx(2e-4, rel=0.01)


def test_slower_products_and_links_are_found() -> None:
    plan = _plan()
    slower = _slower(plan.cluster, matmul=0.3, latency_s=9e-4)
    found = fit_run(plan, _observed(plan, slower))
    assert max(map(abs, found.before)) > 0.3
    assert max(map(abs, found.after)) < 0.1
    assert found.cluster.device.efficiency.matmul == pytest.approx(0.3, rel=0.25)
    assert found.cluster.links[0].latency_s == pytest.approx(9e-4, rel=0.15)
    unseen = plan.cluster.device.efficiency
    assert found.cluster.device.efficiency.optimizer == unseen.optimizer


def test_what_is_seen_has_a_name() -> None:
    plan = _plan()
    names = [one.name for one in _observed(plan, plan.cluster)]
    assert names[0] == "F of stage 0"
    assert names[-1] == "tp all_reduce 2 ranks 16 MiB"
