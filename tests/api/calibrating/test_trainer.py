"""Each split of the measurement is a plan of its own; the slowest rank's step counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from echelon.api.calibrating.measuring import (
    DP,
    HELD_OUT_SPLITS,
    NARROW,
    PP,
    QUICK,
    SPLITS,
    TP,
    measure_trainer,
    plan_of_split,
    step_s,
)
from echelon.config.files.measurements import UnfinishedMeasurements, unfinished_measurements
from echelon.config.load import load_job
from echelon.core.cluster import Cluster
from echelon.cost.fit.runs import TimedStep, plan_label

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
    assert step_s(cast(Any, pool), plan, warmup=1, steps=3) == pytest.approx(0.002)
    assert (pool.asked[0].plan, pool.asked[0].warmup, pool.asked[0].steps) == (plan, 1, 3)


@pytest.fixture
def done(tmp_path: Path) -> Iterator[UnfinishedMeasurements]:
    with unfinished_measurements(tmp_path / "cluster.toml", {}) as measurements:
        yield measurements


def _note_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fit return what it is given."""

    def fitted(cluster: Cluster, _: object, timed: Sequence[TimedStep]) -> object:
        return cluster, [(step.seconds, step.fitted) for step in timed]

    monkeypatch.setattr("echelon.api.calibrating.measuring.fit_trainer", fitted)


ONE = load_job("nano", ["cluster.preset=1xcpu-core", "mesh.pp=1"]).plan.cluster
WANTED = replace(QUICK, rounds=3)


def test_only_plans_that_fit_the_machine_are_measured_and_each_by_its_median(
    monkeypatch: pytest.MonkeyPatch, done: UnfinishedMeasurements
) -> None:
    _note_fit(monkeypatch)
    pool, said = _Pool(), list[str]()
    found = measure_trainer(cast(Any, pool), ONE, WANTED, done, said.append)
    assert found == (ONE, [(0.001, True), (0.001, False)])
    assert said == ["measuring steps of 2 plans on 1 to 1 ranks"]
    assert len(pool.asked) == 6


def test_steps_that_were_taken_before_are_not_taken_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _note_fit(monkeypatch)
    first, second, said = _Pool(), _Pool(), list[str]()

    def interrupted(target: object, job: Any, ranks: int) -> list[float]:
        if len(first.asked) == 4:
            raise KeyboardInterrupt
        first.asked.append(job)
        return [0.5]

    with unfinished_measurements(tmp_path / "cluster.toml", {}) as done:
        monkeypatch.setattr(first, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure_trainer(cast(Any, first), ONE, WANTED, done)
    with unfinished_measurements(tmp_path / "cluster.toml", {}) as done:
        assert len(done.found) == 4
        found = measure_trainer(cast(Any, second), ONE, WANTED, done, said.append)
    # Of three rounds of each plan two were there.
    assert found == (ONE, [(0.5, True), (0.5, False)])
    assert len(second.asked) == 2
    assert said == ["measuring steps of 2 plans on 1 to 1 ranks that are still missing"]


def test_every_split_has_a_name_of_its_own_and_held_out_ones_another_model() -> None:
    plans = [plan_of_split(split, CLUSTER) for split in (*SPLITS, *HELD_OUT_SPLITS)]
    names = {(plan_label(plan), plan.model.hidden) for plan in plans}
    assert len(names) == len(plans)
    widths = {plan.model.hidden for plan in plans[: len(SPLITS)]}
    assert {plan.model.hidden for plan in plans[len(SPLITS) :]}.isdisjoint(widths)
