"""bf16 and fp16: products of experts, rows of embeddings and Newton-Schulz have bounds.

Each is computed in float64 of the same rounded inputs. The product of two narrow numbers is exact
in float32 (11 + 11 digits at most), so a sum of k of them in float32, in whatever order, is off by
(k - 1) u32 times the sum of their sizes at most (Higham, "Accuracy and Stability of Numerical
Algorithms", 2002, section 3.1), and a result that is rounded once more by one unit roundoff of its
dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from echelon.core.model_shape import Experts as MixtureKind
from echelon.models.moe import Expert
from echelon.parallel.expert import grouped_matmul
from echelon.parallel.expert.feed_forward import ExpertFeedForward
from echelon.parallel.kernels.expert_kernels import add_grouped_gradient
from echelon.parallel.tensor import TensorSplit
from echelon.proof.evidence.fits import fit_part
from echelon.training.optimizer.muon import newton_schulz
from tests.parallel.buckets import alone, store_of
from tests.parallel.kernels.low_precision.test_low_precision import NARROW, ROUNDOFF, values
from tests.parallel.recorded_gradients import RecordedGradients

DTYPES = pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)

WIDE = 2.0**-24
"""The unit roundoff of float32."""

COUNTS = (13, 0, 25, 8, 0, 17, 9, 32)
"""Rows of each expert."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def by_launch(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return grouped_matmul.grouped_matmul(x, w, ends)


