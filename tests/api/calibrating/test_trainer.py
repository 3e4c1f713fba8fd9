"""Each split of the measurement is a plan of its own; the slowest rank's step counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from echelon.api.calibrating.trainer import (
    DP,
    NARROW,
    PP,
    QUICK,
    SPLITS,
    TP,
    measure_trainer,
    plan_of_split,
    step_s,
)
from echelon.config.load import load_job
from echelon.core.cluster import Cluster
from echelon.cost.fit.trainer import TimedStep
from echelon.launch.local.pool import RankPool

CLUSTER = load_job("nano", ["cluster.preset=8xcpu-core", "mesh.pp=1"]).plan.cluster


class _Pool:
    """Stand for ranks: each of them says how long it took, and what it was asked is kept."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def run(self, target: object, job: Any, ranks: int) -> list[float]:
        self.asked.append(job)
        return [0.001 * (rank + 1) for rank in range(ranks)]


@pytest.mark.parametrize("split", SPLITS[::5])
def test_a_split_is_a_plan_on_as_many_devices_as_it_has_ranks(split: Any) -> None:
    plan, (model, layout) = plan_of_split(split, CLUSTER), split
    assert plan.model.hidden == model["model.hidden"]
    assert plan.layout.microbatch_sequences == layout["batch.microbatch_sequences"]
    assert (plan.mesh.tp, plan.mesh.dp_shard) == (layout.get(TP, 1), layout.get(DP, 1))
    assert plan.mesh.world_size == plan.cluster.num_devices


def test_a_step_is_that_of_the_slowest_rank() -> None:
    pool = _Pool()
    plan = plan_of_split((NARROW, {PP: 2, "batch.microbatch_sequences": 2}), CLUSTER)
    assert step_s(cast(RankPool, pool), plan, warmup=1, steps=3) == pytest.approx(0.002)
    assert (pool.asked[0].plan, pool.asked[0].warmup, pool.asked[0].steps) == (plan, 1, 3)


def test_only_plans_that_fit_the_machine_are_measured_and_each_by_its_median(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fitted(cluster: Cluster, _: object, timed: Sequence[TimedStep]) -> object:
        return cluster, [step.seconds for step in timed]

    monkeypatch.setattr("echelon.api.calibrating.trainer.fit_trainer", fitted)
    pool, said = _Pool(), list[str]()
    one = load_job("nano", ["cluster.preset=1xcpu-core", "mesh.pp=1"]).plan.cluster
    wanted = replace(QUICK, rounds=3)
    assert measure_trainer(cast(RankPool, pool), one, wanted, said.append) == (one, [0.001])
    assert said == ["measuring steps of 1 plans on 1 to 1 ranks"]
    assert len(pool.asked) == 3
