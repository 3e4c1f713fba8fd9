"""Ranges of servers cover every bucket once, and no server holds more than another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.layout.slots import server_ranges


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=20), st.integers(1, 9))
def test_servers_share_buckets_out_evenly(sizes: list[int], num_servers: int) -> None:
    """S06: state is sharded over servers by bytes, balanced to one element."""
    ranges = server_ranges(sizes, num_servers)

    for size, parts in zip(sizes, ranges, strict=True):
        assert [element for part in parts for element in part] == [*range(size)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    held = [sum(len(parts[server]) for parts in ranges) for server in range(num_servers)]
    assert max(held) - min(held) <= 1
