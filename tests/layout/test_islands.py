"""Islands: their ranks, their plans, and what of a slice meets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echelon.core.axis import Axis
from echelon.core.choices.local_sgd import OUTER_BLOCK, LocalSgd
from echelon.core.plan import Plan
from echelon.layout.islands import (
    _scales_of_range,
    blocks_between,
    blocks_in_stage,
    fragment_ranges,
    inner_plan,
    island_of,
    island_plan,
    islands_of,
    plan_and_rank,
    sent_of_slices,
    slice_fragments,
    whole_batch_plan,
)
from tests.parallel.layouts import plan_of


def islands(*, fragments: int = 1, **mesh: Any) -> Plan:
    plan = plan_of(dp=2, **mesh)
    local = LocalSgd(every=4, islands=2, fragments=fragments)
    placed = replace(plan.layout, mesh=replace(plan.mesh, replicas_outermost=True))
    return replace(plan, mathematics=replace(plan.mathematics, local_sgd=local), layout=placed)


def test_an_island_is_a_block_of_ranks_its_pipeline_included() -> None:
    plan = islands(pp=2, tp=2)
    assert [(one.first_rank, one.size) for one in islands_of(plan)] == [(0, 4), (4, 4)]
    assert plan.mesh.groups(Axis.DP_REPLICATE) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert plan.mesh.groups(Axis.PP) == ((0, 2), (1, 3), (4, 6), (5, 7))
    second = island_of(plan, 6)
    assert second is not None
    assert (second.index, second.local(6), second.lifted((0, 3))) == (1, 2, (4, 7))
    for rank in range(8):
        assert plan.mesh.rank(plan.mesh.coordinates(rank)) == rank


def test_the_plan_of_an_island_has_its_share_of_the_batch_and_no_replicas() -> None:
    plan = islands(pp=2)
    own = island_plan(plan, 1)
    assert own.mesh.world_size == 2
    assert own.mathematics.global_sequences * 2 == plan.mathematics.global_sequences
    assert own.num_microbatches == plan.num_microbatches
    assert (own.mathematics.local_sgd.island, own.mathematics.local_sgd.is_part) == (1, True)
    batch = whole_batch_plan(own).mathematics
    assert batch.global_sequences == plan.mathematics.global_sequences
    assert plan_and_rank(plan, 3) == (own, 1)
    alone = plan_of(dp=2)
    assert (inner_plan(alone), plan_and_rank(alone, 1)) == (alone, (alone, 1))
    assert islands_of(alone) == ()


def test_runs_of_fragments_are_the_slice_without_padding() -> None:
    plan = islands(fragments=2, dp_shard=2)
    for rank in range(4):
        for runs in slice_fragments(plan, rank):
            covered = sorted(place for fragment in runs for run in fragment for place in run)
            assert covered == list(range(len(covered)))
    assert fragment_ranges(LocalSgd(every=2, islands=2), (), range(4)) == ((),)


def test_columns_lie_in_blocks_of_a_row() -> None:
    assert OUTER_BLOCK == 128
    assert [blocks_between(128, 0, n) for n in (0, 1, 128, 129, 300)] == [0, 1, 1, 2, 3]
    assert blocks_between(128, 100, 300) == 3


def test_scales_of_a_range_of_rows() -> None:
    # Rows of 200: two blocks each. Elements 150 to 649: the end of row 0 (one block), rows 1 and 2,
    # and 50 of row 3 (one block).
    assert _scales_of_range(128, 0, 200, 150, 650) == 1 + 2 * 2 + 1
    # The second half of rows of 200, columns 100 to 199, meets both blocks in each row.
    assert _scales_of_range(128, 100, 100, 0, 300) == 3 * 2
    assert _scales_of_range(128, 100, 100, 10, 20) == 1


def test_a_stage_has_the_same_blocks_however_it_is_cut() -> None:
    whole = blocks_in_stage(islands(), 0, 0)
    assert (
        whole == blocks_in_stage(islands(tp=2), 3, 0) == blocks_in_stage(islands(dp_shard=2), 1, 0)
    )
    codes = sum(n for n, _ in sent_of_slices(islands(), 0, 0))
    cut = islands(dp_shard=2)
    cut = replace(cut, layout=replace(cut.layout, zero=replace(cut.layout.zero, stage=1)))
    halves = [sum(n for n, _ in sent_of_slices(cut, rank, 0)) for rank in range(2)]
    assert sum(halves) == codes
