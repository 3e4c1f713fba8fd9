"""Operators of the pieces: on shapes, compiled, and as PyTorch wants its operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.choices.kernels import KernelProvider
from echelon.core.piece_sizes import PROOF_PIECES
from echelon.models.rotary import rotary_tables
from echelon.parallel.kernels import cross_entropy, fused
from echelon.parallel.kernels.cross_entropy import LabelRows, RowStatistics
from echelon.parallel.kernels.piece_operators import PIECES
from echelon.rehearsal.work import kernel_work
from tests.parallel.buckets import matrix
from tests.parallel.layouts import NANO

ROWS, WIDTH, EPS = 9, 12, 1e-5


def given(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random values."""
    return matrix(*shape, seed=seed).detach().to(dtype)


def calls(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Return arguments for each operator but the last, which says who provides it."""
    x, y, dy = (given(ROWS, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    weight, inverse = given(WIDTH, seed=4, dtype=dtype), given(ROWS, 1, seed=5).abs()
    qkv = given(3, 3, 8, NANO.head_dim, dtype=dtype)
    q, k, v = qkv.split((4, 2, 2), dim=2)
    both = qkv[:, :, :6]
    tables = list(rotary_tables(NANO, torch.arange(3), torch.float32))
    norms = [given(NANO.head_dim, seed=seed, dtype=dtype) for seed in (6, 7)]
    per_head = given(3, 3, 6, 1, seed=8).abs()
    gate_up, gates = given(ROWS, 2 * WIDTH, dtype=dtype), given(ROWS, seed=9)
    return {
        "piece_norm": (x, weight, EPS),
        "piece_add_norm": (x, y, weight, EPS),
        "piece_norm_backward": (dy, x, inverse, weight, y),
        "piece_rotate": (q, *tables, -1),
        "piece_heads": (both, 4, tables, norms, EPS),
        "piece_heads_backward": ([q, k, v], tables, [both, per_head, *norms]),
        "piece_swiglu": (gate_up, gates),
        "piece_swiglu_backward": (dy, gate_up),
        "piece_weighted_swiglu_backward": (dy, gate_up, gates),
    }


NAMES = list(calls(torch.float32))


def on_meta(value: Any) -> Any:
    """Return what has the shapes of a value, and no elements."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [on_meta(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("provider", ["triton", "compiled"])
def test_on_shapes_an_operator_makes_what_it_makes_of_numbers(
    name: str, provider: KernelProvider
) -> None:
    args, operator = calls(torch.bfloat16)[name], getattr(PIECES, name)
    shapes = operator(*map(on_meta, args), provider)
    if provider == "compiled":
        return  # what a compiler makes of the formula: `test_compiled_pieces`
    made = operator(*args, provider)
    pairs = zip(made, shapes, strict=True) if isinstance(made, tuple) else [(made, shapes)]
    for one, shape in pairs:
        assert (one.shape, one.dtype, one.stride()) == (shape.shape, shape.dtype, shape.stride())


@pytest.mark.parametrize("name", NAMES)
def test_pytorch_finds_nothing_wrong_with_an_operator(name: str) -> None:
    operator, args = getattr(PIECES, name).default, calls(torch.float32)[name]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, (*args, "triton"), test_utils=checks)


def test_a_rehearsal_counts_one_kernel_and_what_it_moves() -> None:
    args = (*map(on_meta, calls(torch.bfloat16)["piece_add_norm"]), "triton")
    operator = PIECES.piece_add_norm.default
    out = operator(*args)
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    work = kernel_work(operator, tensors, (args, {}), out)
    stream = 2 * ROWS * WIDTH
    assert work is not None
    assert work[:3] == ("piece_add_norm", 4 * stream + 2 * WIDTH + 4 * ROWS, 0)


COMPILES = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
"""PyTorch's compiler imports what PyTorch warns of."""


@COMPILES
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_compiled_pieces_are_their_formulas(name: str, dtype: torch.dtype) -> None:
    args, operator = calls(dtype)[name], getattr(PIECES, name)
    right, got = operator(*args, "triton"), operator(*args, "compiled")
    pairs = zip(got, right, strict=True) if isinstance(got, tuple) else [(got, right)]
    for mine, formula in pairs:
        # One sum stands in place of partial ones.
        wanted = formula if mine.shape == formula.shape else formula.sum(0, keepdim=True)
        assert mine.dtype == wanted.dtype
        # Sums in another order: of two roundings to bf16 one may go the other way.
        one_step = 2.0**-7 if mine.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(mine, wanted, rtol=one_step + 2.0**-18, atol=2.0**-18)


@COMPILES
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiled_loss_is_the_plain_one(dtype: torch.dtype) -> None:
    logits, labels = given(5, 40, dtype=dtype) * 4, torch.tensor([0, 39, 7, 3, 12])
    rows = LabelRows(
        local_C=labels,
        mine_C=torch.tensor([True, True, False, True, True]),
        counted_C=torch.tensor([True, True, True, False, True]),
    )
    factor = rows.counted_C * torch.tensor(0.25)
    found: list[torch.Tensor] = []
    for provider in ("plain", "compiled"):
        mine = logits.clone()
        maximum, total, target = cross_entropy.row_statistics(
            mine, labels, PROOF_PIECES, provider=provider
        )
        numbers = RowStatistics(
            maximum_C=maximum, total_C=total, target_C=target, local_maximum_C=maximum
        )
        left = cross_entropy.overwrite_with_gradient(
            mine, numbers, rows, factor, PROOF_PIECES, provider=provider
        )
        gradient = mine if left is None else mine * left.unsqueeze(1)
        found += [torch.stack((maximum, total, target)), gradient.float()]
    torch.testing.assert_close(found[2], found[0], rtol=2.0**-18, atol=0.0)
    one_step = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-18
    torch.testing.assert_close(found[3], found[1], rtol=one_step, atol=2.0**-24)


def test_weights_of_rows_of_experts_go_both_ways() -> None:
    gate_up, gates, dy = given(ROWS, 24), given(ROWS, seed=2), given(ROWS, 12, seed=3)
    right, got = torch.empty(ROWS), torch.empty(ROWS)
    plain = fused.weighted_swiglu_backward(dy, gate_up, gates, right)
    mine = fused.weighted_swiglu_backward(dy, gate_up, gates, got, provider="triton")
    for one, other in zip((*mine, got), (*plain, right), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        fused.weighted_swiglu(gate_up, gates, provider="triton"),
        fused.weighted_swiglu(gate_up, gates),
    )
