"""Facts about long sequences that tutorials state, right or wrong, by our formulas."""

from __future__ import annotations

import pytest

from echelon.core.attention_mask import AttentionMask
from echelon.core.placement import Placement
from echelon.cost.context_facts import block_activation_bytes, errors_of_a_split, kv_bytes
from echelon.cost.context_resident import resident_chunks

LONG = 128 * 1024
GIB = 2**30


def test_keys_of_seven_billion_parameters_at_128k_are_64_gib_not_gb() -> None:
    found = kv_bytes(LONG, 4096, 32)
    assert found / GIB == 64.0
    assert found / 1e9 == pytest.approx(68.72, abs=0.01)


def test_keys_of_eighty_wide_blocks_and_what_eight_ranks_hold_of_them() -> None:
    block, whole = kv_bytes(LONG, 8192, 1), kv_bytes(LONG, 8192, 80)
    assert (block / GIB, whole / GIB) == (4.0, 320.0)
    assert whole / 1e9 == pytest.approx(343.6, abs=0.1)
    # 8 of 64 key heads.
    assert kv_bytes(LONG, 8192 // 8, 80) / GIB == 40.0
    # 40 GiB of all blocks on each of 8 ranks: 0.5 GiB of each block, not 5.
    assert (kv_bytes(LONG // 8, 8192, 80) / GIB, kv_bytes(LONG // 8, 8192, 1) / GIB) == (40, 0.5)


def test_a_place_holds_two_chunks_where_it_waits_and_three_where_it_overlaps() -> None:
    place = Placement(kind="zigzag", ring_degree=4, ulysses_degree=1, length=64)
    full = AttentionMask(causal=False)
    assert resident_chunks(place, full, overlapped=False) == 2
    assert resident_chunks(place, full, overlapped=True) == 3


def test_sequence_parallelism_shares_out_what_tensor_ranks_leave_whole() -> None:
    sizes = (2048, 8192, 64)
    assert block_activation_bytes(*sizes) / 1e6 == pytest.approx(1912.6, abs=0.1)
    assert block_activation_bytes(*sizes, tp=8) / 1e6 == pytest.approx(385.9, abs=0.1)
    both = block_activation_bytes(*sizes, tp=8, sequence_parallel=True)
    assert both / 1e6 == pytest.approx(239.1, abs=0.1)
    assert both * 8 == block_activation_bytes(*sizes)


def test_only_a_merge_by_log_sum_exp_is_the_attention_of_one_device() -> None:
    alone, unweighted, merged = errors_of_a_split()
    assert alone > 0.1
    assert unweighted > 0.1
    assert merged < 1e-14
    assert max(errors_of_a_split(ranks=1)) < 1e-14
