"""Which parameters of a module are in which bucket of a pipeline rank."""

from __future__ import annotations

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Zero
from echelon.layout.module_buckets import ROOT, ModuleParameter
from echelon.layout.modules.stages import StagedParameter, plan_stage_buckets
from tests.parallel.layouts import plan_of

UNITS = ["blocks.0", "blocks.1", ROOT]


def parameter(name: str, *stages: int, trained: bool = True) -> StagedParameter:
    """Return a parameter of ten elements."""
    unit = name.rpartition(".")[0]
    users = (unit if unit in UNITS else ROOT,)
    spec = ParameterSpec(name=name, shape=(10,), layer=None)
    return StagedParameter(
        parameter=ModuleParameter(spec=spec, users=users, trained=trained), stages=stages
    )


PARAMETERS = [
    parameter("embed", 0, 1),
    parameter("blocks.0.weight", 0),
    parameter("blocks.1.weight", 1),
    parameter("table", 1, trained=False),
    parameter("norm", 1),
]


def test_what_both_ends_share_has_a_bucket_of_its_own() -> None:
    plan = plan_of(pp=2)
    first = plan_stage_buckets(plan, PARAMETERS, UNITS, [0]).trained
    last = plan_stage_buckets(plan, PARAMETERS, UNITS, [1]).trained
    assert [(one.name, one.kind, one.names, one.stages) for one in first] == [
        ("bucket0", "whole", ("blocks.0.weight",), (0,)),
        ("bucket1", "tied", ("embed",), (0,)),
    ]
    assert [(one.kind, one.names) for one in last] == [
        ("whole", ("blocks.1.weight", "norm")),
        ("tied", ("embed",)),
    ]


def test_one_rank_with_both_ends_shares_with_nobody() -> None:
    found = plan_stage_buckets(plan_of(pp=2), PARAMETERS, UNITS, [0, 1]).trained
    assert [(one.kind, one.stages) for one in found] == [
        ("whole", (1,)),
        ("whole", (0,)),
        ("whole", (0, 1)),
    ]


def test_slices_are_cut_by_block_and_frozen_ones_too() -> None:
    plan = plan_of(pp=2, dp_shard=2, zero=Zero(stage=3))
    found = plan_stage_buckets(plan, PARAMETERS, UNITS, [1])
    assert [one.names for one in found.trained] == [("norm",), ("blocks.1.weight",), ("embed",)]
    assert [one.names for one in found.frozen] == [("table",)]
    assert all(one.sliced for one in (*found.trained, *found.frozen))
    assert found.frozen[0].name == "frozen0"
