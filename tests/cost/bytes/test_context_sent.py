"""What context ranks send: by hand, for every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.plan import Context, ContextKind, Plan, Recompute
from echelon.cost.bytes.context_sent import (
    block_bytes,
    context_bytes,
    gathers_whole,
    kv_copies,
    kv_row_elements,
)
from echelon.layout.stage import part_of
from tests.parallel.layouts import NANO, plan_of

ROW = 2 * 2 * 4
"""Elements of keys and values of a position: two key heads of width 4."""
NO_MASK = replace(NANO, causal=False)


def over(kind: ContextKind, cp: int, *, degree: int = 1, model: object = NO_MASK) -> Plan:
    return plan_of(
        cp=cp, context=Context(kind=kind, ulysses_degree=degree), model=model, dtype="fp32"
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree", "copies"),
    [(8, 8, 4, 1), (8, 2, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (6, 2, 6, 3)],
)
def test_key_heads_are_copied_as_little_as_can_be(
    heads: int, kv_heads: int, degree: int, copies: int
) -> None:
    assert kv_copies(heads, kv_heads, degree) == copies


def test_a_row_has_keys_and_values_of_all_sequences() -> None:
    assert kv_row_elements(over("ring", 2)) == ROW
    assert kv_row_elements(plan_of(cp=2, microbatch_sequences=3)) == 3 * ROW
    # Two query heads to each of four members: each has a copy of the key head that they meet.
    assert kv_row_elements(over("ulysses", 4, degree=4)) == 2 * 4


@pytest.mark.parametrize("kind", ["ring", "striped", "gathered"])
def test_without_a_mask_all_rows_go_everywhere(kind: ContextKind) -> None:
    rows = 3 * 2 * ROW * 4  # three others, two positions of eight, fp32
    assert block_bytes(over(kind, 4), 0) == (rows, 2 * rows)


def test_heads_travel_both_ways_and_keys_with_their_copies() -> None:
    # Of two positions on each of four ranks: queries, keys and values with a copy each, outputs.
    moved = 2 * 4 * 4 * (4 + 2 * 4 + 4) * 3 // 4
    assert block_bytes(over("ulysses", 4, degree=4), 1) == (moved, moved)


def test_what_a_causal_mask_hides_is_not_sent() -> None:
    causal = [block_bytes(over("ring", 4, model=NANO), rank) for rank in range(4)]
    whole = block_bytes(over("ring", 4), 0)
    assert all(forward <= whole[0] for forward, _ in causal)
    assert sum(forward for forward, _ in causal) < 4 * whole[0]


def test_a_window_is_gathered_row_by_row() -> None:
    assert gathers_whole(over("gathered", 4))
    assert not gathers_whole(over("gathered", 4, model=replace(NANO, window=2)))
    assert not gathers_whole(over("ring", 4))


def test_repeated_blocks_send_their_forward_once_more() -> None:
    plan = replace(
        (one := over("ring", 2)),
        layout=replace(one.layout, recompute=Recompute(policy="full", every=2)),
    )
    count = {term.name: term.count for term in context_bytes(plan, part_of(plan, 0), 0)}
    blocks = plan.num_microbatches * plan.model.layers
    assert count["keys and values forward"] == count["their gradients"] == blocks
    assert count["keys and values forward again"] == blocks // 2
    assert not list(context_bytes(plan_of(), part_of(plan_of(), 0), 0))
