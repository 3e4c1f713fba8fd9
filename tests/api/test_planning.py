"""A plan is that of the run with settings on top; every mistake is in the error."""

from __future__ import annotations

import pytest

import echelon as ec
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.launch.local.rank_processes import RankProcesses


def test_a_plan_is_that_of_the_run_with_settings_on_top() -> None:
    plan = ec.plan("nano", settings=["mesh.tp=2"])
    assert plan == load_job("nano", ["mesh.tp=2"]).plan
    assert isinstance(plan, ec.Plan)
    assert ec.plan("nano", cluster="8xh100").cluster.backend == "nccl"


def test_every_mistake_is_in_the_error() -> None:
    with pytest.raises(ec.EchelonError) as caught:
        ec.plan("nano", settings=["mesh.tp=3", "mesh.pp=9"])
    assert {"tp-divides-heads", "layers-fill-stages"} <= set(caught.value.rules)


def test_a_plan_is_proven() -> None:
    proof = ec.prove(ec.plan("nano", settings=["mesh.dp_replicate=2"]))
    assert proof.proven
    assert proof.mesh == "dp2"
    assert proof.independent is None


def test_the_one_process_is_proven_too() -> None:
    proof = ec.prove(ec.plan("nano"), independent=True)
    assert proof.proven
    assert proof.independent is not None
    assert proof.independent.holds


def test_nothing_is_started_for_an_engine_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[RankProcesses] = []
    monkeypatch.setattr(RankProcesses, "begin", started.append)
    with pytest.raises(ConfigError, match="prove-subject"):
        ec.prove(ec.plan("nano"), subject="tests.cli.absent:build")
    assert started == []
