# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence of which this rank holds some positions, by any kind.

A kind over the ring is found by its registry entry (`core.choices`); it gets a `RingContext`: what
the queries may meet, and over which ring.

Shape suffixes: see `models/operations.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from echelon.core.attention_mask import AttentionMask, DocumentStarts, Placement, PositionRun
from echelon.core.choices.kernels import AttentionKernel
from echelon.core.choices.registry import load_reference
from echelon.core.model_shape import ModelShape
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import Plan
from echelon.layout.attention_tiles import AttentionTile, tiles_between
from echelon.models.attention.interface import HeadSinks
from echelon.models.attention.local import AttentionRule, LocalAttention, takes_any_band
from echelon.models.batch import TokenBatch
from echelon.parallel.context.ulysses import HeadsToPositions, PositionsToHeads
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.transport.collectives import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class RingContext:
    """Hold the ring of this rank, which positions its places hold, and what a query meets there.

    `store` has work for the time of a transfer; tiles of a window have `tile_rows` or more, and
    None: a kernel takes it whole.
    """

    ring: Group
    placement: Placement
    mask: AttentionMask
    documents: DocumentStarts | None
    rule: AttentionRule
    store: GradientStore
    tile_rows: int | None = TRAINING_PIECES.tile_rows

    def tiles(
        self, queries: tuple[PositionRun, ...], keys: tuple[PositionRun, ...]
    ) -> tuple[AttentionTile, ...]:
        """Return what of the rows of `queries` and of `keys` is to be computed."""
        return tiles_between(queries, keys, self.mask, self.documents, self.tile_rows)


class ContextAttention:
    """Let each query of this rank meet each key of the sequence."""

    def __init__(
        self,
        plan: Plan,
        ring: Group,
        ulysses: Group,
        store: GradientStore,
        *,
        pieces: PieceSizes = TRAINING_PIECES,
    ) -> None:
        """Send keys around `ring` and exchange heads in `ulysses`, as `plan.layout.context` says.

        `store` has work for the time of a transfer; tiles and blocks of scores are of `pieces`.
        """
        self._pieces = pieces
        self._kernel: AttentionKernel = plan.layout.context.attention
        self._capability = plan.cluster.device.capability
        self._over_places = load_reference(plan.layout.context.record.runner)
        self.ring, self.ulysses, self.store = ring, ulysses, store
        self._placement = plan.placement
        self._cp_rank = ring.index * ulysses.size + ulysses.index

    @property
    def exchanges(self) -> bool:
        """Return whether attention sends anything."""
        return self.ring.size > 1 or self.ulysses.size > 1

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
        """Return attention of q [T,B,H,hd] over the k, v [T,B,K,hd] of all ranks, [N, H * hd].

        Each query meets its sink once, on the rank that has it; their gradients go to the store.
        """
        rows = q.shape[0] * q.shape[1]
        rule = AttentionRule(
            scale=shape.attention_scale,
            soft_cap=shape.soft_cap,
            kernel=self._kernel,
            planned_capability=self._capability,
            sinks=None if sinks_H is None else self._sinks(sinks_H),
            pieces=self._pieces,
        )
        tile_rows = None if takes_any_band(q, rule) else self._pieces.tile_rows
        if not self.exchanges:
            pieces = tiles_between(batch.runs, batch.runs, shape.mask, batch.documents, tile_rows)
            return LocalAttention.apply(q, k, v, pieces, rule).reshape(rows, -1)
        ring_context = RingContext(
            ring=self.ring,
            placement=self._placed(batch),
            mask=shape.mask,
            documents=batch.documents,
            rule=rule,
            store=self.store,
            tile_rows=tile_rows,
        )
        if self.ulysses.size > 1:
            q, k, v = PositionsToHeads.apply(q, k, v, self.ulysses, self.store)
        out = self._over_ring(q, k, v, ring_context)
        if self.ulysses.size > 1:
            out = HeadsToPositions.apply(out, self.ulysses, self.store)
        return out.reshape(rows, -1)

    def _sinks(self, sinks_H: nn.Parameter) -> HeadSinks:
        """Return the sinks of the heads that are attended to here: those of a Ulysses member."""
        each, index = len(sinks_H) // self.ulysses.size, self.ulysses.index
        heads = slice(index * each, (index + 1) * each)
        return HeadSinks(weight=sinks_H, add=self.store.add, heads=heads)

    def _over_ring(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring_context: RingContext
    ) -> torch.Tensor:
        if self.ring.size == 1:
            runs = ring_context.placement.ring_runs(0)
            tiles = ring_context.tiles(runs, runs)
            return LocalAttention.apply(q, k, v, tiles, ring_context.rule)
        return self._over_places.apply(q, k, v, ring_context)

    def _placed(self, batch: TokenBatch) -> Placement:
        """Return where the positions of a batch are; its length need not be the plan's.

        Raises ValueError where the batch holds others than this rank should.
        """
        placement = self._placement
        if batch.whole_length != placement.length:
            placement = replace(placement, length=batch.whole_length)
        wanted = placement.runs(self._cp_rank)
        if batch.runs != wanted or placement.length % placement.degree:
            raise ValueError(
                f"context rank {self._cp_rank} holds {batch.runs} of {batch.whole_length} "
                f"positions, and attention places {wanted} there"
            )
        return placement
