"""Bytes of sums by algorithm: closed forms by hand, by tier, and those of a plan."""

from __future__ import annotations

import pytest

from echelon.cost.bytes.all_reduce import SumGroup, sum_group
from echelon.cost.bytes.sent import bytes_sent
from echelon.cost.bytes.terms import all_reduce_bytes
from tests.proof.run.collectives import summed


def member(algorithm: str, place: int, nodes: tuple[int, ...]) -> SumGroup:
    return SumGroup(algorithm=algorithm, place=place, nodes=nodes)


def test_a_ring_of_odd_sizes_by_hand() -> None:
    # Seven elements in chunks of 1, 2, 2, 2: place 0 does not send chunk 1, nor chunk 2 again.
    sent = [member("ring", place, (0, 0, 0, 0)).bytes(7, 1) for place in range(4)]
    assert sent == [10, 10, 11, 11]
    assert sum(sent) == 2 * 3 * 7


def test_the_backend_is_told_of_as_a_ring_in_the_order_of_ranks() -> None:
    nodes = (0, 0, 1, 1)
    told = [member("backend", place, nodes).bytes_by_tier(8, 4) for place in range(4)]
    each = all_reduce_bytes(32, 4)
    assert told == [(each, 0), (0, each), (each, 0), (0, each)]


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving-doubling", "hierarchical"])
def test_a_group_of_one_sends_nothing(algorithm: str) -> None:
    assert member(algorithm, 0, (0,)).size == 1
    if algorithm != "hierarchical":
        assert member(algorithm, 0, (0,)).bytes(7, 4) == 0


def test_a_hierarchical_plan_sends_as_many_bytes_as_a_flat_one_and_fewer_between_nodes() -> None:
    plan, flat = (summed(dp=4, each=2, algorithm=name) for name in ("hierarchical", "backend"))
    ranks = (0, 1, 2, 3)
    near = far = flat_far = 0
    for rank in ranks:
        own = sum_group(plan, ranks, rank)
        assert (own.algorithm, own.per_node) == ("hierarchical", 2)
        inside, across = own.bytes_by_tier(1024, 4)
        near, far = near + inside, far + across
        flat_far += sum_group(flat, ranks, rank).bytes_by_tier(1024, 4)[1]
    assert (near, far, flat_far) == (4 * 4096, 2 * 4096, 2 * 6144)


def test_a_tree_has_terms_of_its_own() -> None:
    plan = summed(dp=4, each=4, algorithm="tree")
    terms = [
        next(one for one in bytes_sent(plan, rank) if one.name == "gradients") for rank in range(4)
    ]
    least = min(one.bytes for one in terms)
    assert [one.bytes // least for one in terms] == [2, 1, 2, 1]
    assert terms[0].formula == "what is summed, to the parent and to each child"
