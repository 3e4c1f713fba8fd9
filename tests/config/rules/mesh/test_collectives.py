"""Which algorithm can sum the gradients of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from tests.config.cluster.boxes import BOXES, LINKS
from tests.config.problems import SMALL, problems_of, write

SUMS = "collectives.algorithm"
HEADS = ("model.heads=8", "model.kv_heads=8")
TWO_NODES = BOXES.replace("= 4", "= 2").replace("[device]", 'backend = "gloo"\n[device]')
TWO_NODES += LINKS.replace("degree = 4", "degree = 2") + "bandwidth = 1e9\n"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


def replicas(count: int) -> list[str]:
    return [f"mesh.dp_replicate={count}", f"batch.global_sequences={4 * count}"]


def test_algorithms_made_of_messages_need_gloo(small: Path) -> None:
    sets = [f"{SUMS}=ring", "cluster.preset=8xh100", "mesh.dp_replicate=8"]
    found = problems_of(small, [*sets, "batch.global_sequences=8"])
    assert found["own-sums-need-gloo"].suggestions == (f'{SUMS} = "backend"',)


def test_halving_needs_a_power_of_two(small: Path) -> None:
    found = problems_of(small, [f"{SUMS}=halving-doubling", *replicas(3)])
    assert list(found) == ["halving-needs-power-of-two"]
    assert "3 ranks" in found["halving-needs-power-of-two"].message
    assert "are 2 and 4" in found["halving-needs-power-of-two"].message
    assert not problems_of(small, [f"{SUMS}=halving-doubling", *replicas(4)])


def test_a_hierarchy_needs_several_ranks_on_several_nodes(small: Path) -> None:
    found = problems_of(small, [f"{SUMS}=hierarchical", *replicas(2)])
    assert list(found) == ["hierarchy-needs-even-nodes"]
    assert "the 2 ranks" in found["hierarchy-needs-even-nodes"].message
    assert "on 1 node of" in found["hierarchy-needs-even-nodes"].message


def test_an_algorithm_for_sums_that_nobody_makes_has_no_effect(small: Path) -> None:
    assert list(problems_of(small, [f"{SUMS}=ring"])) == ["no-effect"]
    assert not problems_of(small, [f"{SUMS}=backend"])
    slices = ["mesh.dp_shard=2", "zero.stage=2", "batch.global_sequences=8"]
    for algorithm in ("ring", "halving-doubling"):
        assert not problems_of(small, [f"{SUMS}={algorithm}", *slices])
    found = problems_of(small, [f"{SUMS}=tree", *slices])
    assert list(found) == ["no-effect"]
    assert "slices, which a tree neither sums nor gathers" in found["no-effect"].message


def test_rows_of_tensor_ranks_and_slices_that_cross_nodes_have_a_hierarchy(tmp_path: Path) -> None:
    write(tmp_path, TWO_NODES, "boxes.toml")
    file = write(tmp_path, SMALL + '[cluster]\nfile = "boxes.toml"')
    assert not problems_of(file, [f"{SUMS}=hierarchical", "mesh.tp=4", *HEADS])
    slices = ["mesh.dp_shard=4", "zero.stage=3", "batch.global_sequences=16"]
    assert not problems_of(file, [f"{SUMS}=hierarchical", *slices])
    assert load_job(str(file), slices).plan.layout.collectives.algorithm == "hierarchical"
    found = problems_of(file, [f"{SUMS}=hierarchical", "mesh.tp=2", *HEADS])
    assert list(found) == ["hierarchy-needs-even-nodes"]
    assert "the 2 ranks that hold pieces of the same layers" in str(found)


def test_auto_is_hierarchical_where_groups_cross_nodes_over_gloo(tmp_path: Path) -> None:
    here = write(tmp_path, SMALL)
    assert load_job(str(here), replicas(4)).plan.layout.collectives.algorithm == "backend"
    write(tmp_path, TWO_NODES, "boxes.toml")
    file = write(tmp_path, SMALL + '[cluster]\nfile = "boxes.toml"')
    assert load_job(str(file), replicas(4)).plan.layout.collectives.algorithm == "hierarchical"
    one_each = ["mesh.tp=2", *replicas(2)]
    assert load_job(str(file), one_each).plan.layout.collectives.algorithm == "backend"
