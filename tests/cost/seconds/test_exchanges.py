"""What a block sends over tensor, context and expert ranks, and what of it shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cost.inputs.cost_inputs import (
    group_link_numbers,
    library_group_links,
    pairwise_group_links,
)
from echelon.cost.seconds.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    point_to_point_seconds,
)
from echelon.cost.seconds.exchanges import (
    EXCHANGES,
    LEAST_SHOWN,
    STEP_KERNELS,
    chunk_kernels,
    context_exchange,
    expert_exchange,
    shown_in_chunks,
    tensor_exchange,
    tensor_seconds,
)
from echelon.cost.seconds.kernels import matmul_seconds
from tests.cost.seconds.small_work import MACHINE, MIXTURE, small_work, with_trainer
from tests.walks import examples

STREAM = 2.0 * 128 * 64
"""Bytes of the residual stream of a microbatch."""


def test_tensor_ranks_sum_twice_or_gather_and_scatter() -> None:
    way = group_link_numbers(MACHINE, 4.0, 1.0)
    sums = pytest.approx(2 * float(all_reduce_seconds(way, STREAM)))
    assert tensor_exchange(small_work(tp=4.0)) == (sums, sums)
    # A library's own collectives are taken for sums; messages by pairs gather inputs once more.
    cut = small_work(tp=4.0, sequence_parallel=1.0)
    assert tensor_exchange(cut) == (sums, sums)
    once = float(all_gather_seconds(way, STREAM))
    found = tensor_exchange(with_trainer(cut, by_pairs=1.0))
    assert found == (pytest.approx(4 * once), pytest.approx(6 * once))


def test_norms_over_all_heads_add_two_numbers_of_each_token() -> None:
    work = small_work(tp=4.0)
    normed = replace(work, model=replace(work.model, width_norms=96.0))
    way = group_link_numbers(MACHINE, 4.0, 1.0)
    plain, found = tensor_exchange(work), tensor_exchange(normed)
    row = 4.0 * 128
    once, each = (float(all_reduce_seconds(way, size)) for size in (2 * row, row))
    assert found[0] - plain[0] == pytest.approx(once)
    assert found[1] - plain[1] == pytest.approx(2 * each)


def test_hops_of_a_library_and_of_pairs() -> None:
    work = with_trainer(small_work(), own_hops=3.0)
    assert library_group_links(work, 4.0, 1.0).node_latency_s == pytest.approx(3e-5)
    # All three others are spoken to at once: each but the first adds a fifth of a hop.
    pairs = with_trainer(small_work(), by_pairs=1.0, pair_hops=0.2)
    assert pairwise_group_links(pairs, 4.0, 1.0).node_latency_s == pytest.approx(1.4e-5 / 3)
    rings = with_trainer(small_work(), pair_hops=0.2)
    assert pairwise_group_links(rings, 4.0, 1.0).node_latency_s == pytest.approx(1e-5)


def test_keys_hide_behind_attention_and_gathered_ones_do_not() -> None:
    work = small_work(cp=4.0)
    # Three messages of the keys and values of 32 tokens.
    round_trip = 3 * (1e-5 + 2.0 * 32 * 64 / 1e9)
    slow = context_exchange(work, 0.0, 0.0)
    assert (slow.forward, slow.backward) == pytest.approx((round_trip, 2 * round_trip))
    assert (slow.shown_forward, slow.shown_backward) == pytest.approx((round_trip, 2 * round_trip))
    quick = context_exchange(work, 1.0, 1.0)
    assert (quick.forward, quick.shown_forward, quick.shown_backward) == (slow.forward, 0.0, 0.0)
    gathered = context_exchange(small_work(cp=4.0, gathered=1.0), 1.0, 1.0)
    whole = 3e-5 + 0.75 * 2.0 * 128 * 64 / 1e9
    assert (gathered.shown_forward, gathered.shown_backward) == pytest.approx((whole, 2 * whole))


def test_rows_to_experts_in_a_node_and_in_two_hops() -> None:
    flat = expert_exchange(small_work(model=MIXTURE, ep=4.0), (0.0, 0.0))
    # Each way: two rows of a token, three quarters of which leave.
    near = STREAM * 2 * 3 / 4 / 1e9
    assert flat.forward == pytest.approx(2 * (2e-5 + near))
    assert flat.shown_forward == flat.forward
    hidden = with_trainer(small_work(model=MIXTURE, ep=4.0), expert_overlap=0.75)
    assert expert_exchange(hidden, (0.0, 0.0)).shown_forward == pytest.approx(flat.forward / 4)
    alone = expert_exchange(small_work(model=MIXTURE), (0.0, 0.0))
    assert (alone.forward, alone.shown_backward) == (0.0, 0.0)
    over = {hops: small_work(model=MIXTURE, ep=8.0, two_hop=hops) for hops in (0.0, 1.0)}
    straight, twice = (float(expert_exchange(one, (0.0, 0.0)).forward) for one in over.values())
    start = 1e-4 * 8**0.5 + 1000 / 2e8
    assert straight == pytest.approx(2 * (start + STREAM / 5e7))
    # A token reaches 2 (1 - (1/2)^2) of two nodes, half of them elsewhere; then rows go on.
    assert twice == pytest.approx(2 * (2 * start + 0.75 * STREAM / 5e7 + near))


def test_in_chunks_the_first_way_there_and_the_last_way_back_show() -> None:
    work = small_work(model=MIXTURE, ep=4.0, chunks=4.0)
    quick = expert_exchange(work, (0.0, 0.0))
    each = float(quick.forward) / 2
    assert quick.shown_forward == pytest.approx(quick.forward)
    slow = expert_exchange(work, (1.0, 1.0))
    assert slow.shown_forward == pytest.approx(2 * each / 4)


HIDDEN = 64.0
"""Width of the stream of the small model, of which a microbatch has 128 tokens."""
CHUNKED: dict[str, Any] = {"sequence_parallel": 1.0, "tp_overlap": 1.0}


def message(tp: float) -> float:
    """Return the seconds of a chunk of the stream to the next rank."""
    way = group_link_numbers(MACHINE, tp, 1.0)
    return float(point_to_point_seconds(way, 2.0 * 128 / tp * HIDDEN))


def product(rows: float, columns: float) -> float:
    """Return the seconds of a product of so many tokens."""
    return float(matmul_seconds(MACHINE, rows, HIDDEN, columns, 2.0))


@pytest.mark.parametrize("tp", [2.0, 3.0, 4.0])
def test_the_slower_of_chunk_and_message_shows_at_each_step(tp: float) -> None:
    work = small_work(tp=tp, **CHUNKED)
    for columns in (32.0, 4096.0, 1e7):
        chunk, whole = product(128 / tp, columns), product(128, columns)
        steps = (tp - 1) * max(chunk, message(tp))
        assert shown_in_chunks(work, HIDDEN, columns) == pytest.approx(
            max(0.0, chunk + steps - whole)
        )


def test_messages_hide_behind_large_products_and_not_behind_small_ones() -> None:
    work = small_work(tp=4.0, **CHUNKED)
    # Of three messages, each beside a chunk that is over long before it.
    small = float(shown_in_chunks(work, HIDDEN, 1.0))
    assert small == pytest.approx(3 * message(4.0), rel=0.05)
    # All that is left is what chunks are slower than a whole product.
    slower = 4 * product(32, 1e7) - product(128, 1e7)
    assert shown_in_chunks(work, HIDDEN, 1e7) == pytest.approx(slower, abs=1e-12)
    assert slower >= 0.0


@settings(max_examples=examples(60), deadline=None)
@given(
    tp=st.sampled_from((2.0, 3.0, 4.0, 8.0)),
    columns=st.floats(1.0, 1e8),
    interference=st.floats(0.0, 1.0),
)
def test_what_shows_is_never_less_than_nothing_nor_more_than_taking_turns(
    tp: float, columns: float, interference: float
) -> None:
    work = with_trainer(small_work(tp=tp, **CHUNKED), interference=interference)
    shown = float(shown_in_chunks(work, HIDDEN, columns))
    chunk = product(128 / tp, columns)
    turns = (tp - 1) * message(tp) + tp * chunk - product(128, columns)
    slowed = (tp - 1) * interference * min(chunk, message(tp))
    assert 0.0 <= shown <= max(0.0, turns) + slowed + 1e-12


def test_without_an_overlap_a_pass_waits_for_all_that_weight_gradients_do_not_hide() -> None:
    work = with_trainer(small_work(tp=4.0, sequence_parallel=1.0), by_pairs=1.0)
    forward, backward = tensor_exchange(work)
    pairs = ((32.0, 16.0), (64.0, 32.0))
    assert tensor_seconds(work, 0.0, pairs) == (forward, backward)
    assert tensor_seconds(work, 1e9, pairs) == (forward, pytest.approx(LEAST_SHOWN * backward))
    # Where rows are not split there is nothing to overlap.
    whole = with_trainer(small_work(tp=4.0, tp_overlap=1.0), by_pairs=1.0)
    assert tensor_seconds(whole, 0.0, pairs) == tensor_exchange(whole)


def test_in_chunks_a_pass_waits_for_four_exchanges_and_inputs_hide_behind_weights() -> None:
    work = with_trainer(small_work(tp=4.0, **CHUNKED), by_pairs=1.0)
    forward, backward = tensor_exchange(work)
    pairs = ((32.0, 16.0), (64.0, 32.0))
    each = forward / EXCHANGES
    chunks = [
        sum(shown_in_chunks(work, depth, columns) for depth, columns in shapes)
        for shapes in (
            [(HIDDEN, 32.0), (16.0, HIDDEN), (HIDDEN, 64.0), (32.0, HIDDEN)],
            [(32.0, HIDDEN), (HIDDEN, 16.0), (64.0, HIDDEN), (HIDDEN, 32.0)],
        )
    ]
    again = backward - EXCHANGES * each
    assert again == pytest.approx(2 * each)
    found = tensor_seconds(work, 0.0, pairs)
    assert found == (pytest.approx(chunks[0]), pytest.approx(chunks[1] + again))
    found = tensor_seconds(work, 1e9, pairs)
    assert found[1] == pytest.approx(chunks[1] + LEAST_SHOWN * again)


def test_routed_experts_alone_gather_at_once() -> None:
    work = with_trainer(small_work(tp=4.0, **CHUNKED), by_pairs=1.0)
    each = tensor_exchange(work)[0] / EXCHANGES
    one = tensor_seconds(work, 0.0, ((32.0, 16.0), None))
    chunks = shown_in_chunks(work, HIDDEN, 32.0) + shown_in_chunks(work, 16.0, HIDDEN)
    assert one[0] == pytest.approx(chunks + 2 * each)


def test_chunks_are_more_kernels() -> None:
    assert chunk_kernels(small_work(tp=4.0, **CHUNKED)) == EXCHANGES * STEP_KERNELS * 3
    assert chunk_kernels(small_work(tp=4.0, sequence_parallel=1.0)) == 0.0
    assert chunk_kernels(small_work(**CHUNKED)) == 0.0
