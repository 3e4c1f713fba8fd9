"""Bytes of sums by algorithm: closed forms by hand, by tier, and those of a plan."""

from __future__ import annotations

import pytest

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.all_reduce import SumGroup, sum_group
from echelon.cost.bytes.sent import bytes_sent
from echelon.cost.bytes.terms import all_reduce_bytes
from echelon.cost.bytes.transient import transient_terms
from echelon.cost.peak.rank_peak import PeakWalk
from echelon.layout.buckets import plan_buckets, slice_elements
from echelon.layout.stage import rank_part
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


def test_what_arrives_by_hand() -> None:
    # Seven elements in chunks of 1, 2, 2, 2: all but the chunk of its own come to each place.
    assert [member("ring", place, (0,) * 4).arriving_elements(7) for place in range(4)] == [2] * 4
    assert [member("tree", place, (0,) * 3).arriving_elements(7) for place in range(3)] == [7, 0, 0]
    halves = [member("halving-doubling", place, (0,) * 4) for place in range(4)]
    assert [one.arriving_elements(7) for one in halves] == [3, 3, 4, 4]
    # Of 9, a node's members keep 4 and 5; a chunk of either, across nodes, is smaller.
    nodes = [member("hierarchical", place, (0, 0, 1, 1)) for place in range(4)]
    assert [one.arriving_elements(9) for one in nodes] == [4, 5, 4, 5]
    assert nodes[0].most_arriving_elements(9) == 5
    assert member("backend", 0, (0,) * 4).arriving_elements(7) == 0


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1}])
def test_a_plan_holds_what_arrives_while_gradients_are_summed(zero: dict[str, int]) -> None:
    degree = 4 if zero["stage"] == 0 else 8
    mesh = {"dp_replicate": 4, "dp_shard": degree // 4}
    plan, flat = (
        summed(each=8, algorithm=one, dp=degree, mesh=mesh, zero=zero)
        for one in ("tree", "backend")
    )
    buckets = plan_buckets(plan, rank_part(plan, 0))
    sliced = zero["stage"] > 0
    largest = max(slice_elements(plan, b) if sliced else b.num_elements for b in buckets)
    size = DTYPE_BYTES[plan.mathematics.precision.reduction]
    held = [{one.name: one.bytes for one in transient_terms(one, 0)} for one in (plan, flat)]
    assert held[0].pop("arriving chunks of sums") == largest * size
    assert held[0] == held[1]
    peaks = [PeakWalk(one).peak(0).bytes for one in (plan, flat)]
    assert peaks[1] <= peaks[0] <= peaks[1] + largest * size


def test_slices_by_tier_by_hand() -> None:
    # Four slices of 5 bytes on two nodes: three are sent, inside and across.
    nodes = (0, 0, 1, 1)
    sent = {
        name: [member(name, place, nodes).slice_bytes_by_tier(5) for place in range(4)]
        for name in ("backend", "tree", "ring", "halving-doubling", "hierarchical")
    }
    assert sent["backend"] == sent["tree"] == [(5, 10)] * 4
    assert sent["ring"] == [(15, 0), (0, 15), (15, 0), (0, 15)]
    assert sent["halving-doubling"] == [(5, 10)] * 4
    assert sent["hierarchical"] == [(10, 5)] * 4


def test_slices_beside_a_sum_by_hand() -> None:
    four, six = (0, 0, 1, 1), (0, 0, 0, 1, 1, 1)
    beside = [
        member(name, 0, four).slices_beside()
        for name in ("backend", "ring", "halving-doubling", "hierarchical")
    ]
    assert beside == [3, 2, 3, 3]
    # Two others of the node send two slices each.
    assert member("hierarchical", 0, six).slices_beside() == 4
    assert member("ring", 0, (0, 1)).slices_beside() == 1


def collective_tiers(plan: Plan, rank: int) -> dict[str, tuple[int, int]]:
    """Return what a rank sends in a step over each axis: inside of its node, and beyond.

    Only of axes all of whose terms tell.
    """
    found: dict[str, tuple[int, int]] = {}
    terms = bytes_sent(plan, rank)
    for axis in {term.axis for term in terms if term.far is not None}:
        near = far = 0
        for term in (one for one in terms if one.axis == axis):
            if term.far is None:
                break
            beyond = term.count * term.far // term.every
            near, far = near + term.bytes - beyond, far + beyond
        else:
            found[axis] = near, far
    return found


def test_a_plan_with_slices_on_two_nodes_sends_half_as_much_between_them() -> None:
    zero = {"stage": 3}
    plan, flat = (
        summed(dp=4, each=2, algorithm=one, zero=zero) for one in ("hierarchical", "backend")
    )
    for rank in range(4):
        (near, far), (flat_near, flat_far) = (
            collective_tiers(one, rank)["dp_shard"] for one in (plan, flat)
        )
        assert near + far == flat_near + flat_far
        assert 2 * far == flat_far > 0
        # The row of a step and the count of tokens go straight.
        assert {axis for axis in collective_tiers(plan, rank)} == {"dp_shard", "dp", "world"}


def test_rows_of_tensor_ranks_on_two_nodes_send_less_between_them() -> None:
    for scattered in (False, True):
        plans = [
            summed(tp=4, each=2, algorithm=one, sequence_parallel=scattered)
            for one in ("hierarchical", "backend")
        ]
        found = [[collective_tiers(one, rank)["tp"] for rank in range(4)] for one in plans]
        total, flat = (tuple(map(sum, zip(*one, strict=True))) for one in found)
        assert sum(total) == sum(flat)
        assert total[1] < flat[1]


def test_a_plan_holds_what_arrives_while_slices_and_rows_are_summed() -> None:
    names = ("hierarchical", "backend")
    shards = [summed(dp=4, each=2, algorithm=one, zero={"stage": 2}) for one in names]
    found = [{term.name: term.bytes for term in transient_terms(one, 0)} for one in shards]
    largest = max(
        slice_elements(shards[0], b) for b in plan_buckets(shards[0], rank_part(shards[0], 0))
    )
    size = DTYPE_BYTES[shards[0].mathematics.precision.reduction]
    # Three slices at a time, and no longer three for each bucket that is under way.
    assert found[0].pop("arriving chunks of sums") == 3 * largest * size
    assert found[0].get("gradients being summed", 0) < found[1]["gradients being summed"]
    rows = [summed(tp=4, each=2, algorithm=one) for one in names]
    stream = rows[0].local_tokens * rows[0].model.hidden
    peaks = [PeakWalk(one).peak(0).bytes for one in rows]
    element = DTYPE_BYTES[rows[0].mathematics.precision.parameters]
    assert peaks[0] - peaks[1] == stream // 2 * element
