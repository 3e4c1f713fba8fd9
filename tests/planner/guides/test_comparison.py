"""The tables of strategies have computed cells, and name the claims that they mend."""

from __future__ import annotations

import pytest

from echelon.core.axis import Axis
from echelon.core.mesh import Mesh
from echelon.cost.lattice.frameworks import FRAMEWORKS
from echelon.planner.errata.claims import all_claims
from echelon.planner.estimate import OURS
from echelon.planner.guides.comparison import KINDS, across_nodes, compare
from echelon.planner.guides.memory import Split
from echelon.planner.guides.questions import MANY_NODES
from tests.planner.guides.situations import situation


def test_every_strategy_has_what_it_comes_to() -> None:
    rows = {
        row.kind.strategy.name: row
        for row in compare(situation("llama2-7b 16xh100"), FRAMEWORKS[OURS])
    }
    data, first, third = rows["data parallel"], rows["ZeRO 1"], rows["ZeRO 3"]
    assert data.outcome is not None
    assert not data.outcome.fits
    assert data.step_s is None
    assert first.outcome is not None
    assert first.outcome.fits
    assert first.across_nodes == ("dp",)
    assert first.step_s is not None
    assert third.step_s is not None
    assert first.step_s <= third.step_s
    assert rows["expert"].outcome is None


@pytest.mark.parametrize(
    "split",
    [
        Split(dp=2, pp=2, tp=4),
        Split(dp=2, tp=8),
        Split(tp=16),
        Split(dp=4, cp=4),
        Split(dp=2, cp=2, tp=2, pp=2),
        Split(dp=16),
    ],
)
def test_axes_over_nodes_are_those_of_the_mesh(split: Split) -> None:
    mesh = Mesh(pp=split.pp, dp_replicate=split.dp, cp=split.cp, tp=split.tp)
    axes = {"tp": Axis.TP, "cp": Axis.CP, "dp": Axis.DP_REPLICATE, "pp": Axis.PP}
    crossing = {name for name, axis in axes.items() if mesh.crosses_nodes(8, axis)}
    assert set(across_nodes(split, 8)) == crossing


def test_in_our_order_stages_cross_nodes_where_the_guides_grid_has_data_ranks_cross() -> None:
    assert across_nodes(Split(dp=2, pp=2, tp=4), 8) == ("pp",)


def test_claims_are_those_of_the_errata() -> None:
    known = {claim.id for claim in all_claims()}
    assert {name for kind in KINDS for name in kind.claims} <= known
    assert len({kind.strategy.name for kind in KINDS}) == len(KINDS)


def test_racks_that_are_wired_as_nodes_are_walked_as_nodes() -> None:
    rack, racks = situation("gpt3-175b 64xgb200"), situation("gpt3-175b 128xgb200")
    assert (rack.domain, rack.num_domains, rack.tensor_ranks) == (64, 1, 32)
    assert rack.between is None
    assert rack.inside is not None
    assert not MANY_NODES.ask(rack).yes
    found = MANY_NODES.ask(racks)
    assert found.yes
    assert found.why == "32 nodes, joined by the links of a node in 2 x 64 devices"
    assert racks.between is not None
    rows = {row.kind.strategy.name: row for row in compare(racks, FRAMEWORKS[OURS])}
    assert rows["tensor"].outcome is None or rows["tensor"].outcome.split.tp <= 64
