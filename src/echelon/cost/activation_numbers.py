"""The numbers that formulas of activations read, and what such a formula gives.

Every number is of one rank and one microbatch. Each may be a NumPy array: the formulas add,
multiply and take the larger of two, so one formula stands for one plan and for a lattice of plans.
Flags are 0 or 1 and are multiplied by.

Letters: N tokens of a microbatch on a context rank, n those of the residual stream here (N / tp
where the stream is split, else N), D hidden width, H query and K key/value heads of a tensor rank,
h the width of a head, F inner width and V vocabulary of a tensor rank, s the bytes of an element,
w = max(4, s) those of a statistic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.activations_working import AttentionPieces, working
from echelon.cost.context import kv_copies

Num: TypeAlias = "int | float | NDArray[Any]"

INDEX_BYTES = 8
"""Token ids, positions and places of rows are int64."""

CACHE_ELEMENTS = 1 << 18
"""Elements of a tensor that are widened at a time (`parallel/pieces.py`, on a CPU)."""

WIDE_BYTES = 4
"""Statistics are in at least float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Say what a tensor that is kept takes: its operator, its name, bytes, and their formula."""

    operator: str
    name: str
    bytes: Num
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Say what an operator keeps and uses.

    `saved` waits from its forward to its backward; `waits` from B to W, where backward is split.
    `forward` is the most that there is while it runs beside what operators before it keep,
    `backward` beside what it and operators before it keep; `split` the same in B, beside what of
    later operators waits for W, too. Weight gradients that are put off until the next gather keep
    `later` bytes, and `product` while they run, where an operator has `early` of its bytes. `bare`
    is `forward` where nothing is kept for backward, if that is less. Where a forward pass comes
    again in backward, they may run in it: `runs` is what is there then.
    """

    name: str
    saved: tuple[Saved, ...]
    waits: tuple[Saved, ...]
    forward: Num = 0
    backward: Num = 0
    split: Num = 0
    later: Num = 0
    product: Num = 0
    early: Num | None = None
    bare: Num | None = None
    runs: Num | None = None

    @property
    def saved_bytes(self) -> Num:
        """Return the bytes that wait for backward."""
        return total(self.saved)

    @property
    def waiting_bytes(self) -> Num:
        """Return the bytes that wait for W."""
        return total(self.waits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationNumbers:
    """Give the sizes of one microbatch on one rank, in the letters of this file.

    `up` is 2 for a gated MLP, else 1. `ring` says whether keys and values of other places are met
    one after the other (or gathered), `exchanged` whether heads are exchanged for positions, with
    `copies` of each key/value head. `transposed` says whether the output of attention comes in
    another order than the next product reads, so that it is copied. `found` are the tokens whose
    row of the embedding is on this rank: data where tp > 1 (then N / tp is as good a guess as any).
    `mixed` says whether gradients add up in another dtype than they are made in; the numbers
    of attention are those of `AttentionWork` (`cost/activations_working.py`).
    """

    tokens: Num
    rows: Num
    hidden: Num
    heads: Num
    kv_heads: Num
    head_dim: Num
    inner: Num
    up: Num
    vocab: Num
    size: Num
    wide: Num
    tp: Num = 1
    narrow: Num = 0
    rope: Num = 1
    learned: Num = 0
    qk_norm: Num = 0
    layer_norm: Num = 0
    qkv_bias: Num = 0
    output_bias: Num = 0
    mlp_bias: Num = 0
    dropout: Num = 0
    ring: Num = 0
    exchanged: Num = 0
    copies: Num = 1
    transposed: Num = 0
    found: Num = 0
    mixed: Num = 0
    attend_forward: Num = 0
    attend_first: Num = 0
    attend_run: Num = 0
    attend_rest: Num = 0

    @property
    def stream(self) -> Num:
        """Return the bytes of the residual stream, n D s."""
        return self.rows * self.hidden * self.size

    @property
    def whole(self) -> Num:
        """Return the bytes of all rows of the residual stream, N D s."""
        return self.tokens * self.hidden * self.size

    @property
    def queries(self) -> Num:
        """Return the bytes of the queries, N H h s; the output of attention has as many."""
        return self.tokens * self.heads * self.head_dim * self.size

    @property
    def keys(self) -> Num:
        """Return the bytes of the keys, N K h s; values have as many."""
        return self.tokens * self.kv_heads * self.head_dim * self.size

    @property
    def shared(self) -> Num:
        """Return whether layers are split over tensor ranks."""
        return most(self.tp - 1, 0) // most(self.tp - 1, 1)

    def piece(self, rows: Num, width: Num) -> Num:
        """Return how many of `rows` rows are widened at a time."""
        return -most(-rows, -(CACHE_ELEMENTS // most(width, 1)))

    @property
    def scattered(self) -> Num:
        """Return whether the residual stream is split over the tensor ranks."""
        return most(self.tokens - self.rows, 0) // most(self.tokens - self.rows, 1)

    @classmethod
    def of(
        cls, plan: Plan, cp_rank: int = 0, pieces: AttentionPieces | None = None
    ) -> ActivationNumbers:
        """Return the numbers of a plan on a context rank."""
        model, tp, tokens = plan.model, plan.mesh.tp, plan.local_tokens
        precision = plan.mathematics.precision
        size = DTYPE_BYTES[precision.parameters]
        heads, kv_heads = model.heads // tp, model.kv_heads // tp
        degree = plan.layout.context.ulysses_degree
        work = working(plan, cp_rank, pieces)
        return cls(
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
            wide=max(WIDE_BYTES, size),
            tp=tp,
            narrow=int(size < WIDE_BYTES),
            rope=int(model.positions == "rope"),
            learned=int(model.positions == "learned"),
            qk_norm=int(model.qk_norm),
            layer_norm=int(model.norm == "layernorm"),
            qkv_bias=int(model.qkv_bias),
            output_bias=int(model.output_bias),
            mlp_bias=int(model.mlp_bias),
            dropout=int(model.dropout > 0.0),
            ring=int(plan.placement.ring_degree > 1),
            exchanged=int(degree > 1),
            copies=kv_copies(heads, kv_heads, degree),
            transposed=int(model.soft_cap is not None),
            found=-(-tokens // tp),
            attend_forward=work.forward,
            attend_first=work.first,
            attend_run=work.run,
            attend_rest=work.rest,
            mixed=int(precision.gradients != precision.parameters),
        )


def total(saved: tuple[Saved, ...]) -> Num:
    """Return the bytes of all of them."""
    found: Num = 0
    for one in saved:
        found = found + one.bytes
    return found


def most(*values: Num) -> Num:
    """Return the largest, entry by entry where there are arrays."""
    found = values[0]
    for value in values[1:]:
        if isinstance(found, np.ndarray) or isinstance(value, np.ndarray):
            found = np.maximum(found, value)
        elif value > found:
            found = value
    return found
