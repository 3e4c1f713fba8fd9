# SPDX-License-Identifier: Apache-2.0
"""Ulysses: exchange heads for positions around a local attention.

Split: outside, positions; inside, heads: a rank has all positions of its group and 1/u of the
       heads of each.
Sent:  one all-to-all of q, k and v together, and one of the output; backward the same of their
       gradients, the other way.
Bytes: `context_bytes` in `cost/bytes/context_sent.py`: (u-1)/u of (H + 2 K') hd s and of H hd s a
       token, forward and backward, K' being the key/value heads with their copies.
Must divide: u | heads of a tensor rank.
Source: Jacobs et al., "DeepSpeed-Ulysses", 2023, section 3.

Where there are too few key/value heads to share out, each is sent to all that need it
(`kv_copies`); its gradient is the sum of what they give back.
Shape suffixes: T positions here, U ranks of the group, B sequences, P heads that one rank gets.
"""

from __future__ import annotations

from typing import Any

import torch

from echelon.cost.bytes.context_sent import kv_copies
from echelon.models.precision import at_least_fp32
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.transport.collectives import Group


class PositionsToHeads(torch.autograd.Function):
    """Give away heads, get positions: [T,B,H,hd] -> [U T,B,H/U,hd]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: Group,
        store: GradientStore,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of all positions and of the heads of this rank."""
        copies = kv_copies(q.shape[2], k.shape[2], group.size)
        ctx.group, ctx.store, ctx.copies = group, store, copies
        ctx.heads = (q.shape[2] // group.size, k.shape[2] * copies // group.size)
        if copies > 1:
            k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
        parts = [x.unflatten(2, (group.size, -1)) for x in (q, k, v)]
        packed_UTBP = torch.cat(parts, dim=3).permute(2, 0, 1, 3, 4).contiguous()
        whole = _exchanged(packed_UTBP, group, "ulysses.forward.qkv")
        own_q, own_k = ctx.heads
        q, k, v = whole.flatten(0, 1).split((own_q, own_k, own_k), dim=2)
        return q, k, v

    @staticmethod
    def backward(
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of this rank's positions; copies of a head are added up."""
        whole = torch.cat((dq, dk, dv), dim=2).unflatten(0, (ctx.group.size, -1))
        packed_UTBP = _exchanged(whole, ctx.group, "ulysses.backward.qkv", ctx.store)
        own_q, own_k = ctx.heads
        parts = packed_UTBP.permute(1, 2, 0, 3, 4).split((own_q, own_k, own_k), dim=3)
        dq, dk, dv = (part.flatten(2, 3) for part in parts)
        if ctx.copies > 1:
            wide = at_least_fp32(dk.dtype)
            dk, dv = (
                x.unflatten(2, (-1, ctx.copies)).sum(3, dtype=wide).to(x.dtype) for x in (dk, dv)
            )
        return dq, dk, dv, None, None


class HeadsToPositions(torch.autograd.Function):
    """Give away positions, get heads: [U T,B,H/U,hd] -> [T,B,H,hd]."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, group: Group, store: GradientStore) -> torch.Tensor:
        """Return the output of all heads at the positions of this rank."""
        ctx.group, ctx.store = group, store
        packed_UTBP = out.contiguous().unflatten(0, (group.size, -1))
        mine = _exchanged(packed_UTBP, group, "ulysses.forward.out")
        return mine.permute(1, 2, 0, 3, 4).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the output of this rank's heads."""
        group: Group = ctx.group
        packed_UTBP = dout.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        whole = _exchanged(packed_UTBP, group, "ulysses.backward.out", ctx.store)
        return whole.flatten(0, 1), None, None


def _exchanged(
    parts: torch.Tensor, group: Group, name: str, store: GradientStore | None = None
) -> torch.Tensor:
    """Return the parts of all members for this one; meanwhile run what `store` has put off."""
    received = torch.empty_like(parts)
    pending = group.all_to_all(received, parts, name=name, async_op=True)
    if store is not None:
        store.run_deferred()
    pending.wait()
    return received
