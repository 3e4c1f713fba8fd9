# SPDX-License-Identifier: Apache-2.0
"""The operations of a decoder as a rank computes them: split over `tp`, gradients by hand.

Overrides `models.operations.Operations` step by step; with a group of one it is the fast path of a
single device, so data and pipeline parallel runs use it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from echelon.core.model_shape import Activation, ModelShape
from echelon.models.batch import TokenBatch
from echelon.models.moe import MixtureOfExperts
from echelon.models.operations import (
    GELU_FORMS,
    AttentionHeads,
    LossHead,
    NormOfStream,
    Operations,
    apply_dropout,
)
from echelon.models.rotary import rotary_key
from echelon.parallel.context import ContextAttention
from echelon.parallel.expert import ExpertParallel
from echelon.parallel.fp8_linear import Fp8ColumnLinear, Fp8RowLinear
from echelon.parallel.kernels.fused import GeGLU, LayerNorm, RMSNorm, Rotate, SwiGLU
from echelon.parallel.kernels.piece_operators import (
    Branch,
    FusedHeads,
    FusedNorm,
    FusedRotate,
    FusedSwiGLU,
    HeadsKernel,
    NormKernel,
    RemadeNorm,
)
from echelon.parallel.kernels.width_norm import WidthNorm, WidthShare, inverse_rms
from echelon.parallel.recompute import OperatorRecompute
from echelon.parallel.tensor import ColumnLinear, RowLinear, TensorSplit, WholeLinear
from echelon.parallel.transport.rows import GATHER_ROWS, SUM_GRADIENT, MoveRows
from echelon.parallel.vocabulary import (
    PositionEmbedding,
    VocabularyEmbedding,
    VocabularyHead,
    stream_rows,
    vocabulary_loss,
)
from echelon.parallel.zero import ParameterGathering


class RankOperations(Operations):
    """Compute the steps of a decoder on one of the ranks of a tensor-parallel group."""

    def __init__(
        self,
        split: TensorSplit,
        vocab: int,
        context: ContextAttention,
        *,
        experts: ExpertParallel | None = None,
    ) -> None:
        """Split layers as `split` says; `vocab` is the number of real token ids.

        `context` lets queries meet the keys of other ranks, `experts` tokens their experts.
        `gatherer` is told of every unit; until there is one, the weights are always there.
        """
        self.split, self.vocab, self.context = split, vocab, context
        self.experts = experts
        self.gatherer: ParameterGathering | Operations = Operations()
        self.recompute = OperatorRecompute()
        self._tables: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def learn(self, stages: Iterable[nn.Module]) -> None:
        """Learn of the stages of a rank which layers share scales, where tensors have such."""
        if self.split.scales is not None:
            self.split.scales.learn(stages)

    def enter(self, unit: str, x: torch.Tensor | None) -> torch.Tensor | None:
        """Return x once the weights of `unit` are there."""
        return self.gatherer.enter(unit, x)

    def leave(self, unit: str, y: torch.Tensor) -> torch.Tensor:
        """Return y, the output of `unit`."""
        return self.gatherer.leave(unit, y)

    def operator(
        self, name: str, make: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        """Return make(x), kept or to be made again as the policy of the block says."""
        return self.recompute.operator(name, make, x)

    def embed(
        self, weight_VD: nn.Parameter, positions: nn.Parameter | None, batch: TokenBatch
    ) -> torch.Tensor:
        """Return x_ND, or this rank's rows of it."""
        x_ND: torch.Tensor = VocabularyEmbedding.apply(weight_VD, batch, self.split)
        if positions is None:
            return x_ND
        rows_N = stream_rows(batch.tokens_N.numel(), self.split, x_ND.device)
        positions_N = batch.positions_T[rows_N // batch.num_sequences]
        return PositionEmbedding.apply(x_ND, positions, positions_N, self.split)

    def norm(
        self, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, eps: float
    ) -> torch.Tensor:
        """Return x normalised over its last dim."""
        if bias is not None:
            return LayerNorm.apply(x, (weight, bias), eps, self.split.store, self.split.pieces)
        if self.split.kernels.of("norm") != "plain":
            return FusedNorm.apply(x, self._norm_kernel(weight, eps))
        return RMSNorm.apply(x, weight, eps, self.split.store, self.split.pieces)

    def branch(
        self, x_ND: torch.Tensor, added_ND: torch.Tensor | None, norm: NormOfStream
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream at the head of a branch, and its norm, in one kernel where it may be.

        Where the norm is made again in backward, the layer that reads it keeps how to.
        """
        if self.split.kernels.of("residual") == "plain" or norm.bias is not None:
            return super().branch(x_ND, added_ND, norm)
        kernel = self._norm_kernel(norm.weight, norm.eps)
        again = norm.again and self.recompute.remakes("norm")
        remade = RemadeNorm(kernel) if again else None
        x_ND, normed_ND = Branch.apply(x_ND, added_ND, kernel, remade)
        if remade is not None:
            self.recompute.remember(normed_ND, remade)
        return x_ND, normed_ND

    def _norm_kernel(self, weight: nn.Parameter, eps: float) -> NormKernel:
        split = self.split
        return NormKernel(
            weight=weight, eps=eps, provider=split.kernels.provider, store=split.store
        )

    def project_in(self, x_ND: torch.Tensor, linears: Sequence[nn.Linear]) -> torch.Tensor:
        """Return the outputs of column-parallel layers side by side."""
        again = self.recompute.makes_again(x_ND)
        with self.recompute.reads(x_ND):
            if self.split.fp8_block:
                return Fp8ColumnLinear.apply(x_ND, linears, self.split, again)
            return ColumnLinear.apply(x_ND, linears, self.split, again)

    def project_alike(
        self, x_ND: torch.Tensor, linears: Sequence[nn.Linear]
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of layers that every tensor rank has whole, for the rows it holds."""
        with self.recompute.reads(x_ND):
            return WholeLinear.apply(x_ND, linears, self.split)

    def share_among_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return all rows of x; the gradients of the heads of all tensor ranks are summed."""
        way = GATHER_ROWS if self.split.scattered else SUM_GRADIENT
        return MoveRows.apply(x, self.split.group, "shared", way)

    def project_out(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Return the output of a row-parallel layer."""
        return self._row_linear(x, linear, self.split)

    def project_attended(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Return the output of attention through a row-parallel layer.

        Where attention sends something in its backward, the weight gradient waits for that time.
        """
        split = replace(self.split, exchanges=self.context.exchanges)
        return self._row_linear(x, linear, split)

    def _row_linear(self, x: torch.Tensor, linear: nn.Linear, split: TensorSplit) -> torch.Tensor:
        again = self.recompute.makes_again(x)
        with self.recompute.reads(x):
            if split.fp8_block:
                return Fp8RowLinear.apply(x, linear, split, again)
            return RowLinear.apply(x, linear, split, again)

    def rotary_tables(
        self, shape: ModelShape, batch: TokenBatch, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables of the reference, computed once per set of positions and dtype."""
        key = (batch.runs, like.dtype, like.device, rotary_key(shape, batch.whole_length))
        if key not in self._tables:
            self._tables[key] = super().rotary_tables(shape, batch, like)
        return self._tables[key]

    def rotate(self, x: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
        """Return x [T, B, heads, head_dim] turned by position."""
        provider = self.split.kernels.of("rotary")
        if provider != "plain":
            return FusedRotate.apply(x, cos_TE, sin_TE, provider)
        return Rotate.apply(x, cos_TE[:, None, None], sin_TE[:, None, None], self.split.pieces)

    def heads(
        self, qkv: torch.Tensor, heads: AttentionHeads, batch: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k, v of the projections side by side, in one kernel where it may be."""
        split, shape = self.split, heads.shape
        fused = split.kernels.fused
        if "rotary" not in fused or (heads.norms and "norm" not in fused):
            return super().heads(qkv, heads, batch)
        kernel = HeadsKernel(
            num_queries=heads.num_queries,
            num_keys=heads.num_keys,
            tables=self.rotary_tables(shape, batch, qkv),
            provider=split.kernels.provider,
            store=split.store,
            weights=tuple(one.weight for one in heads.norms),
            eps=shape.norm_eps,
        )
        return FusedHeads.apply(qkv, kernel)

    def normed_heads(
        self, q: torch.Tensor, k: torch.Tensor, heads: AttentionHeads
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys with their norms; of all heads, other ranks have parts."""
        split, shape = self.split, heads.shape
        if shape.qk_norm_over == "head" or split.group.size == 1:
            return super().normed_heads(q, k, heads)
        share = WidthShare(group=split.group, store=split.store, pieces=split.pieces)
        wide_q, wide_k = q.flatten(-2), k.flatten(-2)
        of_q, of_k = inverse_rms((wide_q, wide_k), shape.norm_eps, split.group, split.pieces)
        weight_q, weight_k = (one.weight for one in heads.norms)
        normed_q = WidthNorm.apply(wide_q, weight_q, of_q, share)
        normed_k = WidthNorm.apply(wide_k, weight_k, of_k, share)
        return normed_q.view(q.shape), normed_k.view(k.shape)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: ModelShape,
        batch: TokenBatch,
        *,
        sinks_H: nn.Parameter | None = None,
    ) -> torch.Tensor:
        """Return attention over the heads of this rank, the keys of all context ranks met."""
        return self.context.attend(q, k, v, shape, batch, sinks_H=sinks_H)

    def mixture(
        self, x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Return what the experts of all ranks make of each token."""
        assert self.experts is not None, "the plan has experts"
        return self.experts.mixture(x_ND, mixture, batch)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(gate) * up."""
        if activation != "silu":
            return GeGLU.apply(gate_up, GELU_FORMS[activation], self.split.pieces)
        provider = self.split.kernels.of("swiglu")
        if provider != "plain":
            return FusedSwiGLU.apply(gate_up, provider)
        return SwiGLU.apply(gate_up, self.split.pieces)

    def dropout(
        self, x_ND: torch.Tensor, probability: float, site: str, batch: TokenBatch
    ) -> torch.Tensor:
        """Return x with the elements dropped that one device would drop."""
        if probability == 0.0 or not batch.train:
            return x_ND
        rows = stream_rows(batch.tokens_N.numel(), self.split, x_ND.device)
        return apply_dropout(x_ND, rows, probability, site, batch)

    def head_loss(
        self, x_ND: torch.Tensor, head: LossHead, labels_N: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return scale x the sum of token losses: a number once backward has been here.

        No rank holds the logits of all ids, nor those of all tokens.
        """
        whole = VocabularyHead(
            weight_VD=head.weight_VD,
            factor=head.factor,
            soft_cap=head.soft_cap,
            labels_N=labels_N,
            scale=scale,
            vocab=self.vocab,
            split=self.split,
        )
        return vocabulary_loss(x_ND, whole)
