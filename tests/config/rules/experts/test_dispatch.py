"""Two hops: ranks on several nodes, as many on each, and nothing padded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.problems import SPARSE, problems_of, write
from tests.config.suggestions import taken

TWO_NODES = ["cluster.preset=16xh100", "mesh.dp_shard=16", "mesh.ep=16"]


WIDE = ["model.experts.num_experts=16", *TWO_NODES]


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    return write(tmp_path, SPARSE)


def test_what_mends_another_fault_only_is_no_advice(sparse: Path) -> None:
    """Two ranks on one node would use dp_shard, but two hops would still cross no nodes."""
    sets = ["mesh.dp_shard=8", "mesh.ep=1", "experts.dispatch=two-hop"]
    found = problems_of(sparse, sets)
    assert set(found) == {"two-hop-needs-nodes", "no-effect"}
    assert found["two-hop-needs-nodes"].suggestions == ('experts.dispatch = "flat"',)


def test_two_hops_need_as_many_ranks_on_each_of_several_nodes(sparse: Path) -> None:
    two_hop = "experts.dispatch=two-hop"
    assert problems_of(sparse, [*WIDE, two_hop]) == {}
    eight = [*WIDE, "mesh.ep=8", two_hop]
    found = problems_of(sparse, [s for s in eight if s != "mesh.ep=16"])
    assert "the 8 ranks from 0 to 7" in found["two-hop-needs-nodes"].message
    assert "mesh.ep = 16" in found["two-hop-needs-nodes"].suggestions
    padded = [*WIDE, two_hop, "experts.padded=true", "experts.capacity_factor=2"]
    found = problems_of(sparse, padded)
    assert list(found) == ["padded-travels-flat"]
    for advice in found["padded-travels-flat"].suggestions:
        assert problems_of(sparse, taken(advice, padded)) == {}
