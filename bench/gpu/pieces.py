"""Variants of pieces of a block, with the work of one call and how to make it.

Pieces that move more than they compute are plain, in Triton, compiled, and torch's. Of what the
engine itself calls, documents and windows in one call of flash attention stand beside a call for
each piece, as kernels without windows need them; gradients of the matrices of experts that read
where rows end on the device beside one product after the other. FlashAttention-3, which PyTorch
runs in place of its own for a whole process, is timed by its own interface.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as fn

from bench.gpu.loads import Load
from echelon.core.attention_mask import AttentionMask, DocumentStarts, PositionRun
from echelon.core.choices.kernels import KernelProvider
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.layout.attention_tiles import tiles_between
from echelon.models.attention.local import AttentionRule, LocalAttention, takes_any_band
from echelon.parallel.kernels import low_precision
from echelon.parallel.kernels.expert_kernels import add_grouped_gradient
from echelon.parallel.kernels.fused import Rotate, SwiGLU
from echelon.parallel.kernels.piece_operators import PIECES, FusedSwiGLU
from echelon.parallel.storage.matmul import add_product

Call = Callable[[], object]


class Absent(Exception):
    """A variant is not there for this device or torch; the message says which or why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Name a variant, the work of one call (FLOP or bytes), and how to make the call."""

    name: str
    work: float
    make: Callable[[], Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Hold variants that are compared; `unit` says what their work counts."""

    title: str
    unit: str
    timings: Sequence[Timing]


def normal(device: torch.device, *size: int, grad: bool = False) -> torch.Tensor:
    """Return bf16 values drawn on the device."""
    return torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_(grad)


def timed(call: Call, count: int, device: torch.device) -> float:
    """Seconds of a call, of `count` in a row with nothing waiting in between."""
    wait(device)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    wait(device)
    return (time.perf_counter() - begin) / count