def transposed(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return grouped_matmul.grouped_matmul(x, w.transpose(1, 2).contiguous().transpose(1, 2), ends)


def one_after_the_other(x: torch.Tensor, w_EOI: torch.Tensor) -> torch.Tensor:
    """Return the rows of each expert times its matrix, in the dtype of both."""
    parts = zip(x.split(COUNTS), w_EOI, strict=True)
    return torch.cat([rows @ w.t() for rows, w in parts])


def assert_within(got: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor, terms: int) -> None:
    """Ask that sums of `terms` products are off by no more than their bound, and by no factor.

    `sizes` are the sums of the products' sizes.
    """
    bound = (1 + ROUNDOFF[got.dtype]) * (terms - 1) * WIDE * sizes + ROUNDOFF[
        got.dtype
    ] * exact.abs()
    off = (got.double() - exact).abs()
    assert bool((off <= bound).all()), float((off / bound).nan_to_num(0.0).max())
    larger = (1.02 * exact - exact).abs() > bound
    assert float(larger.double().mean()) > 0.5, "a factor of 1.02 is beyond it"


def test_a_grouped_product_is_summed_wide_and_rounded_once() -> None:
    # The kernel is for bfloat16.
    dtype = torch.bfloat16
    x_RI, w_EOI = values(sum(COUNTS), 48, seed=1).to(dtype), values(8, 32, 48, seed=2).to(dtype)
    ends_E = grouped_matmul.row_ends(COUNTS, x_RI.device)
    exact = one_after_the_other(x_RI.double(), w_EOI.double())
    sizes = one_after_the_other(x_RI.double().abs(), w_EOI.double().abs())
    for product in (by_launch, transposed):
        assert_within(product(x_RI, w_EOI, ends_E), exact, sizes, 48)


def test_a_grouped_gradient_of_weights_sums_the_rows_of_its_expert() -> None:
    dtype = torch.bfloat16
    dy_RO, x_RI = (
        values(sum(COUNTS), 32, seed=3).to(dtype),
        values(sum(COUNTS), 48, seed=4).to(dtype),
    )
    got_EOI = torch.full((len(COUNTS), 32, 48), torch.nan, dtype=dtype)
    ends_E = grouped_matmul.row_ends(COUNTS, x_RI.device)
    add_grouped_gradient(got_EOI, dy_RO, x_RI, ends_E, fresh=True)
    parts = zip(got_EOI, dy_RO.double().split(COUNTS), x_RI.double().split(COUNTS), strict=True)
    for got, dy, x in parts:
        if len(x):
            assert_within(got, dy.t() @ x, dy.abs().t() @ x.abs(), len(x))
        else:
            assert not got.any()


class Experts:
    """Experts of width `width` and `inner` whose weights are rounded to a dtype."""

    def __init__(self, dtype: torch.dtype, width: int = 24, inner: int = 32) -> None:
        self.held: list[Expert] = []
        for number in range(len(COUNTS)):
            kind = MixtureKind(num_experts=len(COUNTS), top_k=1, ffn=inner)
            expert = Expert(width, kind)
            for place, linear in enumerate((expert.gate, expert.up, expert.down)):
                rounded = values(*linear.weight.shape, seed=50 + 3 * number + place, size=0.3)
                linear.weight = nn.Parameter(rounded.to(dtype))
            self.held.append(expert)

    def all(self, name: str) -> torch.Tensor:
        """Return one matrix of all experts in float64, [E, O, I]."""
        return torch.stack([getattr(one, name).weight.detach().double() for one in self.held])


@DTYPES
def test_the_experts_of_a_rank_are_off_by_the_roundings_of_their_steps(dtype: torch.dtype) -> None:
    experts = Experts(dtype)
    rows, gates = values(sum(COUNTS), 24, seed=5).to(dtype), values(sum(COUNTS), seed=6).abs()
    gates = gates.to(dtype)
    split = TensorSplit(group=alone(), sequence_parallel=False, store=RecordedGradients())
    got = ExpertFeedForward.apply(rows, gates, experts.held, COUNTS, split).detach()

    x, g = rows.double(), gates.double()[:, None]
    gate, up = (one_after_the_other(x, experts.all(name)) for name in ("gate", "up"))
    inner = torch.nn.functional.silu(gate) * up * g
    exact = one_after_the_other(inner, experts.all("down"))
    # Gate and up are sums of 24, rounded once; |silu'| <= 1.1; their product with the gate of the
    # row is rounded three times at the most; all of it is what `down` sums 32 of.
    u = ROUNDOFF[dtype]
    off_gate, off_up = (
        u * one.abs() + 24 * WIDE * one_after_the_other(x.abs(), experts.all(name).abs())
        for one, name in ((gate, "gate"), (up, "up"))
    )
    off_inner = g * (
        1.1 * off_gate * (up.abs() + off_up) + torch.nn.functional.silu(gate).abs() * off_up
    )
    off_inner = (1 + 3 * u) * off_inner + 3.01 * u * inner.abs()
    down = experts.all("down").abs()
    bound = one_after_the_other(off_inner, down) + u * exact.abs()
    bound = (1 + u) * bound + 32 * WIDE * one_after_the_other(inner.abs() + off_inner, down)
    off = (got.double() - exact).abs()
    assert bool((off <= bound).all())
    fit, larger = fit_part(got, exact), fit_part(1.02 * got, exact)
    assert fit is not None
    assert larger is not None
    assert abs(fit.factor - 1) <= fit.by_chance + u < abs(larger.factor - 1)


IDS = torch.tensor([3] * 50 + [7, 1, 7, 0] * 5 + [11])
"""Tokens of which some are met often, some once, some never."""


@DTYPES
def test_looking_up_a_row_is_exact_and_adding_up_its_gradients_a_sum(dtype: torch.dtype) -> None:
    weight = nn.Parameter(values(12, 16, seed=7).to(dtype))
    dy_ND = values(len(IDS), 16, seed=8).to(dtype)
    assert torch.equal(weight[IDS].double(), weight.double()[IDS])
    counts_V1 = torch.bincount(IDS, minlength=12)[:, None]
    exact = torch.zeros(12, 16, dtype=torch.float64).index_add_(0, IDS, dy_ND.double())
    sizes = torch.zeros(12, 16, dtype=torch.float64).index_add_(0, IDS, dy_ND.double().abs())
    for used, u in ((torch.float32, WIDE), (dtype, ROUNDOFF[dtype])):
        store = store_of({"table": weight}, used)
        store.start_backward(last=True)
        store.add_rows(weight, IDS, dy_ND)
        got = store.buckets[0].slots[0].gradient
        assert got.dtype == used
        # A row of k gradients takes k - 1 additions, in the dtype in which gradients add up; that
        # of a token which is met once, or never, is exact.
        error = (counts_V1 - 1).clamp(min=0) * u
        assert bool(((got.double() - exact).abs() <= (error / (1 - error)) * sizes).all())
        assert torch.equal(got[11].double(), exact[11])
        assert not got[5].any()


_A, _B, _C = 3.4445, 4.7750, 2.0315
"""The sizes of the coefficients of a step, X -> p(X), p(s) = A s - B s^3 + C s^5."""

_LAMBDA = 6.0
"""Sums of n are off by lambda sqrt(n) u, but for once in 3 x 10^7 of them (Higham and Mary, "A new
approach to probabilistic rounding error analysis", 2019, theorem 3.1)."""


def of_sum(terms: int) -> float:
    """Return the relative error of a sum in float32, with three operations beside it."""
    return (_LAMBDA * terms**0.5 + 3) * WIDE


def steepest(top: float) -> float:
    """Return the largest |p'(s)| for |s| <= top: at 0, at `top`, or where p'' is 0.

    p is odd, so no divided difference of it is larger, and neither is the norm of the derivative of
    X -> p(X) where no singular value of X is above `top` (Higham, "Functions of Matrices", 2008,
    theorem 3.11): what an iterate is off by grows by it at most.
    """
    turn = (3 * _B / (10 * _C)) ** 0.5
    return max(abs(_A - 3 * _B * s**2 + 5 * _C * s**4) for s in (0.0, min(top, turn), top))


def newton_schulz_bound(update: torch.Tensor, steps: int) -> float:
    """Return how far float32 may be from float64, in the norm of Frobenius, to first order in u."""
    x = update.t() if update.shape[0] > update.shape[1] else update
    few, many = x.shape
    x = x / (torch.linalg.norm(x) + 1e-7)
    # An error of the norm scales all singular values s alike: what becomes of them is known.
    s = torch.linalg.svdvals(x).requires_grad_()
    end = s
    for _ in range(steps):
        end = _A * end - _B * end**3 + _C * end**5
    (growth,) = torch.autograd.grad(end.sum(), s)
    of_norm = of_sum(x.numel()) * float((s * growth).detach().norm())
    off = WIDE * float(x.norm())
    for _ in range(steps):
        size, top = float(x.norm()), float(torch.linalg.matrix_norm(x, 2))
        square = x @ x.t()
        polynomial = -_B * square + _C * square @ square
        norm = float(square.norm())
        of_square = of_sum(many) * size**2
        of_polynomial = of_sum(few) * (_B * norm + _C * norm**2)
        of_polynomial += (_B + 2 * _C * top**2) * of_square
        of_product = of_sum(few) * (_A * size + float(polynomial.norm()) * size)
        off = steepest(top) * off + of_polynomial * top + of_product
        x = _A * x + polynomial @ x
    return off + of_norm


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW.values()], ids=["fp32", *NARROW])
def test_newton_schulz_is_off_by_what_its_steps_make_of_roundings(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    update = values(*shape, seed=9).to(dtype)
    got, exact = newton_schulz(update, 5), newton_schulz(update.double(), 5)
    assert got.dtype == torch.float32
    off, bound = float((got.double() - exact).norm()), newton_schulz_bound(update.double(), 5)
    assert off <= bound
    assert bound < 0.01 * float(exact.norm()), (bound, float(exact.norm()))
    coarse = in_bfloat16(update.double(), 5)
    assert float((coarse - exact).norm()) > bound, "steps that are rounded to bf16 are beyond it"


def in_bfloat16(update: torch.Tensor, steps: int) -> torch.Tensor:
    """Return what Newton-Schulz gives whose products are rounded to bfloat16."""
    tall = update.shape[0] > update.shape[1]
    x = (update.t() if tall else update) / update.norm()
    for _ in range(steps):
        square = rounded(x @ x.t())
        x = rounded(_A * x + rounded(_C * square @ square - _B * square) @ x)
    return x.t() if tall else x


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return x rounded to bfloat16."""
    return x.to(torch.bfloat16).double()


def test_the_slope_of_the_polynomial_is_bounded() -> None:
    for top in (0.1, 0.7, 1.0, 1.2024):
        s = torch.linspace(0, top, 20_001, dtype=torch.float64)
        slope = (_A - 3 * _B * s**2 + 5 * _C * s**4).abs()
        assert float(slope.max()) == pytest.approx(steepest(top), rel=1e-6)
