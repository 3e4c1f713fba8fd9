"""A factor is fitted beside rounding, with how well it is known."""

from __future__ import annotations

import pytest
import torch

from echelon.proof.evidence.fits import (
    FEW,
    NUM_STANDARD_ERRORS,
    NUM_STANDARD_ERRORS_OF_FEW,
    fit_part,
    sizeable,
)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


@pytest.mark.parametrize("factor", [1.0, 1.02, 0.98, -1.0])
def test_a_factor_within_rounding_is_known_to_a_thousandth(factor: float) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).double()
    fit = fit_part(rounded(factor * x), x)
    assert fit is not None
    assert abs(fit.factor - factor) < fit.by_chance < 1e-3
    assert fit.by_chance == NUM_STANDARD_ERRORS * fit.error


def test_errors_that_rows_share_count_by_row() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=generator).double()
    by_row = x * (1 + 0.01 * torch.randn(32, 1, generator=generator).double())
    alone = x * (1 + 0.01 * torch.randn(32, 64, generator=generator).double())
    shared, single = fit_part(by_row, x), fit_part(alone, x)
    assert shared is not None
    assert single is not None
    assert shared.error > 4 * single.error
    assert abs(shared.factor - 1) < shared.by_chance


def test_each_element_of_a_vector_stands_for_itself() -> None:
    x = torch.randn(16, generator=torch.Generator().manual_seed(2)).double()
    for factor in (1.0, 1.1):
        fit = fit_part(rounded(factor * x), x)
        assert fit is not None
        assert fit.clusters == 16
        assert abs(fit.factor - factor) < fit.by_chance < 0.03


def test_few_rows_are_trusted_less_and_fewer_not_at_all() -> None:
    x = torch.randn(FEW - 1, 40).double()
    fit = fit_part(x, x)
    assert fit is not None
    assert fit.by_chance == NUM_STANDARD_ERRORS_OF_FEW * fit.error
    assert fit_part(x[:4], x[:4]) is None
    assert fit_part(x[0, :4], x[0, :4]) is None


def test_what_is_next_to_zero_is_left_out() -> None:
    large, tiny = torch.ones(4), torch.full((4,), 1e-6)
    assert [name for name, _ in sizeable({"large": large, "tiny": tiny})] == ["large"]
