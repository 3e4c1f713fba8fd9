"""A plan as settings gives the plan again; what is left out takes what lost its meaning with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.proof.bisect.bisect import BisectedSettings, num_microbatches, parts_of, smaller_runs

SPLIT = [
    *("mesh.pp=2", "mesh.tp=2", "mesh.dp_shard=2", "mesh.sequence_parallel=true", "zero.stage=1"),
    *("pipeline.schedule=interleaved-1f1b", "pipeline.virtual_stages=2", "model.layers=8"),
]
SPARSE = [
    *("model.experts.num_experts=4", "model.experts.top_k=2", "model.experts.ffn=32"),
    *("mesh.dp_shard=2", "mesh.ep=2", "mesh.cp=2", "zero.stage=1", "experts.balance=aux"),
]


def plan_of(*settings: str) -> Plan:
    return load_job("nano", settings).plan


@pytest.mark.parametrize("settings", [[], SPLIT, SPARSE, ["mesh.cp=4", "context.kind=ulysses"]])
def test_settings_of_a_plan_give_it_again(settings: list[str]) -> None:
    plan = plan_of(*settings)
    run = BisectedSettings(plan)
    again, values = run.plan(run.values)
    assert replace(again, name=plan.name) == plan
    assert run.plan(values)[1] == values


def test_a_schedule_that_is_written_out_travels_beside_the_run() -> None:
    plan = plan_of("mesh.pp=2", "pipeline.schedule=auto")
    run = BisectedSettings(plan)
    assert set(run.files(run.values)) == {"run.toml", "cluster.toml", "schedule.csv"}
    assert run.plan(run.values)[0].layout.pipeline.rows == plan.layout.pipeline.rows


def test_an_axis_goes_with_what_it_gives_a_meaning_to() -> None:
    run = BisectedSettings(plan_of(*SPLIT))
    parts = {part.name: part for part in parts_of(run.values)}
    without = parts["mesh.tp = 2"].without(run.values)
    assert not {"mesh.tp", "mesh.sequence_parallel"} & set(without)
    plan, _ = run.plan(parts["mesh.pp = 2"].without(run.values))
    assert (plan.mesh.pp, plan.layout.pipeline.schedule) == (1, "1f1b")


def test_what_has_no_effect_any_more_is_left_out_too() -> None:
    run = BisectedSettings(plan_of(*SPARSE))
    parts = {part.name: part for part in parts_of(run.values)}
    plan, values = run.plan(parts["model.experts"].without(run.values))
    assert plan.model.experts is None
    assert not any("experts" in key or key == "mesh.ep" for key in values)


def test_data_ranks_go_and_their_microbatches_stay() -> None:
    run = BisectedSettings(plan_of(*SPLIT))
    parts = {part.name: part for part in parts_of(run.values)}
    without = parts["mesh.dp_shard = 2"].without(run.values)
    assert num_microbatches(without) == num_microbatches(run.values) == 4


def test_smaller_runs_are_halves() -> None:
    run = BisectedSettings(plan_of("mesh.dp_replicate=4", "batch.global_sequences=16"))
    found = [run.plan(values)[0] for values in smaller_runs(run.values)]
    shapes = {(one.mesh.dp, one.model.layers, one.num_microbatches) for one in found}
    assert shapes == {(2, 4, 2), (4, 1, 2), (4, 2, 2), (4, 4, 1), (4, 4, 2)}
