"""The layout that takes over has the same mathematics, on the same ranks, and another mesh."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.config.rules.finders import require_trainable
from echelon.proof.shrink import shrink
from echelon.proof.whole_run.whole_run import other_layout
from tests.proof.layouts import layout


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}, {"dp": 4, "tp": 2}])
def test_another_mesh_of_the_same_ranks(axes: dict[str, Any]) -> None:
    plan = shrink(layout(**axes), precision="fp64")
    other = other_layout(plan)
    require_trainable(other)
    assert other.same_mathematics(plan)
    assert other.mesh.world_size == plan.mesh.world_size
    assert other.mesh != plan.mesh


@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"tp": 2, "dp": 2}])
def test_matrices_that_are_rounded_are_rounded_under_the_other_layout(axes: Any) -> None:
    """Stages below 3 gather no matrix, and so round none."""
    rounds = {"precision": {"int8_block": 4}, "zero": {"stage": 3, "gather": "int8"}}
    plan = shrink(layout(**axes, **rounds), precision="fp64")
    other = other_layout(plan)
    require_trainable(other)
    assert other != plan
    assert (other.layout.zero.stage, other.layout.zero.gather) == (3, "int8")


def test_one_rank_recomputes() -> None:
    plan = shrink(layout(), precision="fp64")
    assert other_layout(plan).layout.recompute.policy == "full"
