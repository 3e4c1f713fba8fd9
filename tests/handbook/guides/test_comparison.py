"""The tables of strategies have computed cells, and name the claims that they mend."""

from __future__ import annotations

import pytest

from echelon.core.axis import Axis
from echelon.core.mesh import Mesh
from echelon.cost.seconds.trainers import FRAMEWORKS, OURS
from echelon.handbook.errata.claims import all_claims
from echelon.handbook.guides.practices import STRATEGY_KINDS, across_nodes, compare_strategies
from echelon.planner.predict.split_memory import GuideSplit
from tests.handbook.guides.situations import situation


@pytest.mark.system("S50")
def test_every_strategy_has_what_it_comes_to() -> None:
    rows = {
        row.kind.strategy.name: row
        for row in compare_strategies(situation("llama2-7b 16xh100"), FRAMEWORKS[OURS])
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
        GuideSplit(dp=2, pp=2, tp=4),
        GuideSplit(dp=2, tp=8),
        GuideSplit(tp=16),
        GuideSplit(dp=4, cp=4),
        GuideSplit(dp=2, cp=2, tp=2, pp=2),
        GuideSplit(dp=16),
    ],
)
def test_axes_over_nodes_are_those_of_the_mesh(split: GuideSplit) -> None:
    mesh = Mesh(pp=split.pp, dp_replicate=split.dp, cp=split.cp, tp=split.tp)
    axes = {"tp": Axis.TP, "cp": Axis.CP, "dp": Axis.DP_REPLICATE, "pp": Axis.PP}
    crossing = {
        name
        for name, axis in axes.items()
        if any(len({rank // 8 for rank in group}) > 1 for group in mesh.groups(axis))
    }
    assert set(across_nodes(split, 8)) == crossing


def test_in_our_order_stages_cross_nodes_where_the_guides_grid_has_data_ranks_cross() -> None:
    assert across_nodes(GuideSplit(dp=2, pp=2, tp=4), 8) == ("pp",)


def test_claims_are_those_of_the_errata() -> None:
    known = {claim.id for claim in all_claims()}
    assert {name for kind in STRATEGY_KINDS for name in kind.claims} <= known
    assert len({kind.strategy.name for kind in STRATEGY_KINDS}) == len(STRATEGY_KINDS)
