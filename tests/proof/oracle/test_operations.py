"""One device rounds attention as kernels do, and sends tokens where it is told to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.models.batch import TokenBatch
from echelon.models.operations import Operations
from echelon.proof.oracle.operations import OracleOperations
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from tests.parallel.layouts import MIXTRAL, NANO, plan_of

T, B, H, K, HD = 6, 2, 4, 2, 4


def batch() -> TokenBatch:
    rows_BT = torch.zeros(B, T, dtype=torch.int64)
    return TokenBatch.from_rows(rows_BT, rows_BT, torch.arange(B), step=0, seed=0)


def drawn(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return q, k, v and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(T, B, H, HD), (T, B, K, HD), (T, B, K, HD), (T * B, H * HD)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
def test_without_rounding_it_is_plain_attention(cap: float | None, window: int | None) -> None:
    shape = replace(NANO, soft_cap=cap, window=window)
    found: list[tuple[torch.Tensor, ...]] = []
    for operations in (Operations(), OracleOperations(rounds=True), OracleOperations(rounds=False)):
        q, k, v, dout = drawn(torch.float64)
        out = operations.attend(q, k, v, shape, batch())
        found.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-13)


def test_operands_are_rounded_and_sums_are_wide() -> None:
    q, k, v, dout = drawn(torch.bfloat16)
    out = OracleOperations(rounds=True).attend(q, k, v, NANO, batch())
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    exact = [one.detach().double().requires_grad_() for one in (q, k, v)]
    right = Operations().attend(exact[0], exact[1], exact[2], NANO, batch())
    wanted = torch.autograd.grad(right, exact, dout.double())
    for one, other in zip((out, *gradients), (right, *wanted), strict=True):
        assert one.dtype == torch.bfloat16
        error = ((one.double() - other).norm() / other.norm()).item()
        assert 1e-4 < error < 2e-2


def test_tokens_go_where_they_are_told_and_the_rule_is_kept_beside() -> None:
    plan = shrink(plan_of(model=MIXTRAL), precision="fp64")
    (right,) = run_oracle(plan, 1)
    layer = min(right.routed)
    told = {i: (one.picked_BTK.clone(), one.kept_BTK.clone()) for i, one in right.routed.items()}
    told[layer][0][0, 0] = (told[layer][0][0, 0] + 1) % 8
    told[layer][1][0, 1, 0] = False
    (other,) = run_oracle(plan, 1, forced=[told])
    routed = other.routed[layer]
    assert torch.equal(routed.picked_BTK, told[layer][0])
    assert torch.equal(routed.kept_BTK, told[layer][1])
    assert torch.equal(routed.right_BTK, right.routed[layer].picked_BTK)
    assert other.loss != right.loss
