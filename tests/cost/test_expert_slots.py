"""The rows that stand ready for an expert, against all ways in which its tokens can come."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from echelon.cost.expert_slots import slots_per_expert


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
