"""What the engine itself calls for attention and experts, for `python -m bench.gpu.kernels`.

Documents and windows in one call of flash attention stand beside a call for each piece, as kernels
without windows need them; gradients of the matrices of experts that read where rows end on the
device beside one product after the other. FlashAttention-3, which PyTorch runs in place of its own
for a whole process, is timed by its own interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.gpu.loads import Load
from echelon.core.attention_mask import AttentionMask, DocumentStarts, PositionRun
from echelon.layout.attention_tiles import tiles_between
from echelon.models.attention.local import AttentionRule, LocalAttention, takes_any_band
from echelon.models.piece_sizes import TRAINING_PIECES
from echelon.parallel.kernels.expert_kernels import add_grouped_gradient
from echelon.parallel.storage.matmul import add_product

Call = Callable[[], object]
Named = tuple[str, float, Callable[[], Call]]
"""The name of a variant, the FLOPs of one call, and how to make the call."""

NUM_DOCUMENTS = 16
FLASH = AttentionRule(kernel="flash")


def attention_variants(load: Load, device: torch.device) -> Iterator[Named]:
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

        yield f"Echelon, {name}", work, make


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


def expert_gradients(load: Load, device: torch.device, num_experts: int) -> Iterator[Named]:
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

    yield "weights, one launch", work, one_launch
    yield "weights, one after the other", work, one_by_one
