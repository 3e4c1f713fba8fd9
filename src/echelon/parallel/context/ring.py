"""Ring attention: keys and values travel around the ring while attention meets what is there.

Split: positions, zigzag or striped (`core.placement`), so that every place has the same work.
Sent:  forward: the rows of keys and values that others need, the next block while this one is at
       work; backward: the same again, and the gradients of each block one step behind, added up
       from place to place and home.
Bytes: `cost.context.context_bytes`.
Must divide: 2 n | T (zigzag), n | T (striped).
Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023; Brandon et al., "Striped
        Attention", 2023.

Outputs of the blocks merge by their log-sum-exp in at least fp32; backward needs only the merged
output and log-sum-exp, with which each block's gradients are exact by themselves (Dao,
"FlashAttention-2", 2023, section 3.1). In backward the own block is done in two halves of equal
work: one while the first keys come, one while the last gradients go home.

Shape suffixes: T positions here, B sequences, H query and K key/value heads, D head_dim.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from echelon.core.attention_mask import Run, cut_runs
from echelon.core.event import ATTEND
from echelon.models.attention.interface import Attended, Gradients
from echelon.models.attention.local import attend_pieces, backward_pieces
from echelon.models.attention.merge import Merged
from echelon.models.precision import at_least_fp32
from echelon.parallel.collectives import Group
from echelon.parallel.context.blocks import Course, Transfer, course_of, start_transfer
from echelon.parallel.context.sight import Reach


class RingAttention(torch.autograd.Function):
    """Attention of the queries of this place over the keys of all places of the ring."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        reach: Reach,
    ) -> torch.Tensor:
        """Return [T,B,H,D] for q [T,B,H,D] and this place's k and v [T,B,K,D]."""
        ring, sight = reach.ring, reach.sight
        course = course_of(reach.placement, sight.mask, ring.index)
        # One tensor, rows first: any rows of both are one message.
        kv_T2BKD = torch.stack((k, v), dim=1)
        passed = _Passed(kv_T2BKD, course, ring)
        merged = Merged.like(q)
        for step in range(course.degree):
            passed.start_keys(step + 1, name=f"ring.forward.{step + 1}")
            block = passed.block(course.owner_at(step))
            if block is not None:
                keys, runs = block
                pieces = sight.pieces(course.own.runs, runs)
                with working(ring, f"ring.forward.{step}"):
                    attend_pieces(q, keys[:, 0], keys[:, 1], pieces, sight.soft_cap, merged)
            passed.finish(step)
        out, lse = merged.result()
        ctx.save_for_backward(q, kv_T2BKD, out, lse)
        ctx.reach, ctx.course = reach, course
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dq, dk, dv; those of keys are complete when they have been around the ring."""
        q, kv_T2BKD, out, lse = ctx.saved_tensors
        reach: Reach = ctx.reach
        course: Course = ctx.course
        ring, sight = reach.ring, reach.sight
        passed = _Passed(kv_T2BKD, course, ring)
        gradients = _Gradients(kv_T2BKD, course, ring)
        dq = torch.zeros_like(q, dtype=at_least_fp32(q.dtype))

        def work(step: int, owner: int, rows: slice) -> None:
            block = passed.block(owner)
            if block is None:
                return
            keys, runs = block
            dkv = gradients.tensor(owner)
            mine = cut_runs(course.own.runs, rows.start, rows.stop)
            with working(ring, f"ring.backward.{step}"):
                attended = Attended(q[rows], keys[:, 0], keys[:, 1], out[rows], lse[..., rows])
                into = Gradients(dq[rows], dkv[:, 0], dkv[:, 1])
                pieces = sight.pieces(mine, runs)
                backward_pieces(dout[rows], attended, pieces, sight.soft_cap, into)

        everything = slice(0, q.shape[0])
        early, late = slice(0, course.halfway), slice(course.halfway, q.shape[0])
        for step in range(course.degree):
            passed.start_keys(step + 1, name=f"ring.backward.{step + 1}")
            gradients.start(step, name=f"ring.gradients.{step}")
            work(step, course.owner_at(step), everything if step else early)
            passed.finish(step)
            gradients.finish(step)
        gradients.start(course.degree, name=f"ring.gradients.{course.degree}")
        reach.store.run_deferred()
        work(course.degree, course.place, late)
        gradients.finish(course.degree)
        dkv = gradients.tensor(course.place).to(q.dtype)
        return dq.to(q.dtype), dkv[:, 0], dkv[:, 1], None


class _Passed:
    """The keys and values that are at this place, step by step."""

    def __init__(self, own_T2BKD: torch.Tensor, course: Course, ring: Group) -> None:
        """Begin with those of this place."""
        self._course, self._ring = course, ring
        self._tensors = {course.place: own_T2BKD}
        self._transfer: Transfer | None = None

    def start_keys(self, step: int, *, name: str) -> None:
        """Start what brings the keys of `step`, and takes to others what they need by then."""
        course = self._course
        if step not in course.key_steps:
            return
        own = self._tensors[course.place]
        hops = course.keys.get(step, ())
        for hop in hops:
            if hop.target == course.place and hop.owner not in self._tensors:
                shape = (course.blocks[hop.owner].count, *own.shape[1:])
                self._tensors[hop.owner] = own.new_empty(shape)
        self._transfer = start_transfer(
            hops, self._tensors, course, self._ring, name=name, add=False
        )

    def block(self, owner: int) -> tuple[torch.Tensor, tuple[Run, ...]] | None:
        """Return the keys of an owner that are here, and their positions, if any."""
        rows = self._course.rows_of(owner)
        if rows is None or owner not in self._tensors:
            return None
        return self._tensors[owner], rows.runs

    def finish(self, step: int) -> None:
        """Return when what was on its way during `step` is there; drop what nobody needs more."""
        if self._transfer is not None:
            self._transfer.finish()
            self._transfer = None
        for owner in [o for o in self._tensors if o != self._course.place]:
            if self._course.last_use[owner] <= step:
                del self._tensors[owner]


class _Gradients:
    """The gradients of keys and values that this place adds to, each until it goes on."""

    def __init__(self, own_T2BKD: torch.Tensor, course: Course, ring: Group) -> None:
        """Begin with none."""
        self._course, self._ring = course, ring
        self._like = own_T2BKD
        self._tensors: dict[int, torch.Tensor] = {}
        self._transfer: Transfer | None = None

    def tensor(self, owner: int) -> torch.Tensor:
        """Return the sum so far for a block, in at least fp32."""
        if owner not in self._tensors:
            rows = self._course.rows_of(owner)
            assert rows is not None
            shape = (rows.count, *self._like.shape[1:])
            wide = at_least_fp32(self._like.dtype)
            self._tensors[owner] = self._like.new_zeros(shape, dtype=wide)
        return self._tensors[owner]

    def start(self, step: int, *, name: str) -> None:
        """Start to hand on what was added up before `step`, and to get what comes by its end."""
        course = self._course
        if step not in course.gradient_steps:
            return
        hops = course.gradients.get(step, ())
        tensors = {hop.owner: self.tensor(hop.owner) for hop in hops}
        self._transfer = start_transfer(hops, tensors, course, self._ring, name=name, add=True)

    def finish(self, step: int) -> None:
        """Return when what was on its way during `step` has been added; drop what has left."""
        if self._transfer is not None:
            self._transfer.finish()
            self._transfer = None
        for owner, last in self._course.last_leaving.items():
            if last == step:
                del self._tensors[owner]


def working(ring: Group, name: str) -> AbstractContextManager[None]:
    """Record what happens inside as the work of one step: what a transfer hides behind."""
    return ring.recorder.span(ATTEND, name)
