"""Constants of a trainer are found again from the steps that they make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.api.calibrating.measuring import SPLITS, plan_of_split
from echelon.config.load import load_job
from echelon.core.cluster import Cluster
from echelon.core.plan import Plan
from echelon.cost.fit.runs import (
    GroupCollective,
    ObservedTime,
    StageAction,
    TimedStep,
    fit_run,
    fit_trainer,
    plan_label,
    predicted_seconds,
    predicted_steps,
)
from echelon.cost.fit.samples import Collective
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.trainers import our_constants
from echelon.planner.predict.estimate import estimate_from_inputs, estimate_plan

TRUE = {
    "host_s": 2e-5,
    "width_bytes": 120.0,
    "inner_bytes": 30.0,
    "logit_bytes": 60.0,
    "optimizer_bytes": 60.0,
    "step_s": 0.01,
    "own_hops": 0.3,
    "pair_hops": 0.6,
    "adding_bytes": 12.0,
}


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """Return four ranks that share two cores."""
    made = load_job("nano", ['cluster.preset="4xcpu"', "mesh.dp_replicate=4"]).plan.cluster
    device = replace(made.device, cores=2.0)
    return replace(made, device=device, trainer=tuple(TRUE.items()))


@pytest.mark.slow
def test_constants_are_found_by_the_steps_that_they_make(cluster: Cluster) -> None:
    software = our_constants(replace(cluster, trainer=()))
    plans = [plan_of_split(split, cluster) for split in SPLITS[::3]]
    blank = [TimedStep(plan=plan, seconds=1.0) for plan in plans]
    seconds = predicted_steps(cluster, software, blank)
    timed = [TimedStep(plan=p, seconds=float(s)) for p, s in zip(plans, seconds, strict=True)]
    found = fit_trainer(replace(cluster, trainer=()), software, timed)
    assert max(map(abs, found.errors)) < 0.08  # Priors pull a little.
    assert {name for name, _ in found.cluster.trainer} == set(TRUE)
    before = predicted_steps(replace(cluster, trainer=()), software, timed) / seconds - 1.0
    assert max(map(abs, before)) > 3.0 * max(map(abs, found.errors))


def test_an_estimate_reads_what_was_measured_of_the_trainer(cluster: Cluster) -> None:
    plan = plan_of_split(SPLITS[0], cluster)
    usual = replace(plan, cluster=replace(plan.cluster, trainer=()))
    assert estimate_plan(plan).inputs.software.width_bytes == 120.0
    assert estimate_plan(plan).seconds["memory"] > estimate_plan(usual).seconds["memory"]
    # On processors what the host does is time of the device.
    assert estimate_plan(usual).seconds["host"] > 0.0


def test_cores_that_wait_are_used_by_other_ranks(cluster: Cluster) -> None:
    split = next(one for one in SPLITS if one[1].get("mesh.pp") == 4)
    shared = plan_of_split(split, cluster)
    assert plan_label(shared) == "pp4 1f1b b1"
    alone = replace(shared, cluster=replace(cluster, device=replace(cluster.device, cores=0.0)))
    ours, theirs = (
        estimate_from_inputs(cost_inputs_from_plan(p), p.mathematics, p.cluster).seconds
        for p in (shared, alone)
    )
    assert ours["matmul"] == pytest.approx(2.0 * theirs["matmul"])
    assert theirs["bubble"] > 0.0
    assert ours["bubble"] < theirs["bubble"]
    whole = ("matmul", "attention", "memory", "host", "head", "bubble")
    spent = sum(ours[name] for name in whole)
    assert sum(theirs[name] for name in whole) <= spent <= 2.0 * sum(theirs[n] for n in whole)


@pytest.mark.slow
def test_what_is_held_out_is_not_fitted_and_its_error_is_told(cluster: Cluster) -> None:
    software = our_constants(replace(cluster, trainer=()))
    plans = [plan_of_split(split, cluster) for split in (SPLITS[0], SPLITS[2])]
    blank = [TimedStep(plan=plan, seconds=1.0) for plan in plans]
    seconds = predicted_steps(cluster, software, blank)
    timed = [TimedStep(plan=p, seconds=float(s)) for p, s in zip(plans, seconds, strict=True)]
    wrong = replace(timed[0], seconds=100.0 * timed[0].seconds, fitted=False)
    found, without = (fit_trainer(cluster, software, some) for some in ([*timed, wrong], timed))
    assert found.cluster == without.cluster
    assert found.errors[:2] == without.errors
    assert found.errors[2] < -0.9


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
