"""The MLP of the lessons: both orders of cuts give the numbers of one device."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.page.lessons.matrices import beside, mlp_of, rectified


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_both_orders_give_what_one_device_computes(degree: int) -> None:
    mlp = mlp_of(2, 4, 8)
    inner = np.maximum(0, np.array(mlp.x) @ np.array(mlp.first))
    alone = tuple(map(tuple, (inner @ np.array(mlp.second)).tolist()))
    assert mlp.output == alone
    assert mlp.columns_then_rows(degree).output == alone
    assert beside(mlp.rows_then_columns(degree).outputs) == alone


@pytest.mark.parametrize("degree", [2, 4])
def test_an_activation_of_summands_is_wrong_and_one_of_features_is_right(degree: int) -> None:
    mlp = mlp_of(2, 4, 8)
    assert beside(mlp.columns_then_rows(degree).active) == rectified(mlp.inner)
    assert mlp.rows_then_columns(degree).num_wrong > 0
    assert mlp.rows_then_columns(1).num_wrong == 0
