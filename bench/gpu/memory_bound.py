"""Pieces of a block that move more than they compute: plain, in Triton, compiled, and torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as fn

from bench.gpu.loads import Load
from bench.gpu.timings import Absent, Call, Timing, normal
from echelon.core.choices.kernels import KernelProvider
from echelon.parallel.kernels import low_precision
from echelon.parallel.kernels.fused import Rotate, SwiGLU
from echelon.parallel.kernels.piece_operators import PIECES, FusedSwiGLU

MADE: tuple[KernelProvider, ...] = ("triton", "compiled")
"""What makes one kernel of a piece."""


def memory_bound(load: Load, device: torch.device) -> Iterator[Timing]:
    """Yield our kernels and torch's; bytes: every input read and output written once, bf16."""
    shape, rows, two = load.shape, load.tokens, 2.0
    x = (rows, shape.hidden)
    norm = two * rows * shape.hidden * 5  # x, y; dy, x, dx
    yield _timing("RMSNorm, plain", norm, lambda: _ours_norm(load, device))
    yield _timing("RMSNorm, torch", norm, lambda: _torch_norm(x, device))
    # x, y, sum, norm; gradients of norm and sum, sum, dx
    head = two * rows * shape.hidden * 8
    for provider in MADE:
        name = f"sum and RMSNorm, {provider}"
        yield _timing(name, head, partial(_fused_norm, load, device, provider))
    swiglu = two * rows * shape.ffn * 8  # gate, up, y; dy, gate, up, both gradients
    pair = (rows, 2 * shape.ffn)
    yield _timing("SwiGLU, plain", swiglu, lambda: _both(SwiGLU.apply, pair, device))
    yield _timing("SwiGLU, torch", swiglu, lambda: _both(_torch_swiglu, pair, device))
    for provider in MADE:
        yield _timing(f"SwiGLU, {provider}", swiglu, partial(_fused_swiglu, pair, device, provider))
    rotary = two * rows * shape.query_dim * 4  # x, y; dy, dx
    yield _timing("rotary of queries, plain", rotary, lambda: _ours_rotary(load, device))
    # q, k both ways, and v in backward
    heads = two * rows * (4 * (shape.query_dim + shape.kv_dim) + 2 * shape.kv_dim)
    for provider in MADE:
        name = f"queries and keys turned, {provider}"
        yield _timing(name, heads, partial(_fused_heads, load, device, provider))
    loss = two * rows * shape.vocab * 3  # logits; logits, gradient
    yield _timing("cross-entropy, torch", loss, lambda: _torch_loss(load, device))


def _require(provider: KernelProvider, device: torch.device) -> None:
    if device.type == "cpu":
        raise Absent(f"{provider} kernels are measured on a GPU")


def _fused_norm(load: Load, device: torch.device, provider: KernelProvider) -> Call:
    _require(provider, device)
    eps, size = load.shape.norm_eps, (load.tokens, load.shape.hidden)
    x_ND, y_ND, dx_ND, dy_ND = (normal(device, *size) for _ in range(4))
    weight_D = normal(device, load.shape.hidden)

    def call() -> None:
        sum_ND, _, inverse = PIECES.piece_add_norm(x_ND, y_ND, weight_D, eps, provider)
        PIECES.piece_norm_backward(dy_ND, sum_ND, inverse, weight_D, dx_ND, provider)

    return call


def _fused_swiglu(size: tuple[int, int], device: torch.device, provider: KernelProvider) -> Call:
    _require(provider, device)
    return _both(lambda x: FusedSwiGLU.apply(x, provider), size, device)


def _fused_heads(load: Load, device: torch.device, provider: KernelProvider) -> Call:
    _require(provider, device)
    shape = load.shape
    angle = torch.rand((load.length, shape.head_dim // 2), device=device)
    tables = [angle.cos(), angle.sin()]
    size = (load.length, load.sequences, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    parts = normal(device, *size).split((shape.heads, shape.kv_heads, shape.kv_heads), dim=2)
    qk = normal(device, *size)[:, :, : shape.heads + shape.kv_heads]

    def call() -> None:
        PIECES.piece_heads(qk, shape.heads, tables, [], 0.0, provider)
        PIECES.piece_heads_backward(list(parts), tables, [], provider)

    return call


def _timing(name: str, work: float, make: Callable[[], Call]) -> Timing:
    return Timing(name=name, work=work, make=make)


def _both(function: Callable[..., Any], size: tuple[int, ...], device: torch.device) -> Call:
    """Return forward and backward of a function of one tensor."""
    x = normal(device, *size, grad=True)
    dy = torch.ones_like(function(x))
    return lambda: torch.autograd.grad(function(x), x, dy)


def _torch_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return fn.silu(gate) * up


def _torch_norm(size: tuple[int, int], device: torch.device) -> Call:
    weight_D = normal(device, size[1], grad=True)
    x_ND, dy_ND = normal(device, *size, grad=True), normal(device, *size)
    return lambda: torch.autograd.grad(
        fn.rms_norm(x_ND, (size[1],), weight_D), (x_ND, weight_D), dy_ND
    )


def _ours_norm(load: Load, device: torch.device) -> Call:
    shape = load.shape
    weight_D = normal(device, shape.hidden)
    x_ND, dy_ND = (normal(device, load.tokens, shape.hidden) for _ in range(2))

    def call() -> None:
        _, inverse = low_precision.rms_norm(x_ND, weight_D, shape.norm_eps)
        low_precision.rms_norm_backward(dy_ND, x_ND, inverse, weight_D)

    return call


def _ours_rotary(load: Load, device: torch.device) -> Call:
    shape = load.shape
    half = shape.head_dim // 2
    angle = torch.rand((load.length, 1, 1, half), device=device)
    cos, sin = angle.cos(), angle.sin()
    size = (load.length, load.sequences, shape.heads, shape.head_dim)

    return _both(lambda x: Rotate.apply(x, cos, sin), size, device)


def _torch_loss(load: Load, device: torch.device) -> Call:
    rows, vocab = load.tokens, load.shape.vocab
    labels_N = torch.randint(0, vocab, (rows,), device=device)
    logits_NV = normal(device, rows, vocab, grad=True)
    return lambda: torch.autograd.grad(fn.cross_entropy(logits_NV.float(), labels_N), logits_NV)
