"""Attention in pieces against the reference: output, log-sum-exp and every gradient."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from echelon.core.attention_mask import AttentionMask, PositionRun
from echelon.layout import attention_tiles as boxes
from echelon.layout.attention_tiles import tiles_between
from echelon.models.attention import local
from echelon.models.attention.interface import (
    AttentionGradients,
    HeadSinks,
    OnlineSoftmax,
    SavedAttention,
    ScoreRule,
)
from echelon.models.attention.local import (
    AttentionRule,
    LocalAttention,
    attend_tiles,
    backward_tiles,
)
from echelon.models.attention.plain import PlainKernel
from tests.models.attention.cases import MASKS, RUNS, TILE_ROWS, Case, case, expected

HEADS = [(4, 4), (4, 2), (4, 1)]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let windows of a few keys be tiled: full boxes between two edges too."""
    monkeypatch.setattr(boxes, "MIN_MIDDLE_TILES", 1)
    tiles_between.cache_clear()
    yield
    tiles_between.cache_clear()


def _found(case: Case, soft_cap: float | None = None) -> tuple[torch.Tensor, ...]:
    """Return out, lse, dq, dk, dv of the pieces of a case."""
    rule = AttentionRule(soft_cap=soft_cap)
    out, lse = attend_tiles(case.q, case.k, case.v, case.pieces, rule).result()
    attended = SavedAttention(case.q, case.k, case.v, out, lse)
    return out, lse, *backward_tiles(case.dout, attended, case.pieces, rule)


def _assert_close(
    found: torch.Tensor | tuple[torch.Tensor, ...], wanted: torch.Tensor | tuple[torch.Tensor, ...]
) -> None:
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-12)


