"""Kinds of context parallelism: chunks of a ring, ranks of an exchange, names of other tools."""

from __future__ import annotations

from echelon.core.choices.context_kinds import (
    CONTEXT_KINDS,
    PLAIN_CONTEXT_KIND,
    context_kind_index,
    kinds_with_degree,
)


def test_a_zigzag_has_two_chunks_of_each_place_of_a_ring() -> None:
    assert [CONTEXT_KINDS["ring"].chunks(n) for n in (1, 2, 4)] == [1, 4, 8]
    assert [CONTEXT_KINDS["striped"].chunks(n) for n in (1, 2, 4)] == [1, 1, 1]


def test_heads_are_exchanged_among_none_all_or_as_many_as_a_plan_says() -> None:
    found = {name: kind.exchange_degree(8, 2) for name, kind in CONTEXT_KINDS.items()}
    assert found == {"ring": 1, "striped": 1, "gathered": 1, "ulysses": 8, "ulysses-ring": 2}
    assert kinds_with_degree() == ["ulysses-ring"]


def test_a_kind_has_a_number_and_the_names_of_tools() -> None:
    assert [context_kind_index(name) for name in CONTEXT_KINDS] == list(range(len(CONTEXT_KINDS)))
    assert context_kind_index(PLAIN_CONTEXT_KIND) == 0
    assert CONTEXT_KINDS.of_tool("megatron")["p2p"] == "ring"
    assert CONTEXT_KINDS.of_tool("megatron")["all_gather"] == "gathered"
    assert CONTEXT_KINDS.of_tool("none") == {}
