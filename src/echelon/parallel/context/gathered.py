# SPDX-License-Identifier: Apache-2.0
"""Gathered keys and values: every rank gets them all, layer by layer.

Split: positions, zigzag, so that a causal mask gives every rank the same work.
Sent:  all-gather of keys and values forward and again in backward (what was gathered is not kept),
       then a reduce-scatter of their gradients. Under a sliding window only the rows that a rank
       needs go to it, from their owners.
Bytes: `context_bytes` in `cost/bytes/context_sent.py`.
Must divide: 2 n | T.
Source: Grattafiori et al., "Llama 3", 2024, section 3.3.2: with few key/value heads they are small
        beside queries, any mask is simple, and nothing but memory is lost.

The output needs no reduction: each rank computes all of its own rows.
Shape suffixes: T positions here, S of all ranks, B sequences, H query and K key/value heads, D
head_dim.
"""

from __future__ import annotations

from typing import Any

import torch

from echelon.core.attention_mask import PositionRun
from echelon.layout.ring_transfers import RingPlan, ring_plan
from echelon.models.attention.interface import AttentionGradients, SavedAttention
from echelon.models.attention.local import attend_tiles, backward_tiles
from echelon.models.batch import positions_of
from echelon.models.precision import at_least_fp32
from echelon.parallel.context.attention import RingContext
from echelon.parallel.context.ring import record_ring_work, start_transfer


class GatheredAttention(torch.autograd.Function):
    """Attention of the queries of this rank over the gathered keys of all."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ring_context: RingContext,
    ) -> torch.Tensor:
        """Return [T,B,H,D] for q [T,B,H,D] and this rank's k and v [T,B,K,D]."""
        ring = ring_context.ring
        gatherer = (_AllKeys if ring_context.mask.window is None else _WindowKeys)(ring_context)
        kv_T2BKD = torch.stack((k, v), dim=1)
        gatherer.start(kv_T2BKD, name="gathered.forward")
        kv_S2BKD = gatherer.finish()
        pieces = ring_context.tiles(ring_context.placement.ring_runs(ring.index), gatherer.runs)
        with record_ring_work(ring, "gathered.forward"):
            merged = attend_tiles(q, kv_S2BKD[:, 0], kv_S2BKD[:, 1], pieces, ring_context.rule)
        if ring_context.rule.sinks is not None:
            merged.add_sinks(ring_context.rule.sinks.values_H)
        out, lse = merged.result()
        ctx.save_for_backward(q, kv_T2BKD, out, lse)
        ctx.gatherer, ctx.tiles, ctx.ring_context = gatherer, pieces, ring_context
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dq, dk, dv; those of keys are summed over the ranks that met them."""
        q, kv_T2BKD, out, lse = ctx.saved_tensors
        gatherer: _AllKeys | _WindowKeys = ctx.gatherer
        ring_context: RingContext = ctx.ring_context
        if ring_context.rule.sinks is not None:
            ring_context.rule.sinks.backward(dout, out, lse)
        gatherer.start(kv_T2BKD, name="gathered.backward")
        ring_context.store.run_deferred()
        kv_S2BKD = gatherer.finish()
        wide = at_least_fp32(q.dtype)
        dq = torch.zeros_like(q, dtype=wide)
        dkv_S2BKD = torch.zeros_like(kv_S2BKD, dtype=wide)
        with record_ring_work(gatherer.ring, "gathered.backward"):
            attended = SavedAttention(q, kv_S2BKD[:, 0], kv_S2BKD[:, 1], out, lse)
            into = AttentionGradients(dq, dkv_S2BKD[:, 0], dkv_S2BKD[:, 1])
            backward_tiles(dout, attended, ctx.tiles, ring_context.rule, into)
        dkv_T2BKD = gatherer.scatter(dkv_S2BKD, name="gathered.gradients").to(q.dtype)
        return dq.to(q.dtype), dkv_T2BKD[:, 0], dkv_T2BKD[:, 1], None


class _AllKeys:
    """All keys of the sequence, by a collective, put in the order of their positions."""

    def __init__(self, ring_context: RingContext) -> None:
        """Gather over the ring of `reach`."""
        ring, placement = ring_context.ring, ring_context.placement
        self.ring, self.runs = ring, (PositionRun(0, 1, placement.length),)
        self._runs = [run for place in range(ring.size) for run in placement.ring_runs(place)]

    def start(self, own: torch.Tensor, *, name: str) -> None:
        """Start to gather."""
        self._whole = own.new_empty((own.shape[0] * self.ring.size, *own.shape[1:]))
        self._pending = self.ring.all_gather(self._whole, own, name=name, async_op=True)

    def finish(self) -> torch.Tensor:
        """Return the keys and values of all positions."""
        self._pending.wait()
        whole, self._whole = self._whole, self._whole.new_empty(0)
        ordered = torch.empty_like(whole)
        return ordered.index_copy_(0, positions_of(self._runs, whole.device), whole)

    def scatter(self, gradients: torch.Tensor, *, name: str) -> torch.Tensor:
        """Return the sum over ranks of the gradients of this rank's positions."""
        by_rank = gradients[positions_of(self._runs, gradients.device)]
        own = gradients.new_empty((gradients.shape[0] // self.ring.size, *gradients.shape[1:]))
        self.ring.reduce_scatter(own, by_rank, name=name)
        return own


class _WindowKeys:
    """The keys that the windows of this rank reach, from those that hold them."""

    def __init__(self, ring_context: RingContext) -> None:
        """Exchange over the ring of `reach`."""
        ring = ring_context.ring
        self.ring = ring
        self._plan: RingPlan = ring_plan(
            ring_context.placement, ring_context.mask, ring.index, direct=True
        )
        self._reached = [
            (self._plan.owner_at(step), rows)
            for step in range(ring.size)
            if (rows := self._plan.rows_from(self._plan.owner_at(step))) is not None
        ]
        self.runs = tuple(run for _, rows in self._reached for run in rows.runs)

    def start(self, own: torch.Tensor, *, name: str) -> None:
        """Start the exchange."""
        plan = self._plan
        self._tensors = {
            owner: own if owner == plan.ring_rank else own.new_empty((rows.count, *own.shape[1:]))
            for owner, rows in self._reached
        }
        self._transfer = start_transfer(
            plan.keys.get(1, ()), self._tensors, plan, self.ring, name=name, add=False
        )

    def finish(self) -> torch.Tensor:
        """Return the keys and values that are here now, this rank's first."""
        self._transfer.finish()
        tensors, self._tensors = self._tensors, {}
        return torch.cat([tensors[owner] for owner, _ in self._reached])

    def scatter(self, gradients: torch.Tensor, *, name: str) -> torch.Tensor:
        """Return the gradients of this rank's positions, those of others that met them added."""
        parts = gradients.split([rows.count for _, rows in self._reached])
        tensors = {owner: part for (owner, _), part in zip(self._reached, parts, strict=True)}
        transfers = self._plan.gradients.get(self._plan.degree, ())
        start_transfer(transfers, tensors, self._plan, self.ring, name=name, add=True).finish()
        return tensors[self._plan.ring_rank]
