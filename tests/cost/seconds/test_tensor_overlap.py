"""What tensor ranks wait for where products run in chunks beside the messages of their rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cost.inputs.group_links import group_link_numbers
from echelon.cost.seconds.links.collectives import point_to_point_seconds
from echelon.cost.seconds.links.exchanges import tensor_exchange
from echelon.cost.seconds.matmul import matmul_seconds
from echelon.cost.seconds.tensor_overlap import (
    EXCHANGES,
    LEAST_SHOWN,
    STEP_KERNELS,
    chunk_kernels,
    shown_in_chunks,
    tensor_seconds,
)
from tests.cost.seconds.small_work import MACHINE, small_work, with_trainer
from tests.walks import examples

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
