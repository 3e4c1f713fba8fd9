"""What training takes: a plan is a job of as many steps as its schedule has; what a run writes."""

from __future__ import annotations

import pytest

import echelon as ec
from echelon.api.given_plan import job_of_plan
from echelon.api.training import launched_world_size
from echelon.core.errors import EnvironmentProblem


def test_a_plan_trains_for_the_steps_of_its_schedule() -> None:
    plan = ec.plan("nano", settings=["train.steps=401", "optimizer.warmup_steps=0"])
    job = job_of_plan(plan, "/some/text")
    assert (job.plan, job.train.steps, job.train.run_name) == (plan, 401, plan.name)
    # 200 lines at most.
    assert job.observe.log_every == 5
    assert job.data.source == "/some/text"


def test_a_plan_is_resolved_and_takes_no_settings() -> None:
    with pytest.raises(TypeError, match="settings belong to"):
        ec.train(ec.plan("nano"), settings=["mesh.tp=2"])


def test_ranks_are_those_of_a_launcher_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert launched_world_size() is None
    for name, value in zip(names, ("3", "4", "3", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert launched_world_size() == 4


def test_torchrun_cannot_go_on_without_a_lost_island(monkeypatch: pytest.MonkeyPatch) -> None:
    """B06: it ends all of its processes; refused before the ranks meet."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("1", "2", "1", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    islands = ("mesh.dp_replicate=2", "local_sgd.every=50", "local_sgd.min_islands=1")
    with pytest.raises(EnvironmentProblem) as refused:
        ec.train("nano", settings=[*islands, 'train.validate_every="never"'])
    assert refused.value.rules == ("lost-islands-need-our-launcher",)
