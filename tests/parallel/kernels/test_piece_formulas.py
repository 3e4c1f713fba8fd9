"""Formulas of pieces: partial sums, and what must hold whatever provides them."""

from __future__ import annotations

import pytest
import torch

from echelon.cost.bytes.piece_traffic import MOST_PARTIAL_SUMS
from echelon.parallel.kernels import piece_formulas
from tests.parallel.buckets import matrix


@pytest.mark.parametrize("rows", [1, 2, MOST_PARTIAL_SUMS, MOST_PARTIAL_SUMS + 1, 1500])
def test_partial_sums_are_of_all_rows_and_few(rows: int) -> None:
    values = torch.ones(rows, 3)
    sums = piece_formulas.partial_sums(values, whole=False)
    each, count = piece_formulas.rows_and_sums(rows)
    assert (len(sums), count) == (len(sums), -(-rows // each))
    assert len(sums) <= MOST_PARTIAL_SUMS
    assert sums.sum(0).tolist() == [rows] * 3
    assert piece_formulas.partial_sums(values, whole=True).tolist() == [[rows] * 3]


def test_a_sum_is_rounded_before_it_is_normed() -> None:
    x, y = (matrix(5, 8, seed=seed).detach().bfloat16() for seed in (1, 2))
    weight = torch.ones(8, dtype=torch.bfloat16)
    total, normed, inverse = piece_formulas.add_norm(x, y, weight, 1e-5)
    assert torch.equal(total, x + y)
    for got, right in zip((normed, inverse), piece_formulas.norm(x + y, weight, 1e-5), strict=True):
        assert torch.equal(got, right)


def test_a_rotation_back_undoes_one_forwards() -> None:
    x = matrix(3, 2, 4, 6).detach()
    angles = matrix(3, 3, seed=1).detach()
    tables = (angles.cos(), angles.sin())
    turned = piece_formulas.rotate(x, *tables, 1)
    torch.testing.assert_close(piece_formulas.rotate(turned, *tables, -1), x)


def test_the_loss_of_padding_alone_is_finite() -> None:
    logits = torch.full((2, 4), float("-inf"))
    maximum, total, _ = piece_formulas.loss_statistics(logits, torch.zeros(2, dtype=torch.long))
    assert maximum.isfinite().all()
    assert not total.any()
