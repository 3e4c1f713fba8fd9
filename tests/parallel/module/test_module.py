"""Any module under a plan: what it computes, what it sends, and what is whole when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from echelon.core.plan import Precision, Zero
from echelon.launch.local.supervisor import RankPool
from echelon.layout.modules import ROOT, plan_module_buckets
from echelon.parallel.module.module import apply_to_module, find_units, users_of
from tests.parallel.layouts import plan_of
from tests.parallel.module import targets
from tests.parallel.module.loops import (
    ADAMW,
    BLOCKS,
    SLICES,
    STAGES,
    WHOLE,
    assert_as_on_one_device,
    plan,
    run,
)
from tests.parallel.module.models import Block, make
from tests.parallel.module.sent_bytes import module_bytes
from tests.parallel.module.targets import Loop

SGD = replace(ADAMW, kind="sgd", momentum=0.9)
NESTED = ["outer.0", "outer.0.inner", "outer.1", "outer.1.inner", "twice", "first", "last"]

STAGE_3 = Zero(stage=3)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize(
    "model", ["transformer", "frozen block", "convolutions", "nested", "checkpointed"]
)
def test_a_module_trains_as_on_one_device(rank_pool: RankPool, model: str, zero: Zero) -> None:
    units = NESTED if model == "nested" else "blocks"
    loop = Loop(plan=plan(zero), model=model, units=units, microbatches=2)
    assert_as_on_one_device(run(rank_pool, loop), loop)


@pytest.mark.system("B04")
@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("zero", "mesh"),
    [
        (Zero(), {"dp": 4}),
        (Zero(stage=1), {"dp_shard": 4}),
        (Zero(stage=2, accumulate="slices"), {"dp": 2, "dp_shard": 2}),
        (Zero(stage=1), {"dp": 2, "dp_shard": 2}),
        (SLICES, {"dp": 2, "dp_shard": 2}),
        (WHOLE, {"dp": 2, "dp_shard": 2}),
        (SLICES, {"dp_shard": 4}),
    ],
)
def test_four_ranks_and_replicas_of_slices(
    rank_pool: RankPool, zero: Zero, mesh: dict[str, int]
) -> None:
    loop = Loop(plan=plan(zero, optimizer=SGD, **mesh), microbatches=3, gradients="sum")
    assert_as_on_one_device(run(rank_pool, loop), loop)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("zero", [SLICES, WHOLE])
def test_branches_of_replicas_of_slices(rank_pool: RankPool, zero: Zero) -> None:
    skips = {(1, 0): (0, 9), (1, 3): (7, 8, 9), (2, 1): (1, 3, 4, 5, 6), (2, 2): tuple(range(10))}
    loop = Loop(
        plan=plan(zero, dp=2, dp_shard=2),
        model="deep",
        unused="zero",
        skips=skips,
        microbatches=2,
    )
    assert_as_on_one_device(run(rank_pool, loop), loop)


@pytest.mark.parametrize("zero", [Zero(stage=1), SLICES])
def test_a_first_step_without_a_rank(rank_pool: RankPool, zero: Zero) -> None:
    loop = Loop(plan=plan(zero), unused="zero", idle=[(0, 1)])
    assert_as_on_one_device(run(rank_pool, loop), loop)


@pytest.mark.one_in(15)
@pytest.mark.parametrize(
    ("zero", "changes"),
    [
        (Zero(), {}),
        (Zero(stage=1), {}),
        (Zero(stage=2, accumulate="slices"), {}),
        (SLICES, {}),
        (WHOLE, {}),
        (replace(SLICES, reshard_after_forward=False), {}),
        (replace(SLICES, keep_whole_below=50), {}),
        (replace(SLICES, unit_blocks=2), {}),
        (SLICES, {"dp": 2, "dp_shard": 2}),
        (Zero(stage=1), {"dp": 2, "dp_shard": 2}),
    ],
)
@pytest.mark.parametrize("model", ["transformer", "frozen block"])
def test_bytes_sent_are_those_of_the_formulas(
    rank_pool: RankPool, zero: Zero, changes: dict[str, Any], model: str
) -> None:
    loop = Loop(plan=plan(zero, **changes), model=model, microbatches=2)
    sent = rank_pool.run(targets.sent_and_planned, loop, world_size=loop.plan.mesh.world_size)
    for measured, buckets, kept in sent:
        assert measured == module_bytes(loop.plan, buckets, passes=2, kept=kept)
        assert measured


@pytest.mark.parametrize("zero", STAGES)
def test_between_steps_a_rank_holds_what_its_stage_says(rank_pool: RankPool, zero: Zero) -> None:
    # Measured from storages: parameters, gradients, moments, in eight bytes; padding included.
    for held, buckets in rank_pool.run(targets.held, plan(zero), world_size=2):
        trained = sum(one.num_elements for one in buckets.trained)
        frozen = sum(one.num_elements for one in buckets.frozen)
        cut = 2 if zero.stage else 1
        gradients = trained // 2 if zero.accumulate == "slices" else trained
        whole = zero.stage < 3
        parameters = trained + 72 if whole else (trained + frozen) // 2
        assert held == {
            "parameters": 8 * parameters,
            "gradients": 8 * gradients,
            "state": 2 * 8 * trained // cut,
        }


def test_the_table_of_units(rank_pool: RankPool) -> None:
    # Row E7: by class, by size, by names; each with its bytes.
    tables = rank_pool.run(targets.tables, plan(SLICES), world_size=2)
    by_default, by_class, by_size, by_name = tables[0]
    assert [row.name for row in by_default] == [*BLOCKS, "(root)"]
    one = next(row for row in by_default if row.name == "blocks.0")
    assert (one.num_parameters, one.bytes) == (10, 8 * 1050)
    assert by_class == by_default
    assert [row.name for row in by_size if ".mlp" in row.name] == [f"{b}.mlp" for b in BLOCKS]
    assert [row.name for row in by_name] == ["blocks.0.mlp", "blocks.2", "(root)"]
    total = sum(row.bytes for row in by_default)
    assert all(sum(row.bytes for row in table) == total for table in tables[0])


def test_a_scheduler_of_torch_sets_the_learning_rate(rank_pool: RankPool) -> None:
    loop = Loop(plan=plan(Zero(stage=1)), learning_rate="own", scheduled=True)
    ranks = run(rank_pool, loop)
    assert [report.learning_rate for report in ranks[0].reports] == [1e-2, 5e-3, 2.5e-3]
    assert_as_on_one_device(ranks, loop)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("home", ["host", "nvme"])
def test_offload_changes_nothing(rank_pool: RankPool, tmp_path: Any, home: Any) -> None:
    base = Loop(plan=plan(SLICES), microbatches=2)
    zero = replace(
        SLICES, optimizer_offload=home, parameter_offload=home, offload_dir=str(tmp_path)
    )
    away = run(rank_pool, replace(base, plan=plan(zero)))
    here = run(rank_pool, base)
    for name, value in here[0].after.items():
        assert torch.equal(value, away[0].after[name])
    assert not list(tmp_path.iterdir())


BF16 = Precision(parameters="bf16", gradients="bf16", reduction="fp32", master="fp32")
FP16 = Precision(
    parameters="fp16",
    gradients="fp16",
    reduction="fp32",
    master="fp32",
    loss_scaling="dynamic",
    loss_scale=2.0**40,
    loss_scale_window=2,
)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("zero", STAGES)
def test_master_copies_start_from_what_was_given_and_are_what_is_rounded(
    rank_pool: RankPool, zero: Zero
) -> None:
    loop = Loop(plan=plan(zero, precision=BF16), microbatches=2)
    expected = targets.one_device(loop, 2)[-1][0]
    given = dict(targets.make("transformer").named_parameters())
    results = rank_pool.run(targets.train_in_low_precision, loop, world_size=2)
    parameters, masters, at_start = results[0]
    for name, master in masters.items():
        assert torch.equal(parameters[name], master.to(torch.bfloat16))
        assert torch.equal(at_start[name], given[name].float())
        torch.testing.assert_close(master.double(), expected[name], rtol=0, atol=0.02)
    assert set(masters) == set(parameters) - {"positions"}


@pytest.mark.one_in(2)
@pytest.mark.system("S43")
@pytest.mark.parametrize("zero", [Zero(), SLICES])
def test_an_overflow_skips_the_step_and_the_scale_follows(rank_pool: RankPool, zero: Zero) -> None:
    loop = Loop(plan=plan(zero, precision=FP16), steps=40, microbatches=1)
    for rank in run(rank_pool, loop):
        skipped = [report.skipped for report in rank.reports]
        scales = [report.loss_scale for report in rank.reports]
        assert skipped[0]
        assert not skipped[-1] or not skipped[-2]
        for index, now in enumerate(skipped[:-1]):
            assert (
                scales[index + 1] == scales[index] / 2
                if now
                else scales[index + 1] >= scales[index]
            )


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
