# SPDX-License-Identifier: Apache-2.0
"""The numbers that formulas of activations read, those of a plan, and what such a formula gives.

Every number is of one rank and one microbatch. Each may be a NumPy array: the formulas add,
multiply and take the larger of two, so one stands for arrays of plans, too. Flags are 0 or 1.

Letters: N tokens of a microbatch on a context rank, n those of the residual stream here (N / tp
where it is split), D hidden width, H query and K key/value heads of a tensor rank, h the width of a
head, F inner width and V vocabulary of one, s bytes of an element, w = max(4, s) of a statistic.

A formula gives `OperatorMemory`: bytes that one operator keeps and works with, and the tensors
that it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.core.choices.kernels import FusedPiece
from echelon.core.choices.lora import LATENT_GROUPS, LINEAR_GROUPS
from echelon.core.model_shape import ModelShape
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.activations.attention_working import AttentionRowChunks, attention_working_bytes
from echelon.cost.bytes.context_memory import on_gpu, output_is_by_head
from echelon.cost.bytes.context_sent import kv_copies
from echelon.cost.bytes.piece_traffic import num_partial_sums
from echelon.cost.bytes.quantised import CODE_BYTES, SCALE_BYTES, widened_element_bytes
from echelon.cost.bytes.terms import WIDE_BYTES

Num: TypeAlias = "int | float | NDArray[Any]"


CACHE_ELEMENTS = 1 << 18
"""Elements of a tensor that are widened at a time (`kernels/low_precision.py`, on a CPU)."""

GPU_CHUNK_ELEMENTS = 1 << 24
"""The same on a GPU (`gpu_row_elements` in `core/piece_sizes.py`)."""

LOSS_ROWS = 2048
"""Tokens whose logits are there at a time (`loss_rows` in `core/piece_sizes.py`)."""

PRODUCT_ROWS = 256
"""Rows that are widened at a time for a product (`product_rows` in the same file)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationNumbers:
    """Give the sizes of one microbatch on one rank, in the letters of this file; flags are 0 or 1.

    `attend_*` are those of `attention_working_bytes` (`cost/activations/attention_working.py`).
    """

    tokens: Num
    """Tokens N of a microbatch on a context rank."""
    rows: Num
    """Tokens n of the residual stream here."""
    hidden: Num
    """Width D of the residual stream."""
    heads: Num
    """Query heads H of a tensor rank."""
    kv_heads: Num
    """Key/value heads K of a tensor rank."""
    head_dim: Num
    """Width h of a head."""
    inner: Num
    """Inner width F of a tensor rank."""
    up: Num
    """2 for a gated MLP, else 1."""
    vocab: Num
    """Vocabulary V of a tensor rank."""
    size: Num
    """Bytes s of an element."""
    statistics_bytes: Num
    """Bytes w of a statistic."""
    matmul_size: Num
    """Bytes of an element of what a matrix product keeps (1 in fp8)."""
    fp8_block: Num = 0
    """Numbers that share a scale where our own layers keep 8-bit numbers; 0 where they do not."""
    fp8_whole: Num = 0
    """Flag: whether a whole tensor has one scale, which is not kept, in all steps but the first."""
    fp8_wide: Num = 0
    """Bytes of a number that products widen 8-bit numbers to; 0 where a kernel takes codes."""
    fp8_casts: Num = 1
    """Flag: a weight is cast for each product, because no codes of it were gathered."""
    tp: Num = 1
    """Degree of tensor parallelism."""
    tp_ring: Num = 0
    """Flag: rows go around the tensor ranks in chunks, each beside its product."""
    tp_fused: Num = 0
    """Flag: one operator has a product and the messages of its rows."""
    low_precision: Num = 0
    """Flag: elements are narrower than statistics."""
    rope: Num = 1
    """Flag: queries and keys are rotated."""
    learned: Num = 0
    """Flag: positions are a learned table."""
    qk_norm: Num = 0
    """Flag: queries and keys are normed."""
    qk_width: Num = 0
    """Flag: each over the width of all heads together."""
    layer_norm: Num = 0
    """Flag: norms are LayerNorm, with a mean and a bias."""
    sinks: Num = 0
    """Flag: heads have sinks."""
    qkv_bias: Num = 0
    """Flag: queries, keys and values have a bias."""
    output_bias: Num = 0
    """Flag: the output projection of attention has a bias."""
    mlp_bias: Num = 0
    """Flag: the projections of the MLP have a bias."""
    dropout: Num = 0
    """Flag: elements are dropped."""
    multiplied: Num = 0
    """Flag: what a branch adds to the stream is multiplied by a factor."""
    embedding_multiplied: Num = 0
    """Flag: token vectors are."""
    norm_before: Num = 1
    """Flag: a branch has a norm before it."""
    norm_after: Num = 0
    """Flag: a branch has a norm after it."""
    parallel: Num = 0
    """Flag: the MLP reads the stream that attention reads."""
    one_norm: Num = 0
    """Flag: both read it through one norm."""
    parted: Num = 0
    """Flag: the gradient of a branch's output is another than the stream's for another reason."""
    beside: Num = 0
    """Flag: the gradient of an MLP's input waits for that of attention, beside the stream's."""
    ring: Num = 0
    """Flag: keys and values of other places are met one after the other, or gathered."""
    exchanged: Num = 0
    """Flag: heads are exchanged for positions."""
    copies: Num = 1
    """Copies of each key/value head in that exchange."""
    transposed: Num = 0
    """Flag: attention's output comes in another order than the next product reads, so it is
    copied."""
    mixed: Num = 0
    """Flag: gradients add up in another dtype than they are made in."""
    widens: Num = 1
    """Flag: where they do, a product widens its operands; libraries of a GPU add in float32."""
    chunk_elements: Num = CACHE_ELEMENTS
    """Elements of a tensor that are worked on at a time where a pass makes copies of them."""
    attend_forward: Num = 0
    """The most that attention has while it runs forward."""
    attend_first: Num = 0
    """The most backward before weight gradients run that were put off."""
    attend_run: Num = 0
    """What is there while those weight gradients run."""
    attend_rest: Num = 0
    """The most after that, backward."""
    projected: Num = 0
    """Flag: queries, keys and values side by side are kept, for attention to be made again."""
    fused_norm: Num = 0
    """Flag: a norm is one kernel, which works in registers."""
    fused_rotary: Num = 0
    """Flag: what norms and turns queries and keys is one kernel."""
    fused_swiglu: Num = 0
    """Flag: an activation with a gate is one kernel."""
    fused_loss: Num = 0
    """Flag: each pass over logits is one kernel."""
    capped_logits: Num = 0
    """Flag: logits have a cap, so that each pass over them goes by pieces."""
    cut_sums: Num = 0
    """Flag: kernels give partial sums of the gradients of vectors of weights."""
    frozen: Num = 0
    """Flag: what is no adapter takes no gradient."""
    adapters: tuple[Num, ...] = (0,) * 7
    """Rows of the A of all adapters of q, k, v; of o; of gate, up; of down; of what leads down in
    latent attention; of q_up; of kv_up."""
    scores: Num = 0
    """Bytes that attention keeps of its scores: none, but for trainers without a fused kernel."""

    @property
    def changed(self) -> Num:
        """Return whether what a branch gives is changed before it is added to the stream."""
        return elementwise_max(self.dropout, self.multiplied)

    @property
    def apart(self) -> Num:
        """Return whether the gradient of a branch's last layer is another than the stream's."""
        return elementwise_max(self.changed, self.norm_after, self.parted)

    @property
    def passed_on(self) -> Num:
        """Return whether that gradient is the one of the block's output, and the stream's is not.

        So it is where attention is beside an MLP with a norm of its own.
        """
        return self.parted * (1 - elementwise_max(self.changed, self.norm_after))

    @property
    def of_attention(self) -> ActivationNumbers:
        """Return the numbers of attention: beside an MLP, more gradients wait.

        That is the sum of what came around and out of the norm of the MLP; where both have one
        norm, the gradient of its output.
        """
        return replace(self, parted=self.parallel * (1 - self.one_norm), beside=self.one_norm)

    @property
    def around(self) -> Num:
        """Return the gradients that wait while a branch runs backward."""
        return self.stream * (1 + self.beside)

    @property
    def stream(self) -> Num:
        """Return the bytes of the residual stream, n D s."""
        return self.rows * self.hidden * self.size

    @property
    def matmul_stream(self) -> Num:
        """Return the bytes of the residual stream as a matrix product keeps it."""
        return self.product_bytes(self.rows * self.hidden)

    def product_bytes(self, numbers: Num) -> Num:
        """Return the bytes of so many numbers as one of our layers of a block keeps them."""
        wide = numbers * self.matmul_size
        if not np.any(self.fp8_block):
            return wide
        tiles = numbers // elementwise_max(self.fp8_block, 1)
        narrow = numbers * CODE_BYTES + (1 - self.fp8_whole) * tiles * SCALE_BYTES
        return self.in_fp8 * narrow + (1 - self.in_fp8) * wide

    def copied_bytes(self, numbers: Num) -> Num:
        """Return what a layer keeps beside an input of so many numbers that another keeps, too."""
        return self.in_fp8 * self.product_bytes(numbers)

    @property
    def in_fp8(self) -> Num:
        """Return whether our layers keep 8-bit numbers."""
        return is_positive(self.fp8_block)

    @property
    def whole(self) -> Num:
        """Return the bytes of all rows of the residual stream, N D s."""
        return self.tokens * self.hidden * self.size

    @property
    def normed_rows(self) -> Num:
        """Return what of a token's queries and keys has a statistic: heads, or each as a whole."""
        return self.qk_norm * (
            self.qk_width * 2 + (1 - self.qk_width) * (self.heads + self.kv_heads)
        )

    @property
    def queries(self) -> Num:
        """Return the bytes of the queries, N H h s; the output of attention has as many."""
        return self.tokens * self.heads * self.head_dim * self.size

    @property
    def keys(self) -> Num:
        """Return the bytes of the keys, N K h s; values have as many."""
        return self.tokens * self.kv_heads * self.head_dim * self.size

    def learns(self, group: int) -> Num:
        """Return whether layers that read the same input have a gradient to compute from it.

        `group` is their place in `LINEAR_GROUPS` and, behind them, `LATENT_GROUPS`.
        """
        return elementwise_max(1 - self.frozen, is_positive(self.adapters[group]))

    def narrow_bytes(self, group: int) -> Num:
        """Return the bytes of what the A of all adapters of a group make of their input, N R s."""
        return self.tokens * self.adapters[group] * self.size

    @property
    def shared(self) -> Num:
        """Return whether layers are split over tensor ranks."""
        return is_positive(self.tp - 1)

    def chunk_rows(self, rows: Num, width: Num) -> Num:
        """Return how many of `rows` rows are widened at a time."""
        most = elementwise_max(1, self.chunk_elements // elementwise_max(width, 1))
        return -elementwise_max(-rows, -most)

    def widened_bytes(self, width: Num, rows: Num) -> Num:
        """Return what a weight gradient has that adds up in a wider dtype and widens its operands.

        It widens a few of the rows of both matrices at a time, of `width` elements together.
        """
        piece = -elementwise_max(-rows, -PRODUCT_ROWS)
        return self.mixed * self.widens * piece * width * WIDE_BYTES

    def sum_bytes(self, rows: Num, width: Num) -> Num:
        """Return the partial sums that a kernel gives of rows, beside their sum."""
        return self.cut_sums * num_partial_sums(rows) * width * self.statistics_bytes

    @property
    def scattered(self) -> Num:
        """Return whether the residual stream is split over the tensor ranks."""
        return is_positive(self.tokens - self.rows)

    def gathered_bytes(self, whole: Num) -> Num:
        """Return what a product has of rows that it gathers, `whole` together.

        Around a ring two chunks come in turn, beside the one that is here.
        """
        in_turn = self.tp_ring * (1 + is_positive(self.tp - 2)) * (whole // self.tp)
        return self.scattered * ((1 - self.tp_ring) * whole + in_turn)

    def summed_bytes(self, whole: Num) -> Num:
        """Return what a product has of its output, `whole` for all rows, that is summed over ranks.

        Where rows are split, this rank's rows of the sum, too. Around a ring a chunk is made while
        one leaves and one comes.
        """
        chunk = whole // self.tp
        taken = whole + self.scattered * chunk
        return (1 - self.tp_ring) * taken + self.tp_ring * 3 * chunk

    def left_early(self, whole: Num) -> Num:
        """Return what of `summed_bytes` goes before the next gather: all but the sum itself.

        Where a sum is under way beside that gather, nothing.
        """
        overlaps = elementwise_max(self.tp_ring, self.tp_fused)
        return overlaps * (self.summed_bytes(whole) - whole // self.tp)


def holds(flag: Num) -> bool:
    """Return whether a form of blocks is there: in all of them, where there are arrays of plans."""
    return bool(np.all(np.asarray(flag) > 0))


def is_positive(value: Num) -> Num:
    """Return 1 where a whole number is more than 0, else 0."""
    return elementwise_max(value, 0) // elementwise_max(value, 1)


def elementwise_max(*values: Num) -> Num:
    """Return the largest, entry by entry where there are arrays."""
    found = values[0]
    for value in values[1:]:
        if isinstance(found, np.ndarray) or isinstance(value, np.ndarray):
            found = np.maximum(found, value)
        elif value > found:
            found = value
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Say what a tensor that is kept takes: its operator, its name, bytes, and their formula."""

    operator: str
    name: str
    bytes: Num
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorMemory:
    """Say what an operator keeps and uses, in bytes.

    Where a forward pass comes again in backward, weight gradients that were put off may run in it.
    """

    name: str
    """The operator."""
    saved: tuple[SavedTensor, ...] = ()
    """What waits from its forward to its backward."""
    kept_for_weight_gradient: tuple[SavedTensor, ...] = ()
    """What waits from B to W, where backward is split."""
    forward: Num = 0
    """The most that there is while it runs forward, beside what operators before it keep."""
    backward: Num = 0
    """The most while it runs backward, beside what it and operators before it keep."""
    backward_split: Num = 0
    """The same in B, beside what of later operators waits for W, too."""
    output_gradient: Num = 0
    """What of `backward` is the gradient of the block's output, which may live on anyway."""
    remade: tuple[SavedTensor, ...] = ()
    """What is not kept: `reader` makes it again, from when on it waits for this operator's
    backward."""
    reader: str = ""
    """The later operator whose backward makes `remade`."""
    again: Num = 0
    """The most while this operator, in its backward, makes again what it reads."""
    deferred: Num = 0
    """What weight gradients keep that are put off until the next gather."""
    deferred_peak: Num = 0
    """The most while those run."""
    early: Num | None = None
    """The bytes that the operator then has; None: all that it has backward."""
    forward_without_graph: Num | None = None
    """`forward` where nothing is kept for backward, if that is less."""
    rerun: Num | None = None
    """What is there when weight gradients that were put off run in a repeated forward pass."""

    @property
    def saved_bytes(self) -> Num:
        """Return the bytes that wait for backward."""
        return total_saved_bytes(self.saved)

    @property
    def remade_bytes(self) -> Num:
        """Return the bytes that are made again."""
        return total_saved_bytes(self.remade)

    @property
    def weight_gradient_bytes(self) -> Num:
        """Return the bytes that wait for W."""
        return total_saved_bytes(self.kept_for_weight_gradient)


def saved_tensors(operator: str, *rows: tuple[str, Num, str]) -> tuple[SavedTensor, ...]:
    """Return tensors of an operator, of their names, bytes and formulas."""
    return tuple(
        SavedTensor(operator=operator, name=name, bytes=size, formula=formula)
        for name, size, formula in rows
    )


def total_saved_bytes(saved: tuple[SavedTensor, ...]) -> Num:
    """Return the bytes of all of them."""
    return sum((one.bytes for one in saved), 0)


def activation_numbers_from_plan(
    plan: Plan, cp_rank: int = 0, pieces: AttentionRowChunks | None = None
) -> ActivationNumbers:
    """Return the numbers of a plan on a context rank."""
    model, tp, tokens = plan.model, plan.mesh.tp, plan.local_tokens
    precision = plan.mathematics.precision
    size = DTYPE_BYTES[precision.parameters]
    heads, kv_heads = model.heads // tp, model.kv_heads // tp
    degree, gpu = plan.layout.context.ulysses_degree, on_gpu(plan)
    adds_wider = gpu and size < WIDE_BYTES and precision.gradients == "fp32"
    forward, first, run, rest = attention_working_bytes(plan, cp_rank, pieces)
    return ActivationNumbers(
        tokens=tokens,
        rows=tokens // tp if plan.layout.sequence_parallel else tokens,
        hidden=model.hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=model.head_dim,
        inner=model.ffn // tp,
        up=2 if model.gated else 1,
        vocab=-(-model.vocab // tp),
        size=size,
        statistics_bytes=max(WIDE_BYTES, size),
        tp=tp,
        tp_ring=int(plan.layout.tp_ring),
        tp_fused=int(plan.layout.tp_overlap == "symmetric-memory"),
        low_precision=int(size < WIDE_BYTES),
        rope=int(model.positions == "rope"),
        learned=int(model.positions == "learned"),
        qk_norm=int(model.qk_norm),
        qk_width=int(model.qk_norm_over == "width"),
        layer_norm=int(model.norm == "layernorm"),
        sinks=int(model.sinks),
        qkv_bias=int(model.qkv_bias),
        output_bias=int(model.output_bias),
        mlp_bias=int(model.mlp_bias),
        dropout=int(model.dropout > 0.0),
        multiplied=int(model.multipliers.residual != 1.0),
        embedding_multiplied=int(model.multipliers.embedding != 1.0),
        norm_before=int(model.norm_place != "after"),
        norm_after=int(model.norm_place != "before"),
        parallel=int(model.residual != "sequential"),
        one_norm=int(model.residual == "parallel-one-norm"),
        ring=int(plan.placement.ring_degree > 1),
        exchanged=int(degree > 1),
        copies=kv_copies(heads, kv_heads, degree),
        transposed=int(output_is_by_head(plan)),
        attend_forward=forward,
        attend_first=first,
        attend_run=run,
        attend_rest=rest,
        matmul_size=size,
        fp8_block=precision.fp8_block if precision.is_fp8 else 0,
        fp8_whole=int(precision.has_tensor_scales),
        fp8_wide=widened_element_bytes(precision, on_gpu=gpu),
        fp8_casts=int(plan.layout.zero.gather != "fp8"),
        mixed=int(precision.gradients != precision.parameters),
        widens=int(not adds_wider),
        chunk_elements=GPU_CHUNK_ELEMENTS if gpu else CACHE_ELEMENTS,
        fused_norm=_fused(plan, "norm"),
        fused_rotary=_fused(plan, "rotary") * (_fused(plan, "norm") or not model.qk_norm),
        fused_swiglu=_fused(plan, "swiglu"),
        # Logits of 8 bytes are for proofs, and have the way of a CPU.
        fused_loss=_fused(plan, "loss")
        * (size < DTYPE_BYTES["fp64"])
        * (model.final_soft_cap is None),
        capped_logits=int(model.final_soft_cap is not None),
        cut_sums=int(plan.layout.kernels.provider == "triton"),
        frozen=int(model.lora is not None),
        adapters=adapter_rows(model),
    )


def adapter_rows(model: ModelShape) -> tuple[int, ...]:
    """Return the rows of the A of all adapters of each of `LINEAR_GROUPS` and `LATENT_GROUPS`."""
    lora, groups = model.lora, (*LINEAR_GROUPS, *LATENT_GROUPS)
    if lora is None:
        return (0,) * len(groups)
    return tuple(lora.rank * sum(name in lora.targets for name in group) for group in groups)


def _fused(plan: Plan, piece: FusedPiece) -> int:
    return int(plan.layout.kernels.of(piece) != "plain")
