"""How many ranks of a group nodes hold is what lists of ranks say."""

from __future__ import annotations

from collections import Counter
from itertools import product

from echelon.core.axis import SHARD_AXES
from echelon.core.choices.collective_algorithms import members_per_node
from echelon.core.mesh import Mesh, StridedGroups, expert_groups, expert_shard_groups, shard_groups
from echelon.layout.data_groups import ranks_per_node


def test_ranks_of_a_group_on_each_node_are_those_of_its_list() -> None:
    for start, stride, count, node in product(
        (0, 1, 5), (1, 2, 3, 4, 6), (1, 2, 4, 6, 24, 37, 60), (1, 2, 4, 6, 8)
    ):
        groups = StridedGroups(blocks=1, stride=stride, count=count)
        ranks = range(start, start + stride * count, stride)
        on_nodes = Counter(rank // node for rank in ranks)
        assert groups.even_on_nodes(start, node) == members_per_node(ranks, node)
        assert groups.counts_on_nodes(start, node) == list(on_nodes.values())
        assert start or groups.num_nodes(node) == len(on_nodes)


def test_groups_are_those_of_the_mesh() -> None:
    for shard, cp, tp, ep, node in product((2, 4, 6), (1, 2), (1, 2, 4), (1, 2, 4), (2, 4, 6, 8)):
        mesh = Mesh(pp=2, dp_replicate=2, dp_shard=shard, cp=cp, tp=tp, ep=ep)
        listed = mesh.groups(*SHARD_AXES)
        assert shard_groups(mesh).per_node(node) == ranks_per_node(listed, node)
        for pieces in {1, tp}:
            if shard * cp * (tp if pieces == 1 else 1) % ep:
                continue
            listed = mesh.expert_shard_groups(expert_tp=pieces)
            assert expert_shard_groups(mesh, pieces).per_node(node) == ranks_per_node(listed, node)
            listed = mesh.expert_groups(expert_tp=pieces)
            assert expert_groups(mesh, pieces).per_node(node) == ranks_per_node(listed, node)


def test_degrees_may_be_any_numbers() -> None:
    # As somebody may write them: lists of these ranks would have no end.
    many = 10**6
    assert len(StridedGroups(blocks=many, stride=many, count=many).starts(8)) == 8
    assert StridedGroups(blocks=many, stride=1, count=many * many).per_node(8) == 8
    assert StridedGroups(blocks=1, stride=many, count=many * many).even_on_nodes(3, 8) == 1
