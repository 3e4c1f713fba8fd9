"""bf16 and fp16: kernels are off by rounding, which has a bound and a mean of nothing.

Each is computed in float64 of the same rounded inputs. A result that is rounded once is off by at
most half a unit in its last place, element by element; a factor of 1.02 shows in the mean where it
does not in the size of the error.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echelon.models.operations import Operations
from echelon.parallel.kernels.fused import weighted_swiglu
from echelon.parallel.storage.matmul import matmul
from echelon.proof.evidence.fits import fit_part
from echelon.training.optimizer.elementwise import AdamW
from echelon.training.optimizer.trained_ranges import FusedOperands
from tests.parallel.kernels.low_precision.test_low_precision import (
    CASES,
    NARROW,
    ROUNDOFF,
    Alone,
    Case,
    outcome,
    values,
)
from tests.parallel.layouts import ADAMW

DTYPES = pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)


def assert_no_factor(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Ask that a result is the exact one but for rounding.

    One rounding that all elements share, as that of a weight, is a factor of a unit roundoff.
    """
    fit, larger = fit_part(got, exact), fit_part(1.02 * got, exact)
    if fit is not None and larger is not None:
        assert abs(fit.factor - 1) <= fit.by_chance + ROUNDOFF[dtype]
        assert abs(larger.factor - 1) > larger.by_chance + ROUNDOFF[dtype]


@DTYPES
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_has_no_factor(case: Case, dtype: torch.dtype) -> None:
    exact = outcome(case, dtype, torch.float64, Operations())
    for name, got in outcome(case, dtype, dtype, Alone()).items():
        if got.dim() > 1:
            assert_no_factor(got, exact[name], dtype)


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "columns": matmul,
    "rows of a part": lambda x, w: matmul(x[:, :24].contiguous(), w[:, :24].contiguous()),
    "weight gradient": lambda x, w: x[: len(w)].t() @ w,
}


@DTYPES
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_is_summed_wide_and_rounded_once(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    x, w = values(80, 48, seed=21).to(dtype), values(64, 48, seed=22).to(dtype)
    got, exact = product(x, w), product(x.double(), w.double())
    # float32 sums of 80 products, beside the rounding of the result.
    sums = product(x.double().abs(), w.double().abs()) * 80 * 2.0**-24
    assert bool(((got.double() - exact).abs() <= exact.abs() * ROUNDOFF[dtype] + sums).all())
    assert_no_factor(got, exact, dtype)


@DTYPES
def test_what_experts_make_of_gates_is_rounded_a_few_times(dtype: torch.dtype) -> None:
    gate_up, gates = values(90, 64, seed=23).to(dtype), values(90, seed=24).abs().to(dtype)
    got = weighted_swiglu(gate_up, gates)
    exact = weighted_swiglu(gate_up.double(), gates.double())
    # silu, its product with up, and that with the gate: each is rounded once at the most.
    bound = 3.01 * ROUNDOFF[dtype] * exact.abs() + 3 * torch.finfo(dtype).tiny
    assert bool(((got.double() - exact).abs() <= bound).all())
    assert_no_factor(got, exact, dtype)


@DTYPES
def test_a_master_copy_is_updated_as_exactly_as_float32_is(dtype: torch.dtype) -> None:
    gradient = values(4096, seed=25).to(dtype).float()
    results: dict[torch.dtype, torch.Tensor] = {}
    for used in (torch.float32, torch.float64):
        target = values(4096, seed=26).to(dtype).to(used)
        rule = AdamW(ADAMW)
        state = [torch.zeros_like(target), torch.zeros_like(target)]
        for count in (1, 2, 3):
            rule.start_update(count)
            rule.update(
                FusedOperands(
                    targets=[target],
                    gradients=[gradient.to(used)],
                    state=[[one] for one in state],
                    rate=1e-2,
                    weight_decay=0.1,
                )
            )
        results[used] = target
    exact = results[torch.float64]
    # Three updates of at most 0.01 each and the copy itself, some twenty roundings.
    bound = 20 * 2.0**-24 * (exact.abs() + 0.03)
    assert bool(((results[torch.float32].double() - exact).abs() <= bound).all())
