"""What tools can run: which stages of ZeRO go with which meshes, which schedules with batches."""

from __future__ import annotations

from echelon.interop.tools import TOOLS
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
