"""Ring attention as recorded: each pair of chunks once, each block of keys around the ring."""

from __future__ import annotations

from collections import Counter

import pytest

from echelon.core.attention_mask import AttentionMask
from echelon.launch.local.supervisor import RankPool
from echelon.layout.context_work import chunk_pairs, pairs_by_place
from echelon.page.lessons.lesson import DiagramFigure
from echelon.page.lessons.ring_attention import CASES, RingRecord, positions_text, ring_attention
from echelon.page.lessons.traces import read_trace
from echelon.planner.view.document import BarsFigure, HeatFigure
from tests.page.lessons.reading import facts, figure, holds
from tests.page.lessons.recordings.ring import POSITIONS, RANKS, record_ring, ring_case


def record(name: str) -> RingRecord:
    return RingRecord.read(read_trace("ring")["cases"][name])


@pytest.mark.system("S58")
def test_four_ranks_record_the_same_again(rank_pool: RankPool) -> None:
    assert record_ring(rank_pool) == read_trace("ring")


@pytest.mark.system("S58")
@pytest.mark.parametrize("name", CASES)
def test_each_pair_of_chunks_was_computed_exactly_once(name: str) -> None:
    one, causal = record(name), name.startswith("causal")
    plan = ring_case(causal)
    mask = AttentionMask(causal=causal)
    met = [
        (queries, keys, pairs) for step in range(RANKS) for _, queries, keys, pairs in one.met(step)
    ]
    assert max(Counter((queries, keys) for queries, keys, _ in met).values()) == 1
    # The formulas of the layout say the same: which chunks, where, at which step, how many pairs.
    wanted = {
        (p.queries, p.keys): (p.place, p.step, p.pairs)
        for p in chunk_pairs(plan.placement, mask, gathered=False)
    }
    found = {
        (queries, keys): (rank, step, pairs)
        for step in range(RANKS)
        for rank, queries, keys, pairs in one.met(step)
    }
    assert found == wanted
    assert sum(one.work()) == mask.num_pairs(POSITIONS) == (136 if causal else 256)
    assert tuple(one.work()) == pairs_by_place(plan.placement, mask)


def test_twelve_of_sixteen_blocks_are_missing_without_the_ring() -> None:
    assert holds("llm-training-45") == 12
    for name in CASES:
        one = record(name)
        assert [one.blocks(step) for step in range(RANKS)] == [4, 8, 12, 16]
        first = ring_attention().scene(case=name).frames[0]
        assert "the other 12 would be missing" in first.caption
        assert facts(first)["blocks that have met"] == "4 of 16"


@pytest.mark.parametrize("name", CASES)
def test_what_moves_is_what_ranks_sent(name: str) -> None:
    one, frames = record(name), ring_attention().scene(case=name).frames
    assert len(frames) == 5
    for step, frame in enumerate(frames[:RANKS]):
        diagram = figure(frame, DiagramFigure)
        sent = one.messages(step + 1)
        assert len(diagram.moves) == len(sent) == (RANKS if step + 1 < RANKS else 0)
        for move, (source, target, positions, size) in zip(diagram.moves, sent, strict=True):
            assert move.target == f"in{target}"
            assert f"Rank {source} sends" in move.words
            assert positions_text(positions) in move.words
            assert f"{size} bytes" in move.words
        # Each message goes on to the same neighbour, and brings keys of another owner each time.
        assert all(target == (source - 1) % RANKS for source, target, _, _ in sent)
    resident = [facts(frame)["blocks of keys on a rank"] for frame in frames[:RANKS]]
    assert resident == ["2", "3", "3", "2"]
    assert holds("llm-training-47") == {"blocking": 2, "double_buffered_overlap": 3}


@pytest.mark.parametrize("name", CASES)
def test_the_grid_fills_with_the_steps(name: str) -> None:
    one, frames = record(name), ring_attention().scene(case=name).frames
    for step, frame in enumerate(frames[:RANKS]):
        grid = figure(frame, HeatFigure)
        for queries, row in enumerate(grid.rows):
            for keys, (value, text) in enumerate(zip(row.values, row.texts, strict=True)):
                at = [
                    number
                    for number in range(step + 1)
                    for _, q, k, _ in one.met(number)
                    if (q, k) == (queries, keys)
                ]
                assert text == "".join(map(str, at))
                assert value == (None if not at else 2.0 if at == [step] else 1.0)


def test_one_device_is_over_its_memory_and_a_rank_is_not() -> None:
    last = ring_attention().scene().frames[-1]
    alone, shared = figure(last, BarsFigure).rows
    claimed = holds("llm-training-44")
    with_weights = alone.values[0] + alone.values[2]
    assert alone.values[2] / 1e9 == pytest.approx(claimed["KV_GB"], abs=0.005)
    assert with_weights / 1e9 == pytest.approx(claimed["with_weights_GB"], abs=0.005)
    assert shared.values[2] == alone.values[2] / RANKS
    assert (alone.over, shared.over) == (True, False)


def test_chunks_in_a_row_would_be_uneven() -> None:
    last = facts(ring_attention().scene(case="causal, zigzag").frames[-1])
    assert last["pairs computed, rank by rank"] == "34, 34, 34, 34"
    assert last["with chunks in a row they would be"] == "10, 26, 42, 58"


def test_positions_in_a_row_are_ranges() -> None:
    assert positions_text([14, 15, 0, 1]) == "0-1 14-15"
    assert positions_text([3]) == "3"
