"""The rows that stand ready for an expert, against all ways in which its tokens can come."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil, comb

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.model_shape import Experts
from echelon.layout.expert_load import (
    ExpertLoad,
    RowCounts,
    balanced_pairs,
    even_pairs,
    most_nodes,
    slots_per_expert,
)
from tests.cost.bytes.mixtures import (
    FOUR,
    TWO_HOPS,
    on_nodes,
    recorded,
)
from tests.parallel.layouts import MIXTRAL


@given(
    num_tokens=st.integers(1, 40),
    num_sequences=st.integers(1, 6),
    capacity=st.integers(1, 12),
    start=st.integers(0, 50),
)
def test_slots_are_the_most_that_an_expert_can_get(
    num_tokens: int, num_sequences: int, capacity: int, start: int
) -> None:
    """Rows of a rank are consecutive, and row i belongs to sequence i modulo their number."""
    rows = Counter(row % num_sequences for row in range(start, start + num_tokens))
    most = sum(min(capacity, count) for count in rows.values())
    assert slots_per_expert(num_tokens, num_sequences, capacity) == most


def test_slots_of_even_sequences_are_room_times_sequences() -> None:
    assert slots_per_expert(32, 4, 3) == 12
    assert slots_per_expert(32, 4, 20) == 32


def test_assignments_to_other_ranks_are_sent() -> None:
    # Experts 0 and 1 are on the first rank. -1 had no room.
    load = recorded(4, [[0, 1], [0, 2], [3, -1]], [[1, 0], [1, 3], [2, 3]])
    assert load.rows((0, 0), 0) == RowCounts(leaving=2, arriving=3)
    assert load.rows((0, 0), 1) == RowCounts(leaving=3, arriving=2)


def test_the_nodes_that_a_token_reaches() -> None:
    # DeepSeek-V3: 64 ranks on 8 nodes, and a token goes to at most four of them.
    limited = Experts(num_experts=256, top_k=8, ffn=2048, groups=8, top_groups=4)
    assert most_nodes(limited, 8) == 4
    assert most_nodes(replace(limited, groups=1, top_groups=1), 8) == 8
    assert most_nodes(replace(limited, groups=1, top_groups=1, top_k=2), 8) == 2
    model = replace(FOUR, experts=limited)
    plan = on_nodes(8, model=model, dp_shard=64, ep=64, microbatches=1, experts=TWO_HOPS)
    # It may choose from four of eight groups of 32; in half of the cases one is on a given node.
    reached = 0.5 * (1 - comb(96, 8) / comb(128, 8))
    assert balanced_pairs(plan, 8).leaving == ceil(8 * 7 * reached) == 26
    # Its own node is as likely as each of the seven others: 26 / 7, rounded down, so that 26 of 29
    # that are dealt to the eight in turn leave.
    assert even_pairs(plan, 8) == 26 + 3
    assert even_pairs(plan, 1) == 8


def test_likely_pairs_of_two_experts_by_hand() -> None:
    plan = on_nodes(2, model=MIXTRAL, dp_shard=4, ep=4, experts=TWO_HOPS)
    # Both of two choices of eight on the same four experts: 4 x 3 / (8 x 7) of the tokens.
    missed = 4 * 3 / (8 * 7)
    assert balanced_pairs(plan, 2).leaving == ceil(8 * (1 - missed))


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3]), st.booleans())
def test_what_leaves_arrives_and_no_node_gets_a_token_twice(
    seed: int, top_k: int, drops: bool
) -> None:
    random = np.random.default_rng(seed)
    rows = [np.stack([random.permutation(8)[:top_k] for _ in range(5)]) for _ in range(8)]
    if drops:
        rows = [np.where(random.random(one.shape) < 0.3, -1, one) for one in rows]
    load, here = ExpertLoad(num_experts=8, choices={(0, 0): tuple(rows)}), range(8)
    for found in (
        [load.rows((0, 0), place) for place in here],
        [load.pairs((0, 0), place, 4) for place in here],
        [load.rows_within((0, 0), place, 4) for place in here],
    ):
        assert sum(one.leaving for one in found) == sum(one.arriving for one in found)
    for place, one in enumerate(rows):
        reached = [{int(e) // 2 for e in row if e >= 0} - {place // 2} for row in one]
        assert load.pairs((0, 0), place, 4).leaving == sum(map(len, reached))
