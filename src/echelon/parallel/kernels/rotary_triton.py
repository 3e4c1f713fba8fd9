# SPDX-License-Identifier: Apache-2.0
"""Queries and keys, normed and turned by their position, as one kernel each way, in Triton.

The projections lie side by side, [T, B, H + 2 K, h]. Forward reads queries and keys there and
writes each into memory of its own; backward reads the gradients of all three, in whatever order
attention gave them, and writes that of the projections: nothing is put side by side afterwards.
With norms of heads a program of backward takes several tokens, and gives one partial sum for each
weight of a norm; else it takes one.

Source: Su et al., "RoFormer", 2021, section 3.2; Henry et al., "Query-Key Normalization for
Transformers", 2020 (norms of heads); Hsu et al., "Liger Kernel", 2024.
Shape suffixes: T positions, B sequences, H query and K key/value heads, h = 2 E their width.
"""

# Triton reads what a parameter is annotated with, in a module that no type checker sees.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from echelon.parallel.kernels.piece_formulas import rows_and_sums

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_BLOCK_ELEMENTS = 1024
"""Elements of the halves of heads that a program has in registers at a time."""


@triton.jit
def _gradients_of_heads(dq, dk, dv, head, pair, num_q, num_k, of_pair, q_h, k_h, v_h):
    is_q, is_k = head < num_q, (head >= num_q) & (head < num_q + num_k)
    is_v = (head >= num_q + num_k) & (head < num_q + 2 * num_k)
    q = dq + head[:, None] * q_h + pair[None, :]
    k = dk + (head[:, None] - num_q) * k_h + pair[None, :]
    v = dv + (head[:, None] - num_q - num_k) * v_h + pair[None, :]
    from_q = tl.load(q, mask=is_q[:, None] & of_pair[None, :], other=0.0)
    from_k = tl.load(k, mask=is_k[:, None] & of_pair[None, :], other=0.0)
    from_v = tl.load(v, mask=is_v[:, None] & of_pair[None, :], other=0.0)
    return tl.where(is_q[:, None], from_q, tl.where(is_k[:, None], from_k, from_v))


@triton.jit
def _weights_of_heads(q_weight, k_weight, pair, of_pair, is_q, wide: tl.constexpr):
    of_q = tl.load(q_weight + pair, mask=of_pair, other=0.0).to(wide)[None, :]
    of_k = tl.load(k_weight + pair, mask=of_pair, other=0.0).to(wide)[None, :]
    return tl.where(is_q, of_q, of_k)


