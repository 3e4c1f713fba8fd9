"""Which modules are units, in what order they are gathered, and how their buckets are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from echelon.core.plan import Zero
from echelon.layout.module_buckets import ROOT, plan_module_buckets
from echelon.parallel.module.module import apply_to_module
from echelon.parallel.module.units import find_units, users_of
from tests.parallel.layouts import plan_of
from tests.parallel.module.models import Block, make

STAGE_3 = Zero(stage=3)


def names(model: nn.Module, choice: Any) -> list[str]:
    """Return the names of the units of a choice."""
    return list(find_units(model, choice, needed=True))


def test_the_largest_list_of_one_class_is_the_blocks() -> None:
    blocks = [f"blocks.{index}" for index in range(4)]
    assert names(make("transformer"), "blocks") == blocks
    assert names(make("convolutions"), "blocks") == ["stages.0", "stages.1", "stages.2"]
    assert names(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "blocks") == ["0", "1"]


def test_units_by_class_size_and_name_come_in_the_order_of_the_module() -> None:
    model = make("transformer")
    assert names(model, Block) == names(model, "blocks")
    assert names(model, ["head", "blocks.2", "blocks.0"]) == ["blocks.0", "blocks.2", "head"]
    every = names(model, (nn.LayerNorm, nn.Embedding))
    assert every == ["embedding", *(f"blocks.{i}.norm" for i in range(4)), "norm"]
    # What a smaller unit has taken does not count for the one around it: FSDP's policy.
    assert names(model, 430)[:3] == ["blocks.0.qkv", "blocks.0.mlp", "blocks.1.qkv"]
    assert names(model, 1000) == names(model, "blocks")


def test_a_shared_parameter_belongs_to_all_who_use_it() -> None:
    model = make("nested")
    users = users_of(model, find_units(model, ["first", "last", "outer.0.inner"], needed=True))
    assert users["first.weight"] == ("first", "last")
    assert users["first.bias"] == ("first",)
    assert users["outer.0.inner.size"] == ("outer.0.inner",)
    assert users["outer.0.after.weight"] == (ROOT,)


def test_a_module_in_two_places_is_one_unit() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Linear(3, 3), shared)
    units = find_units(model, nn.Linear, needed=True)
    assert list(units) == ["0", "1"]
    assert users_of(model, units)["0.weight"] == ("0",)


def buckets(
    model: str, zero: Zero, **changes: Any
) -> list[tuple[list[str], tuple[str, ...], bool]]:
    """Return names, units and slicing of the buckets of a module on one rank."""
    split = apply_to_module(plan_of(zero=zero, **changes), make(model))
    return [
        (list(bucket.names), bucket.units, bucket.sliced)
        for bucket in (*split.plans.trained, *split.plans.frozen)
    ]


def test_buckets_at_stage_3_are_units_and_the_two_ends_of_the_root() -> None:
    found = buckets("transformer", STAGE_3)
    assert [units for _, units, _ in found] == [
        (ROOT,),
        *((f"blocks.{index}",) for index in (3, 2, 1, 0)),
        (ROOT,),
        (ROOT,),
    ]
    assert [found[0][0], found[5][0], found[6][0]] == [
        ["norm.weight", "norm.bias"],
        ["embedding.weight"],
        ["positions"],
    ]
    assert all(sliced for _, _, sliced in found)


def test_small_parameters_are_whole_and_units_go_together() -> None:
    # Every bias and norm has fewer elements than 40; the frozen table of positions has 72.
    found = buckets("frozen block", replace(STAGE_3, keep_whole_below=40, unit_blocks=2))
    whole = [names for names, _, sliced in found if not sliced]
    assert len(whole) == 1
    assert {"norm.weight", "blocks.0.scale", "blocks.3.mlp.0.bias"} <= set(whole[0])
    assert [units for _, units, sliced in found if sliced] == [
        ("blocks.2", "blocks.3"),
        ("blocks.0",),
        (ROOT,),
        ("blocks.1",),
        (ROOT,),
    ]


def test_buckets_below_stage_3_are_filled_from_the_last_parameter() -> None:
    found = buckets("transformer", Zero(), bucket_bytes=4000)
    assert [name for names, _, _ in found[::-1] for name in names] == [
        name for name, one in make("transformer").named_parameters() if one.requires_grad
    ]
    assert all(not sliced for _, _, sliced in found)
    sizes = {name: one.numel() for name, one in make("transformer").named_parameters()}
    for filled, _, _ in found[:-1]:
        assert sum(sizes[name] for name in filled) >= 500
        assert sum(sizes[name] for name in filled[1:]) < 500


def test_padding_makes_slices_of_slices_equal() -> None:
    split = apply_to_module(plan_of(), make("transformer"))
    wide = plan_of(zero=STAGE_3, dp=2, dp_shard=3)
    planned = plan_module_buckets(wide, split.parameters, split.units)
    shapes = dict(make("transformer").named_parameters())
    for bucket in (*planned.trained, *planned.frozen):
        real = sum(shapes[name].numel() for name in bucket.names)
        assert bucket.num_elements % 6 == 0
        assert real <= bucket.num_elements < real + 6
