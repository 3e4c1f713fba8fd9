"""Tensor ranks compute and send what the lessons about matrices show."""

from __future__ import annotations

import pytest

from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes
from echelon.launch.local.supervisor import RankPool
from echelon.page.lessons.matrices import added, beside, mlp_of, numel
from echelon.page.lessons.tensor.linear import column_layer, row_layer
from tests.page.lessons.tensor import layer_targets
from tests.page.lessons.tensor.layer_targets import LayerNumbers, LayerResults

SIZE = 8
"""Bytes of a number on the ranks of this test, which compute in fp64."""


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.system("S58")
def test_the_engines_layers_give_the_numbers_of_the_lessons(
    degree: int, rank_pool: RankPool
) -> None:
    column, row = column_layer(degree), row_layer(degree)
    mlp = mlp_of(2, 4, 8)
    cut = mlp.columns_then_rows(degree)
    given = LayerNumbers(
        column_x=column.x,
        columns=column.parts,
        row_x=row.inputs,
        rows=row.parts,
        mlp_x=mlp.x,
        first=cut.first,
        second=cut.second,
    )
    ranks: list[LayerResults] = rank_pool.run(
        f"{layer_targets.__name__}:run_layers", given, world_size=degree
    )
    assert tuple(one.column for one in ranks) == column.outputs
    assert {one.gathered for one in ranks} == {beside(column.outputs)}
    assert {one.row for one in ranks} == {added(row.partial_sums)}
    assert {one.mlp for one in ranks} == {cut.output} == {mlp.output}
    # Between the two matrices of the MLP nothing is sent: two sums of outputs and the gather.
    sums = [numel(added(row.partial_sums)), numel(mlp.output)]
    assert ranks[0].events == [
        ("all_gather", "gather", all_gather_bytes(numel(column.outputs[0]) * SIZE, degree)),
        *(("all_reduce", "row.forward", all_reduce_bytes(one * SIZE, degree)) for one in sums),
    ]
