"""Constants of a trainer are found again from the steps that they make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.api.calibrating.measuring import SPLITS, plan_of_split
from echelon.config.load import load_job
from echelon.core.cluster import Cluster
from echelon.cost.fit.trainer import TimedStep, fit_trainer, plan_label, predicted_steps
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
