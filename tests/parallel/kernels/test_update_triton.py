"""Updates in one pass, in Triton, against float64 and beside PyTorch's own fused ones.

Bounds are derived, with u half a step of float32 around 1 (2^-24), for one update of given state.
The gradient is scaled with one rounding. A mean is of a difference, a constant and a sum: 4 u of
(|m| + |g|). A mean square has two products more: 5 u of itself, no term being negative. The step is
their quotient, over a root (which halves an error), a product and a sum, with constants rounded
once: 12 u of step (|m| + |g|) / root. What is updated has three roundings of its own: of the
constant that it is kept by, the product, and the sum. PyTorch's differs in the order of products:
the same bounds hold for it.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from echelon.core.plan import Optimizer
from echelon.training.optimizer.elementwise import AdamW, fused_sgd
from echelon.training.optimizer.trained_ranges import FusedOperands
from tests.parallel.kernels.interpreted import DEVICE, DTYPES, ROUNDED, given, load_kernels

U = 2.0**-24
LENGTH = 2500  # two programs and a part of one
BETAS = Optimizer(beta1=0.9, beta2=0.95, eps=1e-8)
RATE, DECAY = 3e-4, 0.1

State = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the kernels."""
    return load_kernels(monkeypatch, "update")


def state(count: int) -> State:
    """Return moments as they are before update number `count`: zero before the first."""
    mean, square = (given(LENGTH, dtype=torch.float32, seed=seed) for seed in (2, 3))
    return (mean * (count > 1), square.square() * (count > 1))


def assert_published(values: torch.Tensor, target: torch.Tensor) -> None:
    """Assert that parameters are their master copies, rounded once (the interpreter cuts bf16)."""
    if DEVICE.type == "cuda" or values.dtype != torch.bfloat16:
        assert torch.equal(values, target.to(values.dtype))
        return
    off = (values.double() - target.double()).abs()
    assert (off <= 2 * ROUNDED[torch.bfloat16] * target.double().abs()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 100_000])
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_adamw_is_its_formula_and_pytorchs(
    kernels: ModuleType, dtype: torch.dtype, count: int, factor: float, decay: float
) -> None:
    target, gradient = given(LENGTH, dtype=torch.float32), given(LENGTH, dtype=dtype, seed=5)
    mean, square = state(count)
    p, g, m, v = (x.double() for x in (target, gradient, mean, square))
    g = g * factor
    m_right = BETAS.beta1 * m + (1 - BETAS.beta1) * g
    v_right = BETAS.beta2 * v + (1 - BETAS.beta2) * g * g
    root = (v_right / (1 - BETAS.beta2**count)).sqrt() + BETAS.eps
    step = RATE / (1 - BETAS.beta1**count)
    p_right = p * (1 - RATE * decay) - step * m_right / root
    sizes = m.abs() + g.abs()
    right = (p_right, m_right, v_right)
    bounds = (3 * U * p.abs() + 12 * U * step * sizes / root, 4 * U * sizes, 5 * U * v_right)

    theirs = tuple(x.clone() for x in (target, mean, square))
    rule = AdamW(BETAS)
    rule.start_update(count)
    scaled = gradient.float() * factor
    rule.update(
        FusedOperands(
            targets=[theirs[0]],
            gradients=[scaled],
            state=[[theirs[1]], [theirs[2]]],
            rate=RATE,
            weight_decay=decay,
        )
    )
    values, before = torch.zeros_like(gradient), gradient.clone()
    numbers = (BETAS.beta1, BETAS.beta2, BETAS.eps, RATE, factor, decay)
    kernels.adamw(target, gradient, (mean, square), values, numbers, count)
    for found in ((target, mean, square), theirs):
        for got, exact, bound in zip(found, right, bounds, strict=True):
            assert ((got.double() - exact).abs() <= bound).all()
    assert torch.equal(gradient, before)
    assert_published(values, target)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.95])
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_sgd_is_its_formula_and_pytorchs(
    kernels: ModuleType, dtype: torch.dtype, momentum: float, decay: float
) -> None:
    """A step is of three terms, each with a product and a sum: 6 u of the sum of their sizes."""
    target, gradient = given(LENGTH, dtype=torch.float32), given(LENGTH, dtype=dtype, seed=5)
    momenta, factor, rate = given(LENGTH, dtype=torch.float32, seed=2), 0.3, 0.1
    p, g, m = (x.double() for x in (target, gradient, momenta))
    sizes = (factor * g).abs() + decay * p.abs() + momentum * m.abs()
    step = factor * g + decay * p + momentum * m
    p_right, m_right = p - rate * step, step if momentum else m
    bounds = (2 * U * p.abs() + 8 * U * rate * sizes, 6 * U * sizes)

    theirs = (target.clone(), momenta.clone())
    scaled = gradient.float() * factor
    operands = FusedOperands(
        targets=[theirs[0]], gradients=[scaled], state=(), rate=rate, weight_decay=decay
    )
    fused_sgd(operands, [theirs[1]], momentum)
    values = torch.zeros_like(gradient)
    kernels.sgd(target, gradient, (momenta,), values, (momentum, rate, factor, decay))
    for found in ((target, momenta), theirs):
        for got, exact, bound in zip(found, (p_right, m_right), bounds, strict=True):
            assert ((got.double() - exact).abs() <= bound).all()
    assert_published(values, target)


@pytest.mark.parametrize("cut", [1, 1024, 1777])
def test_how_a_slice_is_cut_changes_no_bit(kernels: ModuleType, cut: int) -> None:
    gradient = given(LENGTH, dtype=torch.bfloat16, seed=5)
    numbers = (BETAS.beta1, BETAS.beta2, BETAS.eps, RATE, 0.3, DECAY)
    found: list[tuple[torch.Tensor, ...]] = []
    for parts in ([slice(0, LENGTH)], [slice(0, cut), slice(cut, LENGTH)]):
        target, values = given(LENGTH, dtype=torch.float32), torch.zeros_like(gradient)
        mean, square = state(7)
        for part in parts:
            moments = (mean[part], square[part])
            kernels.adamw(target[part], gradient[part], moments, values[part], numbers, 7)
        found.append((target, mean, square, values))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_nothing_beside_a_range_is_touched(kernels: ModuleType) -> None:
    whole = [torch.full((LENGTH + 4,), 5.0, device=DEVICE) for _ in range(5)]
    inner = [one[2:-2] for one in whole]
    numbers = (BETAS.beta1, BETAS.beta2, BETAS.eps, RATE, 1.0, DECAY)
    kernels.adamw(inner[0], inner[1], (inner[2], inner[3]), inner[4], numbers, 3)
    for one in whole:
        assert one[:2].tolist() == one[-2:].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(kernels: ModuleType, poison: float) -> None:
    gradient = torch.ones(8, dtype=torch.bfloat16, device=DEVICE)
    gradient[3] = poison
    target, mean, square = (torch.ones(8, device=DEVICE) for _ in range(3))
    numbers = (BETAS.beta1, BETAS.beta2, BETAS.eps, RATE, 1.0, DECAY)
    with np.errstate(invalid="ignore"):  # in the interpreter; a GPU tells nobody
        kernels.adamw(target, gradient, (mean, square), None, numbers, 3)
    assert target.isfinite().tolist() == [place != 3 for place in range(8)]