def _use(monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
    monkeypatch.setattr(local, "kernel_for", lambda *_: kernel)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("kernel", ["fused", "plain"])
def test_pieces_are_the_reference(
    kernel: str, runs: str, mask: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "plain":
        _use(monkeypatch, PlainKernel())
    one = case(runs, mask, heads)
    _assert_close(_found(one), expected(one))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("runs", ["whole", "zigzag, gathered", "striped, later"])
def test_a_soft_cap_is_in_the_scores_and_their_gradients(runs: str, mask: str) -> None:
    one = case(runs, mask)
    found = _found(one, soft_cap=0.7)
    _assert_close(found, expected(one, soft_cap=0.7))
    assert not torch.allclose(found[0], expected(one)[0], atol=1e-3)


@pytest.mark.parametrize("kernel", ["fused", "plain"])
@pytest.mark.parametrize("runs", ["whole", "zigzag, gathered", "striped, later"])
@pytest.mark.parametrize("mask", MASKS)
def test_sinks_take_their_share_under_every_kernel(
    mask: str, runs: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query that meets nothing still gives 0, and pulls at no sink."""
    if kernel == "plain":
        _use(monkeypatch, PlainKernel())
    one = case(runs, mask)
    weight = torch.nn.Parameter(torch.tensor([-30.0, -1.0, 0.5, 6.0], dtype=torch.float64))
    added: list[torch.Tensor] = []
    sinks = HeadSinks(weight=weight, add=lambda _, dsinks: added.append(dsinks), heads=slice(0, 4))
    leaves = [x.detach().requires_grad_() for x in (one.q, one.k, one.v)]
    out = LocalAttention.apply(*leaves, one.pieces, AttentionRule(sinks=sinks))
    gradients = torch.autograd.grad(out, leaves, one.dout)
    wanted, _, *wanted_gradients = expected(one, sinks_H=weight)
    _assert_close(out, wanted)
    _assert_close((*gradients, *added), tuple(wanted_gradients))
    assert not torch.allclose(out, expected(one)[0], atol=1e-3)


@pytest.mark.parametrize("mask", MASKS)
def test_autograd_gives_the_gradients(mask: str) -> None:
    one = case("zigzag, own", mask)
    leaves = [x.detach().requires_grad_() for x in (one.q, one.k, one.v)]
    out = LocalAttention.apply(*leaves, one.pieces)
    gradients = torch.autograd.grad(out, leaves, one.dout)
    wanted, _, *wanted_gradients = expected(one)
    _assert_close(out, wanted)
    _assert_close(gradients, tuple(wanted_gradients))


def test_autograd_keeps_inputs_output_and_log_sum_exp_only() -> None:
    one = case("zigzag, gathered", "window")
    kept: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    leaves = [x.detach().requires_grad_() for x in (one.q, one.k, one.v)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = LocalAttention.apply(*leaves, one.pieces)
    length, sequences, heads, _ = one.q.shape
    shapes = [*(x.shape for x in leaves), out.shape, (sequences, heads, length)]
    assert [x.shape for x in kept] == shapes


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
@pytest.mark.parametrize("mask", MASKS)
def test_keys_that_come_in_blocks_in_any_order_give_the_whole(
    mask: str, order: tuple[int, ...]
) -> None:
    one, (rule, documents) = case("whole", mask), MASKS[mask]
    blocks = [
        (
            slice(10 * i, 10 * i + 10),
            tiles_between((PositionRun(0, 1, 40),), (PositionRun(10 * i, 1, 10),), *rest),
        )
        for i in order
        for rest in [(rule, documents, TILE_ROWS)]
    ]
    merged = OnlineSoftmax(one.q.shape, one.q.dtype, one.q.device)
    for keys, pieces in blocks:
        attend_tiles(one.q, one.k[keys], one.v[keys], pieces, into=merged)
    out, lse = merged.result()
    total = AttentionGradients.zeros(one.q, one.k, one.v)
    for keys, pieces in blocks:
        attended = SavedAttention(one.q, one.k[keys], one.v[keys], out, lse)
        part = AttentionGradients(total.dq, total.dk[keys], total.dv[keys])
        backward_tiles(one.dout, attended, pieces, into=part)
    _assert_close((out, lse, *total), expected(one))


def test_queries_that_meet_nothing_give_nothing() -> None:
    one = case("striped, later", "causal")
    out, lse, dq, *_ = _found(one)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(dq[0], torch.zeros_like(dq[0]))
    assert bool((lse[:, :, 0] == float("-inf")).all())
    assert bool(lse[:, :, 1:].isfinite().all())


def test_no_piece_at_all_gives_nothing() -> None:
    one = case("whole", "causal")
    out, lse = attend_tiles(one.q, one.k, one.v, ()).result()
    attended = SavedAttention(one.q, one.k, one.v, out, lse)
    assert not out.any()
    assert not any(x.any() for x in backward_tiles(one.dout, attended, ()))


def test_a_narrow_dtype_is_merged_in_float32_and_rounded_once() -> None:
    one = case("zigzag, gathered", "causal", dtype=torch.bfloat16)
    merged = attend_tiles(one.q, one.k, one.v, one.pieces)
    out, lse = merged.result()
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    attended = SavedAttention(one.q, one.k, one.v, out, lse)
    assert {x.dtype for x in backward_tiles(one.dout, attended, one.pieces)} == {torch.float32}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("kernel", ["fused", "plain"])
def test_rounding_is_of_the_size_of_the_dtype(
    kernel: str, runs: str, mask: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bound each error by eps times the sum of the sizes of what is added up.

    Weights and their products are rounded to the dtype (2 eps), results of pieces and of the merge
    again (2 eps). In a gradient of scores, p (dp - delta), delta has the error of a rounded output
    (eps |dout| |out|): so |p| (|dp| + |delta|) replaces p (dp - delta), and the roundings are those
    of out, p, dp - delta, their product, of a piece and of the sum: at most 8 eps. Scores are sums
    of head_dim products in float32, so a weight (its exponential, and its normaliser) is off by a
    factor of 2 (head_dim + 2) eps32 |q| |k|; it enters a gradient through p, out and lse.
    """
    if kernel == "plain":
        _use(monkeypatch, PlainKernel())
    one = case(runs, mask, dtype=dtype)
    out, _, *gradients = _found(one)
    wanted, _, *wanted_gradients = expected(one)
    eps = torch.finfo(dtype).eps
    off, size, *sizes = _sizes(one)
    assert bool(((out - wanted).abs() <= (4 * eps + off) * size).all())
    for found, want, bound in zip(gradients, wanted_gradients, sizes, strict=True):
        assert bool(((found - want).abs() <= (8 * eps + 3 * off) * bound).all())


def _sizes(one: Case) -> tuple[torch.Tensor, ...]:
    """Return what a weight is off by, and the sums of out, dq, dk and dv with sizes in them."""
    repeats = one.q.shape[2] // one.k.shape[2]
    q, dout = one.q.double(), one.dout.double()
    k, v = (x.double().repeat_interleave(repeats, dim=2) for x in (one.k, one.v))
    scale = q.shape[-1] ** -0.5
    seen = one.seen if one.seen.dim() == 2 else one.seen[:, None]
    scores = torch.einsum("tbhd,sbhd->bhts", q, k) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num()
    out = torch.einsum("bhts,sbhd->tbhd", weights, v.abs())
    products = torch.einsum("tbhd,sbhd->bhts", dout.abs(), v.abs())
    delta = (dout.abs() * out).sum(-1).permute(1, 2, 0).unsqueeze(-1)
    slopes = weights * (products + delta) * scale
    dq = torch.einsum("bhts,sbhd->tbhd", slopes, k.abs())
    dk = torch.einsum("bhts,tbhd->sbhd", slopes, q.abs()).unflatten(2, (-1, repeats)).sum(3)
    dv = torch.einsum("bhts,tbhd->sbhd", weights, dout.abs()).unflatten(2, (-1, repeats)).sum(3)
    products = torch.einsum("tbhd,sbhd->bhts", q.abs(), k.abs()) * scale
    off = 2 * (q.shape[-1] + 2) * torch.finfo(torch.float32).eps * products.max()
    return off, out, dq, dk, dv


def test_one_piece_over_everything_is_neither_merged_nor_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = case("whole", "causal")
    out, lse = torch.ones_like(one.q), torch.zeros(2, 4, 40, dtype=torch.float64)
    gradients = AttentionGradients(*(torch.ones_like(x) for x in (one.q, one.k, one.v)))

    class Fixed:
        flash = None

        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreRule
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return out, lse

        def backward(
            self, dout: torch.Tensor, attended: SavedAttention, scores: ScoreRule
        ) -> AttentionGradients:
            return gradients

    _use(monkeypatch, Fixed())
    found = attend_tiles(one.q, one.k, one.v, one.pieces).result()
    assert found[0] is out
    assert found[1] is lse
    attended = SavedAttention(one.q, one.k, one.v, out, lse)
    assert backward_tiles(one.dout, attended, one.pieces) is gradients


def test_long_windows_in_real_tiles_are_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes, "MIN_MIDDLE_TILES", 3)
    tiles_between.cache_clear()
    torch.manual_seed(3)
    run, mask = (PositionRun(0, 1, 1100),), AttentionMask(window=780)
    pieces = tiles_between(run, run, mask, None)
    q, k, v, dout = (torch.randn(1100, 1, 1, 8, dtype=torch.float64) for _ in range(4))
    at = torch.arange(1100)
    ahead = at[:, None] - at
    one = Case(q, k, v, dout, pieces, (ahead >= 0) & (ahead < 780))
    assert {piece.form for piece in pieces} == {"full", "causal", "banded"}
    _assert_close(_found(one), expected(one))
