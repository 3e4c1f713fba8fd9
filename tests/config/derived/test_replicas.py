"""What is derived of local SGD where it is left to us."""

from __future__ import annotations

from pathlib import Path

from echelon.config.load import load_job
from echelon.config.plan_view import plan_settings
from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.plan import Plan
from tests.config.problems import SMALL, write

ISLANDS = ["mesh.dp_replicate=2", "local_sgd.every=50"]


def plan_of(tmp_path: Path, *sets: str) -> Plan:
    return load_job(str(write(tmp_path, SMALL)), sets).plan


def test_without_rounds_the_record_is_that_of_every_plan(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "mesh.dp_replicate=2")
    assert plan.mathematics.local_sgd == LocalSgd()
    assert not plan.mesh.replicas_outermost
    assert not any(key.startswith("local_sgd") for key in plan_settings(plan))


def test_rates_are_those_of_the_outer_optimizer_and_islands_are_replicas(tmp_path: Path) -> None:
    diloco = plan_of(tmp_path, *ISLANDS)
    local = diloco.mathematics.local_sgd
    assert (local.outer, local.outer_learning_rate, local.outer_momentum) == ("nesterov", 0.7, 0.9)
    assert (local.every, local.islands, local.fragments, local.delay) == (50, 2, 1, 0)
    assert diloco.mesh.replicas_outermost
    plain = plan_of(tmp_path, *ISLANDS, "local_sgd.outer=sgd").mathematics.local_sgd
    assert (plain.outer_learning_rate, plain.outer_momentum) == (1.0, 0.0)
    assert Plan.from_json(diloco.to_json()) == diloco


def test_another_number_of_islands_is_other_mathematics(tmp_path: Path) -> None:
    two, three = (plan_of(tmp_path, "local_sgd.every=50", f"mesh.dp_replicate={n}") for n in (2, 3))
    inside = plan_of(tmp_path, *ISLANDS, "mesh.tp=2")
    assert not two.same_mathematics(three)
    assert two.same_mathematics(inside)
