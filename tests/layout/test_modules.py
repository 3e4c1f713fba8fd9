"""The buckets of any module: which parameters share one, by stage, size and use."""

from __future__ import annotations

import pytest

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan, Zero
from echelon.layout.modules import (
    ROOT,
    ModuleParameter,
    StagedParameter,
    TensorPiece,
    plan_module_buckets,
    plan_stage_buckets,
)
from tests.parallel.layouts import plan_of

UNITS = ("first", "second", "third", ROOT)


def one(name: str, numel: int, *users: str, trained: bool = True) -> ModuleParameter:
    spec = ParameterSpec(name=name, shape=(numel,), layer=None, split_dim=None)
    return ModuleParameter(spec=spec, users=users, trained=trained)


PARAMETERS = (
    one("table", 40, ROOT),
    one("a.weight", 30, "first"),
    one("a.bias", 3, "first"),
    one("b.weight", 30, "second"),
    one("c.weight", 30, "third"),
    one("c.frozen", 33, "third", trained=False),
    one("end", 20, ROOT),
)


def names(plan: Plan) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    found = plan_module_buckets(plan, PARAMETERS, UNITS)
    return [b.names for b in found.trained], [b.names for b in found.frozen]


def test_at_stage_3_a_unit_is_a_bucket_and_small_ones_stay_whole() -> None:
    plan = plan_of(dp_shard=4, zero=Zero(stage=3, keep_whole_below=10))
    found = plan_module_buckets(plan, PARAMETERS, UNITS)
    trained, frozen = names(plan)
    # The two ends of the root are apart: backward needs one first, and the other last.
    assert trained == [
        ("end",), ("c.weight",), ("b.weight",), ("a.weight",), ("table",), ("a.bias",)
    ]  # fmt: skip
    assert frozen == [("c.frozen",)]
    assert [bucket.sliced for bucket in found.trained] == [True] * 5 + [False]
    assert found.sliced == (*found.trained[:5], *found.frozen)
    assert [bucket.num_elements for bucket in found.trained] == [20, 32, 32, 32, 40, 4]
    assert found.frozen[0].num_elements == 36
    assert found.trained[1].units == ("third",)


def test_units_go_together_by_their_order() -> None:
    zero = Zero(stage=3, keep_whole_below=0, unit_blocks=2)
    trained, _ = names(plan_of(dp_shard=2, zero=zero))
    assert ("a.weight", "a.bias", "b.weight") in trained
    assert ("c.weight",) in trained


def test_below_stage_3_buckets_are_filled_from_the_end_and_what_is_frozen_has_none() -> None:
    # Of 8-byte gradients: fifty elements fill a bucket.
    trained, frozen = names(plan_of(dp=2, bucket_bytes=400))
    assert trained == [("c.weight", "end"), ("a.weight", "a.bias", "b.weight"), ("table",)]
    assert not frozen


def test_what_two_units_use_is_of_both() -> None:
    shared = (*PARAMETERS, one("tied", 12, "first", "third"))
    plan = plan_of(dp_shard=2, zero=Zero(stage=3, keep_whole_below=0))
    found = plan_module_buckets(plan, shared, UNITS)
    assert next(b.units for b in found.trained if "tied" in b.names) == ("first", "third")


STAGE_UNITS = ["blocks.0", "blocks.1", ROOT]


def parameter(name: str, *stages: int, trained: bool = True) -> StagedParameter:
    """Return a parameter of ten elements."""
    unit = name.rpartition(".")[0]
    users = (unit if unit in STAGE_UNITS else ROOT,)
    spec = ParameterSpec(name=name, shape=(10,), layer=None)
    return StagedParameter(
        parameter=ModuleParameter(spec=spec, users=users, trained=trained), stages=stages
    )


STAGE_PARAMETERS = [
    parameter("embed", 0, 1),
    parameter("blocks.0.weight", 0),
    parameter("blocks.1.weight", 1),
    parameter("table", 1, trained=False),
    parameter("norm", 1),
]


def test_what_both_ends_share_has_a_bucket_of_its_own() -> None:
    plan = plan_of(pp=2)
    first = plan_stage_buckets(plan, STAGE_PARAMETERS, STAGE_UNITS, [0]).trained
    last = plan_stage_buckets(plan, STAGE_PARAMETERS, STAGE_UNITS, [1]).trained
    assert [(one.name, one.kind, one.names, one.stages) for one in first] == [
        ("bucket0", "whole", ("blocks.0.weight",), (0,)),
        ("bucket1", "tied", ("embed",), (0,)),
    ]
    assert [(one.kind, one.names) for one in last] == [
        ("whole", ("blocks.1.weight", "norm")),
        ("tied", ("embed",)),
    ]


def test_one_rank_with_both_ends_shares_with_nobody() -> None:
    found = plan_stage_buckets(plan_of(pp=2), STAGE_PARAMETERS, STAGE_UNITS, [0, 1]).trained
    assert [(one.kind, one.stages) for one in found] == [
        ("whole", (1,)),
        ("whole", (0,)),
        ("whole", (0, 1)),
    ]


def test_slices_are_cut_by_block_and_frozen_ones_too() -> None:
    plan = plan_of(pp=2, dp_shard=2, zero=Zero(stage=3))
    found = plan_stage_buckets(plan, STAGE_PARAMETERS, STAGE_UNITS, [1])
    assert [one.names for one in found.trained] == [("norm",), ("blocks.1.weight",), ("embed",)]
    assert [one.names for one in found.frozen] == [("table",)]
    assert all(one.sliced for one in (*found.trained, *found.frozen))
    assert found.frozen[0].name == "frozen0"


@pytest.mark.parametrize(("parts", "degree"), [((37,), 2), ((37,), 4), ((8, 4, 4), 4), ((6, 6), 3)])
def test_ranges_cover_everything_once(parts: tuple[int, ...], degree: int) -> None:
    piece = TensorPiece(name="w", shape=(3, sum(parts)), dim=1, parts=parts)
    seen = [
        place
        for index in range(degree)
        for first, last in piece.ranges(degree, index)
        for place in range(first, last)
    ]
    assert sorted(seen) == list(range(sum(parts)))
    assert piece.local_shape(degree) == (3, sum(-(-part // degree) for part in parts))
    assert piece.numel == 3 * sum(parts)