def wait(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


MADE: tuple[KernelProvider, ...] = ("triton", "compiled")
"""What makes one kernel of a piece."""


def memory_bound(load: Load, device: torch.device) -> Iterator[Timing]:
    """Yield our kernels and torch's; bytes: every input read and output written once, bf16."""
    shape, rows, two = load.shape, load.tokens, 2.0
    x = (rows, shape.hidden)
    norm = two * rows * shape.hidden * 5  # x, y; dy, x, dx
    yield Timing(name="RMSNorm, plain", work=norm, make=lambda: _ours_norm(load, device))
    yield Timing(name="RMSNorm, torch", work=norm, make=lambda: _torch_norm(x, device))
    # x, y, sum, norm; gradients of norm and sum, sum, dx
    head = two * rows * shape.hidden * 8
    for provider in MADE:
        name = f"sum and RMSNorm, {provider}"
        yield Timing(name=name, work=head, make=partial(_fused_norm, load, device, provider))
    swiglu = two * rows * shape.ffn * 8  # gate, up, y; dy, gate, up, both gradients
    pair = (rows, 2 * shape.ffn)
    yield Timing(name="SwiGLU, plain", work=swiglu, make=lambda: _both(SwiGLU.apply, pair, device))
    yield Timing(name="SwiGLU, torch", work=swiglu, make=lambda: _both(_torch_swiglu, pair, device))
    for provider in MADE:
        yield Timing(
            name=f"SwiGLU, {provider}",
            work=swiglu,
            make=partial(_fused_swiglu, pair, device, provider),
        )
    rotary = two * rows * shape.query_dim * 4  # x, y; dy, dx
    yield Timing(
        name="rotary of queries, plain", work=rotary, make=lambda: _ours_rotary(load, device)
    )
    # q, k both ways, and v in backward
    heads = two * rows * (4 * (shape.query_dim + shape.kv_dim) + 2 * shape.kv_dim)
    for provider in MADE:
        name = f"queries and keys turned, {provider}"
        yield Timing(name=name, work=heads, make=partial(_fused_heads, load, device, provider))
    loss = two * rows * shape.vocab * 3  # logits; logits, gradient
    yield Timing(name="cross-entropy, torch", work=loss, make=lambda: _torch_loss(load, device))


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


NUM_DOCUMENTS = 16
FLASH = AttentionRule(kernel="flash")


def attention_variants(load: Load, device: torch.device) -> Iterator[Timing]:
    """Yield attention as the engine computes it, forward and backward."""
    length, causal = load.length, AttentionMask()
    step = max(1, length // NUM_DOCUMENTS)
    documents = tuple(range(0, length, step))
    window = AttentionMask(window=max(1, length // 8))
    each: DocumentStarts = (documents,) * load.sequences
    others: DocumentStarts = tuple(
        (0, *range(1 + number % step, length, step)) for number in range(load.sequences)
    )
    tiled = TRAINING_PIECES.tile_rows
    for name, rule, mask, starts, tile_rows in (
        ("causal, flash", FLASH, causal, None, None),
        ("causal, cuDNN", AttentionRule(kernel="cudnn"), causal, None, None),
        (f"{len(documents)} documents", FLASH, causal, each, None),
        (f"{len(documents)} documents, others in each sequence", FLASH, causal, others, None),
        (f"a window of {window.window}", FLASH, window, None, None),
        (f"a window of {window.window}, in tiles", FLASH, window, None, tiled),
    ):
        pairs = sum(
            mask.num_pairs(end - start)
            for one in starts or ((0,),) * load.sequences
            for start, end in zip(one, (*one[1:], length), strict=True)
        )
        # Two products forward and five backward for each pair that is visible.
        work = 14.0 * pairs * load.shape.heads * load.shape.head_dim

        def make(
            rule: AttentionRule = rule,
            mask: AttentionMask = mask,
            starts: DocumentStarts | None = starts,
            tile_rows: int | None = tile_rows,
        ) -> Call:
            return _attend(load, device, rule, (mask, starts, tile_rows))

        yield Timing(name=f"Echelon, {name}", work=work, make=make)


def _attend(
    load: Load,
    device: torch.device,
    rule: AttentionRule,
    asked: tuple[AttentionMask, DocumentStarts | None, int | None],
) -> Call:
    shape = load.shape

    def heads(count: int) -> torch.Tensor:
        size = (load.length, load.sequences, count, shape.head_dim)
        return torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_()

    q, k, v = heads(shape.heads), heads(shape.kv_heads), heads(shape.kv_heads)
    dout = heads(shape.heads).detach()
    run = (PositionRun(0, 1, load.length),)
    mask, starts, tile_rows = asked
    if tile_rows is None and not takes_any_band(q, rule):
        tile_rows = TRAINING_PIECES.tile_rows
    pieces = tiles_between(run, run, mask, starts, tile_rows)

    def call() -> None:
        torch.autograd.grad(LocalAttention.apply(q, k, v, pieces, rule), (q, k, v), dout)

    return call


def expert_gradients(load: Load, device: torch.device, num_experts: int) -> Iterator[Timing]:
    """Yield the gradients of one matrix of all experts, added up in float32."""
    rows, outputs, inputs = load.tokens, load.shape.ffn, load.shape.hidden
    work = 2.0 * rows * outputs * inputs
    counts = [rows // num_experts] * num_experts

    def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = torch.zeros((num_experts, outputs, inputs), device=device)
        dy, x = (
            torch.randn((rows, width), device=device, dtype=torch.bfloat16)
            for width in (outputs, inputs)
        )
        return made, dy, x

    def one_launch() -> Call:
        sums, dy, x = tensors()
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device)
        return lambda: add_grouped_gradient(sums, dy, x, ends, fresh=False)

    def one_by_one() -> Call:
        sums, dy, x = tensors()

        def call() -> None:
            for sum_OI, a, b in zip(sums, dy.split(counts), x.split(counts), strict=True):
                add_product(sum_OI, a, b, fresh=False, num_rows=TRAINING_PIECES.product_rows)

        return call

    yield Timing(name="weights, one launch", work=work, make=one_launch)
    yield Timing(name="weights, one after the other", work=work, make=one_by_one)
