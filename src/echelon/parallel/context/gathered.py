"""Gathered keys and values: every rank gets them all, layer by layer.

Split: positions, zigzag, so that a causal mask gives every rank the same work.
Sent:  all-gather of keys and values forward and again in backward (what was gathered is not kept),
       then a reduce-scatter of their gradients. Under a sliding window only the rows that a rank
       needs go to it, from their owners.
Bytes: `cost.context.context_bytes`.
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

from echelon.core.attention_mask import Run
from echelon.models.attention.interface import Attended, Gradients
from echelon.models.attention.local import attend_pieces, backward_pieces
from echelon.models.batch import positions_of
from echelon.models.precision import at_least_fp32
from echelon.parallel.context.blocks import Course, course_of, start_transfer
from echelon.parallel.context.ring import working
from echelon.parallel.context.sight import Reach


class GatheredAttention(torch.autograd.Function):
    """Attention of the queries of this rank over the gathered keys of all."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        reach: Reach,
    ) -> torch.Tensor:
        """Return [T,B,H,D] for q [T,B,H,D] and this rank's k and v [T,B,K,D]."""
        ring, sight = reach.ring, reach.sight
        gatherer = (_Whole if sight.mask.window is None else _Needed)(reach)
        kv_T2BKD = torch.stack((k, v), dim=1)
        gatherer.start(kv_T2BKD, name="gathered.forward")
        kv_S2BKD = gatherer.finish()
        pieces = sight.pieces(reach.placement.ring_runs(ring.index), gatherer.runs)
        with working(ring, "gathered.forward"):
            merged = attend_pieces(q, kv_S2BKD[:, 0], kv_S2BKD[:, 1], pieces, sight.soft_cap)
        out, lse = merged.result()
        ctx.save_for_backward(q, kv_T2BKD, out, lse)
        ctx.gatherer, ctx.pieces, ctx.reach = gatherer, pieces, reach
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dq, dk, dv; those of keys are summed over the ranks that met them."""
        q, kv_T2BKD, out, lse = ctx.saved_tensors
        gatherer: _Whole | _Needed = ctx.gatherer
        reach: Reach = ctx.reach
        gatherer.start(kv_T2BKD, name="gathered.backward")
        reach.store.run_deferred()
        kv_S2BKD = gatherer.finish()
        wide = at_least_fp32(q.dtype)
        dq = torch.zeros_like(q, dtype=wide)
        dkv_S2BKD = torch.zeros_like(kv_S2BKD, dtype=wide)
        with working(gatherer.ring, "gathered.backward"):
            attended = Attended(q, kv_S2BKD[:, 0], kv_S2BKD[:, 1], out, lse)
            into = Gradients(dq, dkv_S2BKD[:, 0], dkv_S2BKD[:, 1])
            backward_pieces(dout, attended, ctx.pieces, reach.sight.soft_cap, into)
        dkv_T2BKD = gatherer.scatter(dkv_S2BKD, name="gathered.gradients").to(q.dtype)
        return dq.to(q.dtype), dkv_T2BKD[:, 0], dkv_T2BKD[:, 1], None


class _Whole:
    """All keys of the sequence, by a collective, put in the order of their positions."""

    def __init__(self, reach: Reach) -> None:
        """Gather over the ring of `reach`."""
        ring, placement = reach.ring, reach.placement
        self.ring, self.runs = ring, (Run(0, 1, placement.length),)
        runs = tuple(run for place in range(ring.size) for run in placement.ring_runs(place))
        self._runs = runs

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


class _Needed:
    """The keys that the windows of this rank reach, from those that hold them."""

    def __init__(self, reach: Reach) -> None:
        """Exchange over the ring of `reach`."""
        ring = reach.ring
        self.ring = ring
        self._course: Course = course_of(reach.placement, reach.sight.mask, ring.index, direct=True)
        self._reached = [
            (self._course.owner_at(step), rows)
            for step in range(ring.size)
            if (rows := self._course.rows_of(self._course.owner_at(step))) is not None
        ]
        self.runs = tuple(run for _, rows in self._reached for run in rows.runs)

    def start(self, own: torch.Tensor, *, name: str) -> None:
        """Start the exchange."""
        course = self._course
        self._tensors = {
            owner: own if owner == course.place else own.new_empty((rows.count, *own.shape[1:]))
            for owner, rows in self._reached
        }
        self._transfer = start_transfer(
            course.keys.get(1, ()), self._tensors, course, self.ring, name=name, add=False
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
        hops = self._course.gradients.get(self._course.degree, ())
        start_transfer(hops, tensors, self._course, self.ring, name=name, add=True).finish()
        return tensors[self._course.place]
