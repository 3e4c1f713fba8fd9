"""What a block keeps under any trainer: the published closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.cost.activations.closed_forms import gpt_block_bytes, saved_bytes_of_block
from tests.cost.seconds.small_work import MIXTURE, small_work, with_trainer


def test_sequence_parallelism_shares_out_what_tensor_ranks_leave_whole() -> None:
    sizes = (2048, 8192, 64)
    assert gpt_block_bytes(*sizes) / 1e6 == pytest.approx(1912.6, abs=0.1)
    assert gpt_block_bytes(*sizes, tp=8) / 1e6 == pytest.approx(385.9, abs=0.1)
    both = gpt_block_bytes(*sizes, tp=8, sequence_parallel=True)
    assert both / 1e6 == pytest.approx(239.1, abs=0.1)
    assert both * 8 == gpt_block_bytes(*sizes)


def test_a_trainer_keeps_the_stream_heads_and_inner_values_in_sixteen_bits() -> None:
    work = small_work()
    # N h 8, N (4 query_dim + 4 kv_dim), and N ffn (2 + 2 up).
    dense = 128 * (8 * 64 + 4 * (64 + 32) + 6 * 128)
    assert saved_bytes_of_block(work, mixture=False) == dense
    cut = saved_bytes_of_block(small_work(tp=4.0, sequence_parallel=1.0), mixture=False)
    assert cut == dense / 4
    dropped = with_trainer(work, dropout=1.0, fused_attention=0.0)
    scores = 128 * 8 * 128 * (4 + 1)
    assert saved_bytes_of_block(dropped, mixture=False) == dense + 2 * 128 * 64 + scores


def test_a_mixture_keeps_more_than_the_stream() -> None:
    work = small_work(model=MIXTURE)
    fewer = small_work(model=replace(MIXTURE, top_k=1.0))
    more, less = (saved_bytes_of_block(one, mixture=True) for one in (work, fewer))
    # Each row: itself and its output, gate and up, and what is inside.
    assert more - less == 128 * (2 * 2 * 64 + 2 * 3 * 32)
