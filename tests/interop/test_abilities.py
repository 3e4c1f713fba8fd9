"""What tools can run: which stages of ZeRO go with which meshes, which schedules with batches."""

from __future__ import annotations

import pytest

from echelon.config.schema import SETTINGS, tables
from echelon.interop.abilities import KeyRule, tool_tables
from echelon.interop.key_reader import KINDS
from echelon.interop.tools import TOOLS, abilities_of_trainer
from echelon.planner.search.pins import limits_of_tool


def test_a_tool_without_rules_runs_every_stage_and_schedule() -> None:
    allows = TOOLS["megatron"].abilities.allows_zero
    mesh = {"dp_replicate": 1, "dp_shard": 2, "pp": 2, "cp": 1, "tp": 2}
    assert all(allows(stage, **mesh) for stage in range(4))
    assert TOOLS["accelerate"].abilities.allows_schedule("1f1b", pp=4, microbatches=3)


def test_an_interleaved_pipeline_has_whole_rounds() -> None:
    allows = TOOLS["megatron"].abilities.allows_schedule
    assert allows("1f1b", pp=4, microbatches=6)
    assert allows("interleaved-1f1b", pp=4, microbatches=8)
    assert not allows("interleaved-1f1b", pp=4, microbatches=6)


def test_limits_are_those_of_pins() -> None:
    limits = limits_of_tool(TOOLS["accelerate"].abilities, experts=False)
    assert (limits["pp"], limits["zero"], limits["offload"]) == ((1,), (3,), (0,))
    assert "schedule" not in limits
    dense, mixture = (
        limits_of_tool(TOOLS["megatron"].abilities, experts=experts) for experts in (False, True)
    )
    assert mixture.keys() - dense.keys() == {"tensor_sequence_parallel"}


@pytest.mark.parametrize("generation", ["megatron", "megatron-core"])
def test_megatron_before_2025_shares_out_optimizer_state_alone(generation: str) -> None:
    older = TOOLS["megatron"].abilities_of(generation)
    assert limits_of_tool(older, experts=False)["zero"] == (0, 1)
    assert "zero" not in limits_of_tool(TOOLS["megatron"].abilities, experts=False)
    # 80 blocks on 4 ranks; 126 with embedding and head on 16, as Llama 3 405B has them.
    assert older.allows_stages(layers=80, stages=20)
    assert older.allows_stages(layers=126, stages=64)
    assert not older.allows_stages(layers=80, stages=12)
    assert TOOLS["megatron"].abilities.allows_stages(layers=80, stages=12)


def test_trainers_without_files_have_abilities_too() -> None:
    assert abilities_of_trainer("fsdp2-compiled") == TOOLS["torchtitan"].abilities_of(
        "fsdp2-compiled"
    )
    assert abilities_of_trainer("echelon") is None
    jax = abilities_of_trainer("jax")
    assert jax is not None
    assert jax.schedules == ("gpipe", "breadth-first")
    assert jax.allows_schedule("gpipe", pp=4, microbatches=8)
    assert not jax.allows_schedule("gpipe", pp=4, microbatches=6)
    assert not jax.allows_stages(layers=80, stages=12)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_rule_has_a_reason_and_at_most_one_condition(tool: str) -> None:
    for group, rules in tool_tables(tool).keys.items():
        for key, rule in rules.items():
            conditions = (
                bool(rule.takes or rule.to),
                rule.only is not None,
                bool(rule.switch),
                rule.refused,
            )
            assert rule.why, (group, key)
            assert sum(conditions) <= 1, (group, key)
            assert rule.takes == "" or rule.takes in KINDS
            assert bool(rule.to) == bool(rule.to and (rule.takes or rule.words)), (group, key)
            assert rule.to == "" or rule.to in SETTINGS
            assert rule.setting == "" or rule.setting in SETTINGS


@pytest.mark.parametrize("tool", TOOLS)
def test_reasons_are_about_settings_or_tables_of_them(tool: str) -> None:
    found = tool_tables(tool)
    known = {*SETTINGS, *tables(), *(name.partition(".")[0] for name in tables())}
    for reasons in (found.elsewhere, found.speed, found.reasons):
        assert reasons.keys() <= known
        assert all(reasons.values())
    assert not found.elsewhere.keys() & found.speed.keys()


def test_forms_of_rules() -> None:
    rules = tool_tables("megatron").keys["rest"]
    assert rules["--master-port"] == KeyRule(why="torchrun says it")
    assert rules["--rotary-percent"] == KeyRule(why="all of a head is turned", only=[1, 1.0])
    assert rules["--finetune"].refused
    assert tool_tables("deepspeed").keys["tables"]["amp"].switch == "enabled"
    assert tool_tables("deepspeed").sections[0] == "zero_optimization"
