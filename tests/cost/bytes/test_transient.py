"""What exists only while a step runs: at most so many units, buckets and buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from echelon.core.disk import PAGE_BYTES
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.core.plan import DTYPE_BYTES, Plan, Zero, ZeroStage
from echelon.cost.bytes.transient import (
    BUCKETS_IN_FLIGHT,
    MUON_IN_FLIGHT,
    most_whole_bytes,
    parameter_buffers,
    transient_terms,
)
from echelon.layout.buckets import plan_buckets, stage_units
from echelon.layout.stage import rank_part
from echelon.parallel import data
from tests.cost import layouts
from tests.cost.layouts import zero_plan, zero_plans
from tests.parallel.layouts import NANO, QWEN
from tests.walks import examples

BLOCK = 16 + 16 * 16 + 2 * 8 * 16 + 16 * 16 + 16 + 3 * 24 * 16
ENDS = 37 * 16


def bounds(plan: Plan, stage: int = 0) -> dict[tuple[str, str], int]:
    """Return the bytes of each term of a stage."""
    return {(term.name, term.pool): term.bytes for term in transient_terms(plan, stage)}


def whole(plan: Plan) -> int:
    """Return the most elements of parameters that are whole at a time on the one stage."""
    part = rank_part(plan, 0)
    return most_whole_bytes(plan, part, plan_buckets(plan, part)) // 8


@pytest.mark.parametrize(
    ("prefetch", "most"),
    [
        (0, BLOCK),
        (1, 2 * BLOCK),
        (2, 3 * BLOCK),
        (3, 4 * BLOCK),
        (9, 4 * BLOCK + 2 * ENDS + 16),
    ],
)
def test_as_many_units_are_whole_as_are_gathered_ahead(prefetch: int, most: int) -> None:
    zero = Zero(stage=3, prefetch=prefetch, accumulate="slices")
    assert whole(zero_plan(3, dp_shard=2, zero=zero)) == most


def test_units_of_several_blocks_are_whole_together() -> None:
    zero = Zero(stage=3, prefetch=1, unit_blocks=2, accumulate="slices")
    # The unit after the second block of a bucket is the first of the next one.
    assert whole(zero_plan(3, dp_shard=2, zero=zero)) == 4 * BLOCK
    zero = replace(zero, prefetch=0)
    assert whole(zero_plan(3, dp_shard=2, zero=zero)) == 2 * BLOCK


def test_a_tied_embedding_stays_whole_until_the_loss() -> None:
    zero = Zero(stage=3, prefetch=0, accumulate="slices")
    plan = zero_plan(3, dp_shard=2, zero=zero, model=replace(NANO, tied=True))
    assert whole(plan) == BLOCK + ENDS


def test_all_units_stay_whole_without_resharding() -> None:
    zero = Zero(stage=3, reshard_after_forward=False, accumulate="slices")
    plan = zero_plan(3, dp_shard=2, zero=zero)
    assert whole(plan) == 4 * BLOCK + 2 * ENDS + 16
    assert bounds(plan)["whole units of parameters", "device"] == 8 * whole(plan)


@given(zero_plans())
@settings(deadline=None, max_examples=examples(60))
def test_the_bound_on_units_is_what_running_them_one_by_one_needs(plan: Plan) -> None:
    for stage in range(plan.num_stages):
        part = rank_part(plan, stage)
        buckets = plan_buckets(plan, part)
        most = most_whole_bytes(plan, part, buckets)
        sliced = [bucket for bucket in buckets if bucket.sliced]
        if plan.layout.zero.stage < 3:
            assert most == 0
        if plan.layout.zero.reshard_after_forward:
            size = DTYPE_BYTES[plan.mathematics.precision.parameters]
            assert most == size * _run(plan, stage_units(part), sliced)


def _run(plan: Plan, order: tuple[str, ...], sliced: list) -> int:
    """Gather and free buckets as a pass does, forward and back; return the most elements."""
    most, ahead = 0, 1 + plan.layout.zero.prefetch
    for backward in (False, True):
        units = order[::-1] if backward else order
        used = {
            bucket.name: bucket.backward_units[::-1] if backward else bucket.units
            for bucket in sliced
        }
        there: set[str] = set()
        sizes = {bucket.name: bucket.num_elements for bucket in sliced}
        for index, unit in enumerate(units):
            coming = units[index : index + ahead]
            there |= {name for name, by in used.items() if any(one in by for one in coming)}
            most = max(most, sum(sizes[name] for name in there))
            there -= {name for name, by in used.items() if by and by[-1] == unit}
        assert there == set()
    return most


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_gradients_are_three_buckets(stage: ZeroStage) -> None:
    plan = zero_plan(stage, dp_shard=2, bucket_bytes=2048)
    sizes = sorted(bucket.num_elements for bucket in plan_buckets(plan, rank_part(plan, 0)))
    assert len(sizes) > 3
    assert bounds(plan)["whole gradients", "device"] == 8 * sum(sizes[-3:])
    once = replace(plan.layout.zero, accumulate="whole")
    kept = replace(plan, layout=replace(plan.layout, zero=once))
    assert ("whole gradients", "device") not in bounds(kept)


def test_buckets_of_all_blocks_fill_as_long_as_backward_runs() -> None:
    zero = Zero(stage=3, keep_whole_below=17, accumulate="slices")
    plan = zero_plan(3, dp_shard=2, zero=zero, tp=2, sequence_parallel=True, model=QWEN)
    buckets = plan_buckets(plan, rank_part(plan, 0))
    aside = [b for b in buckets if not b.sliced or "head" in b.units]
    rest = sorted(b.num_elements for b in buckets if b not in aside)
    wanted = sum(b.num_elements for b in aside) + sum(rest[-3:])
    assert bounds(plan)["whole gradients", "device"] == 8 * wanted


def test_another_dtype_of_reduction_costs_copies() -> None:
    same = zero_plan(0, dp=2, precision=layouts.SINGLE)
    assert bounds(same) == {}
    mixed = zero_plan(0, dp=2, precision=layouts.MIXED)
    sizes = sorted(b.num_elements for b in plan_buckets(mixed, rank_part(mixed, 0)))
    assert bounds(mixed) == {("gradients being summed", "device"): 4 * sum(sizes[-3:])}


@pytest.mark.parametrize("stage", [1, 2])
def test_what_replicas_add_up_in_another_dtype_is_copied_until_backward_is_over(
    stage: ZeroStage,
) -> None:
    plan = zero_plan(stage, dp=2, dp_shard=2, precision=layouts.MIXED, bucket_bytes=1024)
    sizes = sorted(b.num_elements for b in plan_buckets(plan, rank_part(plan, 0)))
    assert len(sizes) > 3
    # Whole in fp32, the slice that becomes the sum, and the other rank's part of it.
    first = sum(size + 2 * (size // 2) for size in sizes[-3:])
    copies = bounds(plan)["gradients being summed", "device"]
    assert copies == 4 * (first + sum(sizes) // 2)
    same = zero_plan(stage, dp=2, dp_shard=2, precision=layouts.SINGLE, bucket_bytes=1024)
    slices = sorted(b.num_elements // 2 for b in plan_buckets(same, rank_part(same, 0)))
    # What the other rank sends and, where slices add up, the sum that is to be added.
    assert bounds(same)["gradients being summed", "device"] == 4 * stage * sum(slices[-3:])


def test_only_what_both_ends_or_tensor_ranks_add_up_is_copied_again_without_replicas() -> None:
    plan = zero_plan(
        2, dp_shard=2, pp=2, tp=2, sequence_parallel=True, model=QWEN, precision=layouts.MIXED
    )
    for stage in range(2):
        buckets = plan_buckets(plan, rank_part(plan, stage))
        again = [b.num_elements // 2 for b in buckets if b.kind != "whole"]
        assert {b.kind for b in buckets} == {"whole", "partial", "tied"}
        first = sorted(b.num_elements + 2 * (b.num_elements // 2) for b in buckets)[-3:]
        copies = bounds(plan, stage)["gradients being summed", "device"]
        assert copies == 4 * (sum(first) + sum(again))


def test_offload_buffers_are_pages_of_a_few_sets() -> None:
    zero = Zero(
        stage=3, accumulate="slices", optimizer_offload="nvme", parameter_offload="nvme",
        offload_buffers=3, prefetch=2,
    )  # fmt: skip
    plan = zero_plan(3, dp_shard=2, zero=zero, precision=layouts.MIXED)
    # Three units are gathered at a time, and two sets more are read meanwhile.
    assert parameter_buffers(plan, 0) == 3 + 2
    largest = max(b.num_elements for b in plan_buckets(plan, rank_part(plan, 0))) // 2
    state, values = (
        -(-largest * 4 // PAGE_BYTES) * PAGE_BYTES,
        -(-largest * 2 // PAGE_BYTES) * PAGE_BYTES,
    )
    found = bounds(plan)
    assert found["buffers of optimizer state", "host"] == 3 * 3 * state
    assert found["buffers of parameters", "host"] == (3 + 2) * values
    assert not {pool for name, pool in found if "buffers" in name} - {"host"}
    on_gpu = replace(plan, cluster=replace(plan.cluster, backend="nccl"))
    assert bounds(on_gpu)["buffers of parameters", "device"] == (3 + 2) * values
    host = replace(zero, optimizer_offload="host", parameter_offload="host")
    in_memory = replace(plan, layout=replace(plan.layout, zero=host))
    assert not any("buffers" in name for name, _ in bounds(in_memory))


def test_a_unit_of_two_buckets_has_two_buffers() -> None:
    zero = Zero(stage=3, accumulate="slices", parameter_offload="nvme")
    assert parameter_buffers(zero_plan(3, dp_shard=2, zero=zero), 0) == 2 + 1
    # Matrices are Muon's, norms AdamW's.
    assert parameter_buffers(zero_plan(3, dp_shard=2, zero=zero, optimizer="muon"), 0) == 4 + 1


def test_matrices_of_muon_are_those_of_a_few_buckets() -> None:
    plan = zero_plan(1, dp_shard=2, optimizer="muon", precision=layouts.SINGLE, bucket_bytes=8)
    assert bounds(plan)["matrices of Muon", "device"] > 0
    assert ("matrices of Muon", "device") not in bounds(zero_plan(1, dp_shard=2))
    one = zero_plan(1, optimizer="muon", precision=layouts.SINGLE, bucket_bytes=2**20)
    matrices = 4 * (BLOCK - 2 * 16)
    assert bounds(one)["matrices of Muon", "device"] == 4 * 3 * matrices


def test_the_bounds_are_those_that_the_engine_keeps() -> None:
    assert data.MAX_IN_FLIGHT == BUCKETS_IN_FLIGHT
    assert TRAINING_PIECES.muon_buckets == MUON_IN_FLIGHT
