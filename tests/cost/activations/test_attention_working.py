"""What attention works with: one call of a kernel by hand, and what more places and pieces add."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.attention_mask import PositionRun
from echelon.core.plan import Context, ContextKind
from echelon.cost.activations.attention_working import (
    AttentionRowChunks,
    RowChunkSizes,
    attention_working_bytes,
    first_keys,
    row_chunks,
)
from echelon.rehearsal.run import on_nccl
from tests.parallel.layouts import NANO, plan_of

OUT, KEYS, LSE = 8 * 4 * 4, 8 * 2 * 2 * 4, 8 * 4
"""Elements of the output, of keys and values, and of log-sum-exps, of 8 tokens."""


def test_alone_a_kernel_has_its_results() -> None:
    plan = plan_of(dtype="fp32")
    assert attention_working_bytes(plan, 0) == ((OUT + LSE) * 4, 0, 0, (OUT + KEYS) * 4)


def test_pieces_are_merged_and_their_gradients_added_up() -> None:
    half = RowChunkSizes(queries=4, keys=4, sequences=1)
    pieces = AttentionRowChunks(forward=((half, half),), backward=((half, half),))
    forward, *_, backward = attention_working_bytes(plan_of(dtype="fp32"), 0, pieces)
    # The sum of all, one half, and three log-sum-exps of it; gradients of all, and of one half.
    assert forward == (OUT + LSE + OUT // 2 + LSE // 2 + 3 * LSE // 2) * 4
    assert backward == (OUT + KEYS + (OUT + KEYS) // 2) * 4


@pytest.mark.parametrize(("kind", "degree"), [("ring", 1), ("gathered", 1), ("ulysses", 4)])
def test_twice_the_sequences_work_with_twice_as_much(kind: ContextKind, degree: int) -> None:
    context = Context(kind=kind, ulysses_degree=degree)
    one, two = (
        attention_working_bytes(plan_of(cp=4, context=context, microbatch_sequences=n), 0)
        for n in (1, 2)
    )
    if kind == "gathered":
        # The positions of gathered keys are those of one sequence.
        assert all(a < b <= 2 * a for a, b in zip(one, two, strict=True) if a)
    else:
        assert two == tuple(2 * size for size in one)


def test_a_whole_sequence_is_one_masked_piece() -> None:
    plan = plan_of(microbatch_sequences=2)
    length = plan.mathematics.sequence_length
    tiles = row_chunks(plan, 0, None)
    ((piece,),) = tiles.forward
    assert (piece.queries, piece.keys, piece.sequences) == (length, length, 2)
    assert (piece.masked, piece.whole) == (True, True)
    assert tiles.backward == ((piece,), ())
    assert first_keys(plan, 0) == (PositionRun(0, 1, length),)


def test_every_query_of_a_ring_meets_its_own_keys_first_and_last() -> None:
    plan = plan_of(cp=2)
    for rank in range(2):
        tiles = row_chunks(plan, rank, None)
        assert len(tiles.forward) == 2
        assert len(tiles.backward) == 3
        own = plan.placement.ring_runs(plan.placement.ring_place(rank))
        assert first_keys(plan, plan.placement.ring_place(rank)) == own
        rows = sum(run.count for run in own)
        # The first half of the own queries comes first in backward, the other half last.
        for end in (tiles.backward[0], tiles.backward[-1]):
            assert 0 < max(piece.queries for piece in end) <= rows


def test_a_place_of_a_ring_meets_what_is_before_it() -> None:
    chunks = row_chunks(plan_of(cp=4), 0)
    assert (len(chunks.forward), len(chunks.backward)) == (4, 5)
    # Zigzag, of 8 tokens on 4 places: of its own the first token meets the first key, the last one
    # both; it is the last one, too, that meets the first key of each of the others.
    assert [[(one.queries, one.keys) for one in step] for step in chunks.forward[1:]] == [
        [(1, 2)],
        [(1, 2)],
        [(1, 2)],
    ]


def test_gathered_keys_are_one_step() -> None:
    gathered = row_chunks(plan_of(cp=4, context=Context(kind="gathered")), 3)
    assert gathered.backward == (*gathered.forward, ())
    (pieces,) = gathered.forward
    assert max(one.keys for one in pieces) < 8


def test_flash_attention_takes_a_window_in_one_call() -> None:
    window = plan_of(cp=2, dtype="bf16", model=replace(NANO, window=3, head_dim=8))
    assert all(one.whole for step in row_chunks(on_nccl(window), 0).forward for one in step)
