# SPDX-License-Identifier: Apache-2.0
"""Ring attention: keys and values travel around the ring while attention meets what is there.

Split: positions, zigzag or striped (`core.attention_mask`), so that every place has the same work.
Sent:  forward: the rows of keys and values that others need, the next block while this one is at
       work; backward: the same again, and the gradients of each block one step behind, added up
       from place to place and home.
Bytes: `context_bytes` in `cost/bytes/context_sent.py`.
Must divide: 2 n | T (zigzag), n | T (striped).
Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023; Brandon et al., "Striped
        Attention", 2023.

Outputs of the blocks merge by their log-sum-exp in at least fp32; backward needs only the merged
output and log-sum-exp, with which each block's gradients are exact by themselves (Dao,
"FlashAttention-2", 2023, section 3.1). In backward the own block is done in two halves of equal
work: one while the first keys come, one while the last gradients go home.

Shape suffixes: T positions here, B sequences, H query and K key/value heads, D head_dim.

What arrives or leaves in one stretch of the tensor of a block is received into it and sent from it
with no copy; the rest is packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from echelon.core.attention_mask import PositionRun, cut_position_runs
from echelon.core.event import ATTEND
from echelon.layout.ring_transfers import RingPlan, RowTransfer, ring_plan
from echelon.models.attention.interface import AttentionGradients, OnlineSoftmax, SavedAttention
from echelon.models.attention.local import attend_tiles, backward_tiles
from echelon.models.precision import at_least_fp32
from echelon.parallel.context.attention import RingContext
from echelon.parallel.transport.collectives import Group, Pending


class RingAttention(torch.autograd.Function):
    """Attention of the queries of this place over the keys of all places of the ring."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ring_context: RingContext,
    ) -> torch.Tensor:
        """Return [T,B,H,D] for q [T,B,H,D] and this place's k and v [T,B,K,D]."""
        ring = ring_context.ring
        plan = ring_plan(ring_context.placement, ring_context.mask, ring.index)
        # One tensor, rows first: any rows of both are one message.
        kv_T2BKD = torch.stack((k, v), dim=1)
        passed = _RingKeys(kv_T2BKD, plan, ring)
        merged = OnlineSoftmax(q.shape, q.dtype, q.device)
        for step in range(plan.degree):
            passed.start_keys(step + 1, name=f"ring.forward.{step + 1}")
            block = passed.block(plan.owner_at(step))
            if block is not None:
                keys, runs = block
                pieces = ring_context.tiles(plan.own.runs, runs)
                with record_ring_work(ring, f"ring.forward.{step}"):
                    attend_tiles(q, keys[:, 0], keys[:, 1], pieces, ring_context.rule, merged)
            passed.finish(step)
        if ring_context.rule.sinks is not None:
            merged.add_sinks(ring_context.rule.sinks.values_H)
        out, lse = merged.result()
        ctx.save_for_backward(q, kv_T2BKD, out, lse)
        ctx.ring_context, ctx.plan = ring_context, plan
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dq, dk, dv; those of keys are complete when they have been around the ring."""
        q, kv_T2BKD, out, lse = ctx.saved_tensors
        ring_context: RingContext = ctx.ring_context
        plan: RingPlan = ctx.plan
        ring = ring_context.ring
        if ring_context.rule.sinks is not None:
            ring_context.rule.sinks.backward(dout, out, lse)
        passed = _RingKeys(kv_T2BKD, plan, ring)
        gradients = _RingGradients(kv_T2BKD, plan, ring)
        dq = torch.zeros_like(q, dtype=at_least_fp32(q.dtype))

        def work(step: int, owner: int, rows: slice) -> None:
            block = passed.block(owner)
            if block is None:
                return
            keys, runs = block
            dkv = gradients.tensor(owner)
            mine = cut_position_runs(plan.own.runs, rows.start, rows.stop)
            with record_ring_work(ring, f"ring.backward.{step}"):
                attended = SavedAttention(
                    q[rows], keys[:, 0], keys[:, 1], out[rows], lse[..., rows]
                )
                into = AttentionGradients(dq[rows], dkv[:, 0], dkv[:, 1])
                pieces = ring_context.tiles(mine, runs)
                backward_tiles(dout[rows], attended, pieces, ring_context.rule, into)

        everything = slice(0, q.shape[0])
        early, late = slice(0, plan.halfway), slice(plan.halfway, q.shape[0])
        for step in range(plan.degree):
            passed.start_keys(step + 1, name=f"ring.backward.{step + 1}")
            gradients.start(step, name=f"ring.gradients.{step}")
            work(step, plan.owner_at(step), everything if step else early)
            passed.finish(step)
            gradients.finish(step)
        gradients.start(plan.degree, name=f"ring.gradients.{plan.degree}")
        ring_context.store.run_deferred()
        work(plan.degree, plan.ring_rank, late)
        gradients.finish(plan.degree)
        dkv = gradients.tensor(plan.ring_rank).to(q.dtype)
        return dq.to(q.dtype), dkv[:, 0], dkv[:, 1], None


class _RingKeys:
    """The keys and values that are at this place, step by step."""

    def __init__(self, own_T2BKD: torch.Tensor, plan: RingPlan, ring: Group) -> None:
        """Begin with those of this place."""
        self._plan, self._ring = plan, ring
        self._tensors = {plan.ring_rank: own_T2BKD}
        self._transfer: PendingTransfer | None = None

    def start_keys(self, step: int, *, name: str) -> None:
        """Start what brings the keys of `step`, and takes to others what they need by then."""
        plan = self._plan
        if step not in plan.key_steps:
            return
        own = self._tensors[plan.ring_rank]
        transfers = plan.keys.get(step, ())
        for transfer in transfers:
            if transfer.target == plan.ring_rank and transfer.owner not in self._tensors:
                shape = (plan.blocks[transfer.owner].count, *own.shape[1:])
                self._tensors[transfer.owner] = own.new_empty(shape)
        self._transfer = start_transfer(
            transfers, self._tensors, plan, self._ring, name=name, add=False
        )

    def block(self, owner: int) -> tuple[torch.Tensor, tuple[PositionRun, ...]] | None:
        """Return the keys of an owner that are here, and their positions, if any."""
        rows = self._plan.rows_from(owner)
        if rows is None or owner not in self._tensors:
            return None
        return self._tensors[owner], rows.runs

    def finish(self, step: int) -> None:
        """Return when what was on its way during `step` is there; drop what nobody needs more."""
        if self._transfer is not None:
            self._transfer.finish()
            self._transfer = None
        for owner in [o for o in self._tensors if o != self._plan.ring_rank]:
            if self._plan.last_use[owner] <= step:
                del self._tensors[owner]


class _RingGradients:
    """The gradients of keys and values that this place adds to, each until it goes on."""

    def __init__(self, own_T2BKD: torch.Tensor, plan: RingPlan, ring: Group) -> None:
        self._plan, self._ring = plan, ring
        self._like = own_T2BKD
        self._tensors: dict[int, torch.Tensor] = {}
        self._transfer: PendingTransfer | None = None

    def tensor(self, owner: int) -> torch.Tensor:
        """Return the sum so far for a block, in at least fp32."""
        if owner not in self._tensors:
            rows = self._plan.rows_from(owner)
            assert rows is not None
            shape = (rows.count, *self._like.shape[1:])
            wide = at_least_fp32(self._like.dtype)
            self._tensors[owner] = self._like.new_zeros(shape, dtype=wide)
        return self._tensors[owner]

    def start(self, step: int, *, name: str) -> None:
        """Start to hand on what was added up before `step`, and to get what comes by its end."""
        plan = self._plan
        if step not in plan.gradient_steps:
            return
        transfers = plan.gradients.get(step, ())
        tensors = {transfer.owner: self.tensor(transfer.owner) for transfer in transfers}
        self._transfer = start_transfer(transfers, tensors, plan, self._ring, name=name, add=True)

    def finish(self, step: int) -> None:
        """Return when what was on its way during `step` has been added; drop what has left."""
        if self._transfer is not None:
            self._transfer.finish()
            self._transfer = None
        for owner, last in self._plan.last_leaving.items():
            if last == step:
                del self._tensors[owner]


def record_ring_work(ring: Group, name: str) -> AbstractContextManager[None]:
    """Record what happens inside as the work of one step: what a transfer hides behind."""
    return ring.recorder.span(ATTEND, name)


@dataclass(slots=True)
class PendingTransfer:
    """Hold an exchange under way, and what to do with what arrives."""

    pending: Pending
    arrivals: list[tuple[torch.Tensor, list[torch.Tensor], bool]]

    def finish(self) -> None:
        """Return when all rows are in their places: put there, or added to what is there."""
        self.pending.wait()
        for buffer, targets, add in self.arrivals:
            parts = buffer.split([target.shape[0] for target in targets])
            for target, part in zip(targets, parts, strict=True):
                if add:
                    target.add_(part)
                else:
                    target.copy_(part)


def start_transfer(
    transfers: Sequence[RowTransfer],
    tensors: Mapping[int, torch.Tensor],
    plan: RingPlan,
    ring: Group,
    *,
    name: str,
    add: bool,
) -> PendingTransfer:
    """Start to send and receive the rows of `transfers`: from and into the tensors of their owners.

    With `add`, what arrives is added to what is there. A pair of places has one message each way.
    """
    outgoing: dict[int, list[torch.Tensor]] = {}
    incoming: dict[int, list[torch.Tensor]] = {}
    for transfer in transfers:
        rows = plan.rows_from(transfer.owner)
        assert rows is not None, "a hop names rows that this place holds"
        parts = [tensors[transfer.owner][place] for place in rows.slices_of(transfer.rows)]
        if transfer.source == plan.ring_rank:
            outgoing.setdefault(transfer.target, []).extend(parts)
        else:
            incoming.setdefault(transfer.source, []).extend(parts)
    sends = {
        to: (parts[0] if len(parts) == 1 else torch.cat(parts)) for to, parts in outgoing.items()
    }
    receives: dict[int, torch.Tensor] = {}
    arrivals: list[tuple[torch.Tensor, list[torch.Tensor], bool]] = []
    for source, parts in incoming.items():
        if len(parts) == 1 and not add:
            receives[source] = parts[0]
            continue
        rows_R = sum(part.shape[0] for part in parts)
        receives[source] = parts[0].new_empty((rows_R, *parts[0].shape[1:]))
        arrivals.append((receives[source], parts, add))
    return PendingTransfer(ring.exchange(sends, receives, name=name), arrivals)
