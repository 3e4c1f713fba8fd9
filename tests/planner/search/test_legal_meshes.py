"""Rows are the meshes of a world, each with what its degrees leave."""

from __future__ import annotations

import numpy as np

from echelon.planner.search.legal_meshes import (
    Legality,
    expert_fold_degrees,
    legal_meshes,
    take_columns,
)
from echelon.planner.search.options import divisors
from tests.planner.requests import small


def test_divisors_rise() -> None:
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1) == (1,)


def test_degrees_of_a_row_make_the_world_and_its_batch() -> None:
    request = small(devices=6)
    found = legal_meshes(request, 6, Legality(request.one_rank_run))
    columns = found.columns
    assert len(found) > 0
    ranks = columns["tp"] * columns["cp"] * columns["pp"] * columns["dp"]
    assert (ranks == 6).all()
    sequences = columns["microbatch"] * columns["microbatches"] * columns["dp"]
    assert (sequences == request.mathematics.global_sequences).all()


def test_experts_fold_over_tensor_ranks_where_they_are_whole() -> None:
    columns = {"expert_tp": np.array([1, 2]), "tp": np.array([2, 2]), "cp": np.array([3, 3])}
    assert expert_fold_degrees(columns, np.array([4, 4])).tolist() == [24, 12]
    assert take_columns(columns, np.array([1]))["expert_tp"].tolist() == [2]
