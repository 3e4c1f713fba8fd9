"""Which pieces of queries and keys kernels get: those that a mask leaves, or all in one call."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.attention_mask import PositionRun
from echelon.core.plan import Context
from echelon.cost.activations.attention_row_chunks import first_keys, row_chunks
from echelon.rehearsal.run import on_nccl
from tests.parallel.layouts import NANO, plan_of


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
