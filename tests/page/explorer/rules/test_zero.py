"""How many ranks of a group nodes hold is what lists of ranks say."""

from __future__ import annotations

from itertools import product

from echelon.core.axis import SHARD_AXES
from echelon.core.choices.collective_algorithms import members_per_node
from echelon.core.mesh import Mesh
from echelon.layout.secondary import ranks_per_node as ranks_of_groups
from echelon.page.explorer.rules.zero import even_on_nodes, ranks_per_node, starts_of_groups


def test_ranks_of_a_group_on_each_node_are_those_of_its_list() -> None:
    for start, stride, count, node in product(
        (0, 1, 5), (1, 2, 3, 4, 6), (1, 2, 4, 6, 24, 37, 60), (1, 2, 4, 6, 8)
    ):
        ranks = range(start, start + stride * count, stride)
        assert even_on_nodes(start, stride, count, node) == members_per_node(ranks, node)


def test_groups_that_share_out_are_those_of_the_mesh() -> None:
    for shard, cp, tp, ep, node in product((2, 4, 6), (1, 2), (1, 2, 4), (1, 2, 4), (2, 4, 6, 8)):
        mesh = Mesh(pp=2, dp_replicate=2, dp_shard=shard, cp=cp, tp=tp, ep=ep)
        fold, block = shard * cp, shard * cp * tp
        starts = starts_of_groups(4, block, tp, node)
        found = ranks_per_node(starts, tp, fold, node)
        assert found == ranks_of_groups(mesh.groups(*SHARD_AXES), node)
        for pieces in {1, tp}:
            if block // pieces % ep:
                continue
            starts = starts_of_groups(4, block, pieces * ep, node)
            found = ranks_per_node(starts, pieces * ep, block // pieces // ep, node)
            assert found == ranks_of_groups(mesh.expert_shard_groups(expert_tp=pieces), node)


def test_degrees_may_be_any_numbers() -> None:
    # As somebody may write them: lists of these ranks would have no end.
    many = 10**6
    assert len(starts_of_groups(many, many * many + 1, many, 8)) == 64
    starts = starts_of_groups(many, many * many, 1, 8)
    assert ranks_per_node(starts, 1, many * many, 8) == 8
    assert even_on_nodes(3, many, many * many, 8) == 1
