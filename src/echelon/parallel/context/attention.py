"""Attention over a sequence of which this rank holds some positions, by any kind.

Shape suffixes: see `models/operations.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from echelon.core.model_shape import ModelShape
from echelon.core.placement import Placement
from echelon.core.plan import Plan
from echelon.models.attention.local import LocalAttention
from echelon.models.batch import TokenBatch
from echelon.parallel.collectives import Group
from echelon.parallel.context.gathered import GatheredAttention
from echelon.parallel.context.ring import RingAttention
from echelon.parallel.context.sight import Reach, Sight
from echelon.parallel.context.ulysses import HeadsToPositions, PositionsToHeads
from echelon.parallel.gradients import GradientStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroups:
    """Hold the groups of one rank: the ring, and the neighbours that exchange heads."""

    ring: Group
    ulysses: Group


class ContextAttention:
    """Let each query of this rank meet each key of the sequence."""

    def __init__(self, plan: Plan, groups: ContextGroups, store: GradientStore) -> None:
        """Work as `plan.layout.context` says; `store` has work for the time of a transfer."""
        self.kind, self.groups, self.store = plan.layout.context.kind, groups, store
        self._placement = plan.placement
        self._cp_rank = groups.ring.index * groups.ulysses.size + groups.ulysses.index

    @property
    def exchanges(self) -> bool:
        """Return whether attention sends anything."""
        return self.groups.ring.size > 1 or self.groups.ulysses.size > 1

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: ModelShape,
        batch: TokenBatch,
    ) -> torch.Tensor:
        """Return attention of q [T,B,H,hd] over the k, v [T,B,K,hd] of all ranks, [N, H * hd]."""
        sight = Sight(mask=shape.mask, documents=batch.documents, soft_cap=shape.soft_cap)
        rows = q.shape[0] * q.shape[1]
        ulysses = self.groups.ulysses
        if not self.exchanges:
            pieces = sight.pieces(batch.runs, batch.runs)
            return LocalAttention.apply(q, k, v, pieces, sight.soft_cap).reshape(rows, -1)
        if ulysses.size > 1:
            q, k, v = PositionsToHeads.apply(q, k, v, ulysses, self.store)
        out = self._over_ring(q, k, v, self._placed(batch), sight)
        if ulysses.size > 1:
            out = HeadsToPositions.apply(out, ulysses, self.store)
        return out.reshape(rows, -1)

    def _over_ring(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, placement: Placement, sight: Sight
    ) -> torch.Tensor:
        ring = self.groups.ring
        if ring.size == 1:
            runs = placement.ring_runs(0)
            return LocalAttention.apply(q, k, v, sight.pieces(runs, runs), sight.soft_cap)
        reach = Reach(ring=ring, placement=placement, sight=sight, store=self.store)
        if self.kind == "gathered":
            return GatheredAttention.apply(q, k, v, reach)
        return RingAttention.apply(q, k, v, reach)

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
