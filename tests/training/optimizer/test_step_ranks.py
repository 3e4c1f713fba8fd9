"""Updates on slices equal those of one device, in every layout, wherever the state rests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.parameters import parameters
from echelon.core.plan import DTYPE_BYTES, Optimizer, OptimizerKind, Plan, Precision, Zero
from echelon.cost.bytes.data import muon_bytes
from echelon.launch.local.supervisor import RankPool
from echelon.layout.buckets import plan_buckets, slice_elements
from echelon.layout.muon import muon_exchange
from echelon.layout.stage import pp_rank_of, rank_part
from echelon.models.counter_random import initial_values
from tests.parallel.layouts import GPT2, QWEN, Choice, plan_of
from tests.parallel.one_device import Values, assemble
from tests.training.optimizer import optimizer_targets as targets
from tests.training.optimizer.optimizer_targets import RATES, Updated, on_one_device

SETTINGS = Optimizer(
    beta1=0.8, beta2=0.9, eps=1e-3, momentum=0.7, weight_decay=0.3, newton_schulz_steps=3
)

LAYOUTS = {
    "one rank": Choice(),
    "one rank, stage 3": Choice(zero=Zero(stage=3, accumulate="slices")),
    "dp2": Choice(dp=2),
    "tp2": Choice(tp=2, model=QWEN, sequence_parallel=True),
    "stage 1": Choice(dp_shard=2, zero=Zero(stage=1)),
    "stage 2, 3 slices": Choice(dp_shard=3, zero=Zero(stage=2, accumulate="slices"), model=GPT2),
    "stage 3, 4 slices": Choice(dp_shard=4, zero=Zero(stage=3, keep_whole_below=20)),
    "hybrid": Choice(dp=2, dp_shard=2, zero=Zero(stage=1)),
    "stage 3, pp2": Choice(dp_shard=2, pp=2, zero=Zero(stage=3), model=QWEN),
    "stage 2, tp2": Choice(dp_shard=2, tp=2, zero=Zero(stage=2), model=GPT2),
    "hybrid, stage 3, tp2": Choice(
        dp=2, dp_shard=2, tp=2, zero=Zero(stage=3), model=QWEN, sequence_parallel=True
    ),
}

Update = Callable[[str, OptimizerKind], tuple[Plan, list[Updated]]]
MIXED = Precision(parameters="bf16", gradients="fp32", reduction="fp32", master="fp32")
NARROW = replace(MIXED, gradients="bf16", reduction="bf16")


def run(rank_pool: RankPool, plan: Plan, folder: Path | str = "") -> list[Updated]:
    """Update on the ranks of a plan."""
    return rank_pool.run(targets.update, (plan, str(folder)), world_size=plan.mesh.world_size)


@pytest.fixture(scope="module")
def updated(rank_pool: RankPool) -> Update:
    """Return a function that updates in a layout, once for all tests, and gives its plan too."""

    @cache
    def update(layout: str, kind: OptimizerKind) -> tuple[Plan, list[Updated]]:
        plan = plan_of(LAYOUTS[layout], optimizer=settings_of(kind))
        return plan, run(rank_pool, plan)

    return update


def first_values(plan: Plan) -> Values:
    """Return the parameters before the first update."""
    return {
        spec.name: initial_values(plan.model, spec, plan.mathematics.seed)
        for spec in parameters(plan.model)
    }


def settings_of(kind: OptimizerKind) -> Optimizer:
    """Return settings of an optimizer that change what a wrong formula would."""
    return replace(SETTINGS, kind=kind, decay="all" if kind == "sgd" else "matrices")


@pytest.mark.system("S21")
@pytest.mark.quick(
    "one rank, stage 3-muon",
    "tp2-adamw",
    "stage 3, pp2-sgd",
    "hybrid-adamw",
)
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_become_what_one_device_computes(
    updated: Update,
    layout: str,
    kind: OptimizerKind,
) -> None:
    plan, ranks = updated(layout, kind)
    found = assemble(plan, [rank.values for rank in ranks])
    expected = on_one_device(plan, first_values(plan))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
    assert all(rank.padding for rank in ranks)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_sends_what_the_formula_says(updated: Update, layout: str) -> None:
    plan, ranks = updated(layout, "muon")
    for rank, found in enumerate(ranks):
        exchange = muon_exchange(plan, pp_rank_of(plan, rank))
        expected = sum(term.bytes for term in muon_bytes(plan, exchange, rank))
        assert found.sent == [expected] * len(RATES)


@pytest.mark.system("S21")
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_state_is_held_in_slices(rank_pool: RankPool, kind: OptimizerKind) -> None:
    plan = plan_of(dp_shard=3, zero=Zero(stage=1), precision=MIXED, optimizer=settings_of(kind))
    buckets = plan_buckets(plan, rank_part(plan, 0))
    expected = sum(
        slice_elements(plan, bucket)
        * DTYPE_BYTES["fp32"]
        * (1 + len(OPTIMIZERS[bucket.update].state))
        for bucket in buckets
    )
    ranks = run(rank_pool, plan)
    assert [rank.held for rank in ranks] == [expected] * 3
    for bucket in buckets:
        for state in (*OPTIMIZERS[bucket.update].state, "master"):
            whole = [rank.state[state] for rank in ranks]
            for name in bucket.names:
                shards = [shard for rank in whole for shard in rank.get(name, [])]
                size = sum(shard.tensor.numel() for shard in shards)
                assert size == prod(shards[0].global_shape)


@pytest.mark.quick("sgd-precision0", "muon-precision1")
@pytest.mark.parametrize("precision", [MIXED, NARROW])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_parameters_are_the_rounded_master_copy(
    rank_pool: RankPool, kind: OptimizerKind, precision: Precision
) -> None:
    zero = Zero(stage=3, accumulate="slices")
    plan = plan_of(dp_shard=2, precision=precision, optimizer=settings_of(kind), zero=zero)
    ranks = run(rank_pool, plan)
    values = assemble(plan, [rank.values for rank in ranks])
    masters = assemble(plan, [rank.state["master"] for rank in ranks])
    assert all(rank.padding for rank in ranks)
    start = {name: value.bfloat16() for name, value in first_values(plan).items()}
    narrow = precision.gradients == "bf16"
    expected = on_one_device(plan, start, torch.float32, torch.bfloat16 if narrow else None)
    for name, value in expected.items():
        assert masters[name].dtype == torch.float32
        torch.testing.assert_close(masters[name], value, rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(values[name], masters[name].bfloat16())


@pytest.mark.system("S25")
@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("precision", [None, NARROW])
def test_where_state_rests_changes_no_bit(
    rank_pool: RankPool, tmp_path: Path, kind: OptimizerKind, precision: Precision | None
) -> None:
    plan = plan_of(
        dp_shard=2,
        precision=precision,
        optimizer=settings_of(kind),
        zero=Zero(stage=3, accumulate="slices"),
        bucket_bytes=1000,
    )
    stays = run(rank_pool, plan)
    for home in ("host", "nvme"):
        for also in ("none", home):
            zero = replace(
                plan.layout.zero,
                optimizer_offload=home,
                parameter_offload=also,
                offload_dir=str(tmp_path),
            )
            offloaded = replace(plan, layout=replace(plan.layout, zero=zero))
            for rank, other in zip(stays, run(rank_pool, offloaded, tmp_path), strict=True):
                assert rank.order == other.order
                assert rank.held == other.held
                assert other.padding
                for kept, moved in (
                    (rank.values, other.values),
                    *((rank.state[kind], other.state[kind]) for kind in rank.state),
                ):
                    assert kept.keys() == moved.keys()
                    for name, shards in kept.items():
                        for one, two in zip(shards, moved[name], strict=True):
                            assert torch.equal(one.tensor, two.tensor), name


def test_all_ranks_update_in_the_same_order_forward(rank_pool: RankPool) -> None:
    plan = plan_of(dp_shard=2, tp=2, optimizer=settings_of("adamw"), zero=Zero(stage=1))
    names = [bucket.name for bucket in plan_buckets(plan, rank_part(plan, 0))]
    for rank in run(rank_pool, plan):
        assert rank.order == names[::-1] * len(RATES)
    plan = plan_of(dp_shard=2, tp=2, optimizer=settings_of("muon"), zero=Zero(stage=1))
    names = [bucket.name for bucket in plan_buckets(plan, rank_part(plan, 0))]
    first, *others = run(rank_pool, plan)
    assert sorted(first.order) == sorted(names * len(RATES))
    assert all(rank.order == first.order for rank in others)