@triton.jit
def heads_kernel(
    qk,
    cos_TE,
    sin_TE,
    q_weight,
    k_weight,
    q_out,
    k_out,
    inverse_out,
    num_sequences,
    num_q,
    num_k,
    half,
    stride_t,
    stride_b,
    stride_h,
    eps,
    direction,
    NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    position, sequence = token // num_sequences, token % num_sequences
    head, pair = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    is_q = head < num_q
    of_pair = pair < half
    inside = (head < num_q + num_k)[:, None] & of_pair[None, :]
    wide = cos_TE.dtype.element_ty
    cos = tl.load(cos_TE + position * half + pair, mask=of_pair, other=0.0)[None, :]
    sin = tl.load(sin_TE + position * half + pair, mask=of_pair, other=0.0)[None, :] * direction
    source = qk + position * stride_t + sequence * stride_b
    source += head[:, None] * stride_h + pair[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(wide)
    second = tl.load(source + half, mask=inside, other=0.0).to(wide)
    if NORMS:
        square = tl.sum(first * first + second * second, axis=1) / (2 * half)
        inverse = 1.0 / tl.sqrt(square + eps)
        place = inverse_out + token * (num_q + num_k) + head
        tl.store(place, inverse, mask=head < num_q + num_k)
        weight = _weights_of_heads(q_weight, k_weight, pair, of_pair, is_q[:, None], wide)
        first = first * inverse[:, None] * weight
        weight = _weights_of_heads(
            q_weight + half, k_weight + half, pair, of_pair, is_q[:, None], wide
        )
        second = second * inverse[:, None] * weight
    turned = (first * cos - second * sin).to(q_out.dtype.element_ty)
    turned_second = (second * cos + first * sin).to(q_out.dtype.element_ty)
    q_place = q_out + (token * num_q + head[:, None]) * 2 * half + pair[None, :]
    k_place = k_out + (token * num_k + head[:, None] - num_q) * 2 * half + pair[None, :]
    to_q, to_k = inside & is_q[:, None], inside & (head >= num_q)[:, None]
    tl.store(q_place, turned, mask=to_q)
    tl.store(q_place + half, turned_second, mask=to_q)
    tl.store(k_place, turned, mask=to_k)
    tl.store(k_place + half, turned_second, mask=to_k)


@triton.jit
def heads_backward_kernel(
    dq,
    dk,
    dv,
    x,
    inverse_in,
    cos_TE,
    sin_TE,
    q_weight,
    k_weight,
    out,
    sums,
    num_tokens,
    num_sequences,
    num_q,
    num_k,
    half,
    q_t,
    q_b,
    q_h,
    k_t,
    k_b,
    k_h,
    v_t,
    v_b,
    v_h,
    x_t,
    x_b,
    x_h,
    tokens_each,
    NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    program, pair = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    of_pair = pair < half
    wide = cos_TE.dtype.element_ty
    both, all_heads = num_q + num_k, num_q + 2 * num_k
    q_first, q_second = tl.zeros([HALF], dtype=wide), tl.zeros([HALF], dtype=wide)
    k_first, k_second = tl.zeros([HALF], dtype=wide), tl.zeros([HALF], dtype=wide)
    begin = program * tokens_each
    for token in range(begin, tl.minimum(begin + tokens_each, num_tokens)):
        t, b = token // num_sequences, token % num_sequences
        cos = tl.load(cos_TE + t * half + pair, mask=of_pair, other=0.0)[None, :]
        sin = tl.load(sin_TE + t * half + pair, mask=of_pair, other=0.0)[None, :]
        q, k, v = dq + t * q_t + b * q_b, dk + t * k_t + b * k_b, dv + t * v_t + b * v_b
        for start in range(0, all_heads, HEADS):
            head = start + tl.arange(0, HEADS)
            first = _gradients_of_heads(
                q, k, v, head, pair, num_q, num_k, of_pair, q_h, k_h, v_h
            ).to(wide)
            second = _gradients_of_heads(
                q + half, k + half, v + half, head, pair, num_q, num_k, of_pair, q_h, k_h, v_h
            ).to(wide)
            turned, is_q = head[:, None] < both, head[:, None] < num_q
            back, back_second = first * cos + second * sin, second * cos - first * sin
            if NORMS:
                inside = turned & of_pair[None, :]
                source = x + t * x_t + b * x_b + head[:, None] * x_h + pair[None, :]
                at = inverse_in + token * both + head
                inverse = tl.load(at, mask=head < both, other=0.0)[:, None]
                x_hat = tl.load(source, mask=inside, other=0.0).to(wide) * inverse
                x_hat_second = tl.load(source + half, mask=inside, other=0.0).to(wide) * inverse
                product, product_second = back * x_hat, back_second * x_hat_second
                q_first += tl.sum(tl.where(is_q, product, 0.0), axis=0)
                q_second += tl.sum(tl.where(is_q, product_second, 0.0), axis=0)
                k_first += tl.sum(tl.where(is_q, 0.0, product), axis=0)
                k_second += tl.sum(tl.where(is_q, 0.0, product_second), axis=0)
                back *= _weights_of_heads(q_weight, k_weight, pair, of_pair, is_q, wide)
                back_second *= _weights_of_heads(
                    q_weight + half, k_weight + half, pair, of_pair, is_q, wide
                )
                pull = tl.sum(back * x_hat + back_second * x_hat_second, axis=1) / (2 * half)
                back = inverse * (back - x_hat * pull[:, None])
                back_second = inverse * (back_second - x_hat_second * pull[:, None])
            first = tl.where(turned, back, first).to(out.dtype.element_ty)
            second = tl.where(turned, back_second, second).to(out.dtype.element_ty)
            row = out + (token * all_heads + head[:, None]) * 2 * half + pair[None, :]
            written = (head[:, None] < all_heads) & of_pair[None, :]
            tl.store(row, first, mask=written)
            tl.store(row + half, second, mask=written)
    if NORMS:
        row = sums + program * 4 * half + pair
        tl.store(row, q_first, mask=of_pair)
        tl.store(row + half, q_second, mask=of_pair)
        tl.store(row + 2 * half, k_first, mask=of_pair)
        tl.store(row + 3 * half, k_second, mask=of_pair)


Pair = tuple[torch.Tensor, torch.Tensor]
"""The tables of cosine and sine, or the weights of the norms of queries and keys."""


def heads(
    qk: torch.Tensor, num_queries: int, tables: Pair, weights: Pair | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys, and the inverse rms of each head (empty without norms)."""
    return _forward(qk, num_queries, tables, weights, (eps, 1.0))


def rotate(x: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, way: int) -> torch.Tensor:
    """Return x [T, B, heads, h] with its half-pairs turned forwards (1) or back (-1)."""
    return _forward(x, x.shape[2], (cos_TE, sin_TE), None, (0.0, float(way)))[0]


def _forward(
    qk: torch.Tensor,
    num_queries: int,
    tables: Pair,
    weights: Pair | None,
    numbers: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    positions, sequences, num_heads, width = qk.shape
    qk, made = _heads_together(qk), {"dtype": qk.dtype, "device": qk.device}
    q_out = torch.empty((positions, sequences, num_queries, width), **made)
    k_out = torch.empty((positions, sequences, num_heads - num_queries, width), **made)
    of_heads = (0,) if weights is None else (positions, sequences, num_heads, 1)
    inverse = tables[0].new_empty(of_heads)
    block, half = _head_shape(width, num_heads)
    sizes = (sequences, num_queries, num_heads - num_queries, width // 2, *qk.stride()[:3])
    if q_out.numel():
        heads_kernel[(positions * sequences, -(-num_heads // block))](
            *(qk, *_contiguous(tables), *(weights or (qk, qk)), q_out, k_out, inverse),
            *(*sizes, *numbers),
            NORMS=weights is not None,
            HEADS=block,
            HALF=half,
        )
    return q_out, k_out, inverse


def heads_backward(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: Pair,
    normed: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the projections, and partial sums [P, 2, h] of those of weights."""
    dq, dk, dv = (_heads_together(one) for one in gradients)
    positions, sequences, num_q, width = dq.shape
    num_k, num_tokens = dk.shape[2], positions * sequences
    out = dq.new_empty((positions, sequences, num_q + 2 * num_k, width))
    tokens_each, num_sums = (1, num_tokens) if normed is None else rows_and_sums(num_tokens)
    sums = tables[0].new_empty((0,) if normed is None else (num_sums, 2, width))
    x, inverse, *weights = normed or (dq, sums, dq, dq)
    x = _heads_together(x)
    block, half = _head_shape(width, num_q + 2 * num_k)
    strides = (stride for one in (dq, dk, dv, x) for stride in one.stride()[:3])
    sizes = (num_tokens, sequences, num_q, num_k, width // 2, *strides)
    if num_tokens:
        heads_backward_kernel[(num_sums,)](
            *(dq, dk, dv, x, inverse, *_contiguous(tables), *weights, out, sums),
            *(*sizes, tokens_each),
            NORMS=normed is not None,
            HEADS=block,
            HALF=half,
        )
    return out, sums


def _heads_together(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _contiguous(tables: Pair) -> Pair:
    return tables[0].contiguous(), tables[1].contiguous()


def _head_shape(width: int, num_heads: int) -> tuple[int, int]:
    """Return how many heads a program takes at a time, and the half of one, as powers of two."""
    half = 1 << max(0, width // 2 - 1).bit_length()
    most = 1 << max(0, num_heads - 1).bit_length()
    return max(1, min(most, _BLOCK_ELEMENTS // half)), half
