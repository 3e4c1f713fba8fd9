"""The buckets of any module: which parameters share one, by stage, size and use."""

from __future__ import annotations

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan, Zero
from echelon.layout.module_buckets import ROOT, ModuleParameter, plan_module_buckets
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
