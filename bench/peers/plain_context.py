"""Attention over context ranks as it is written by hand: all-to-all around SDPA, and a plain ring.

Written from the papers (Jacobs et al., "DeepSpeed-Ulysses", 2023; Liu et al., "Ring Attention",
2023), in the manner of the codes that people copy: one all-to-all each of q, k, v and the output;
a ring over contiguous chunks, where a causal mask leaves blocks out of the computation but not out
of the transfer, keys, values and gradients travel as tensors of their own, and each merge makes
new tensors. The next block is under way while this one computes, unless the ring is `blocking`.

Shapes: q [B, H, T, D], k and v [B, K, T, D], T being the positions of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid, scaled_dot_product_attention, sigmoid

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Received = tuple[list[torch.Tensor], list[dist.Work]]


def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention by torch's fused kernel."""
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exchange heads for positions, attend, exchange back; k and v get all heads if too few."""
    if k.shape[1] % dist.get_world_size():
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, k, v = (_Exchanged.apply(x, 1, 2) for x in (q, k, v))
    return _Exchanged.apply(local(q, k, v), 2, 1)


def ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, blocking: bool = False
) -> torch.Tensor:
    """Attend while keys and values go around; rank r holds the r-th contiguous chunk."""
    return _Ring.apply(q, k, v, blocking)


class _Exchanged(torch.autograd.Function):
    """Split dim `scatter` over the ranks, concatenate dim `gather`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
        ctx.dims = scatter, gather
        return _exchange(x, scatter, gather)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scatter, gather = ctx.dims
        return _exchange(gradient, gather, scatter), None, None


def _exchange(x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
    parts = torch.stack([part.contiguous() for part in x.chunk(dist.get_world_size(), scatter)])
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return torch.cat(list(received.unbind(0)), dim=gather)


class _Ring(torch.autograd.Function):
    """Blocks come from the rank before, so at step i a rank has those of the rank i before it."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocking: bool
    ) -> torch.Tensor:
        rank, world = dist.get_rank(), dist.get_world_size()
        ctx.blocking = blocking
        block = [k, v]
        out: torch.Tensor | None = None
        lse: torch.Tensor | None = None
        for step in range(world):
            coming = _pass_on(block, blocking) if step + 1 < world else None
            if step <= rank:
                part, part_lse = _forward(q, *block, 0.0, step == 0)
                out, lse = _merge(out, lse, part.float(), part_lse.unsqueeze(-1))
            if coming is not None:
                block = _arrived(coming)
        assert out is not None
        assert lse is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse.squeeze(-1))
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, world = dist.get_rank(), dist.get_world_size()
        block, sums = [k, v], [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
        dq = torch.zeros_like(q, dtype=torch.float32)
        sums_coming: Received | None = None
        for step in range(world):
            coming = _pass_on(block, ctx.blocking) if step + 1 < world else None
            parts: list[torch.Tensor] = []
            if step <= rank:
                found = _backward(dout, q, *block, out, lse, 0.0, step == 0)
                dq = dq + found[0]
                parts = list(found[1:])
            if sums_coming is not None:
                sums = _arrived(sums_coming)
            if parts:
                sums = [total + part for total, part in zip(sums, parts, strict=True)]
            if coming is not None:
                block = _arrived(coming)
            sums_coming = _pass_on(sums, ctx.blocking)
        assert sums_coming is not None
        dk, dv = _arrived(sums_coming)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _pass_on(tensors: list[torch.Tensor], blocking: bool) -> Received:
    """Start to send tensors to the next rank and to receive as many from the one before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [tensor.contiguous() for tensor in tensors]
    received = [torch.empty_like(tensor) for tensor in tensors]
    operations: list[dist.P2POp] = []
    for tensor, buffer in zip(tensors, received, strict=True):
        operations.append(dist.P2POp(dist.isend, tensor, (rank + 1) % world))
        operations.append(dist.P2POp(dist.irecv, buffer, (rank - 1) % world))
    works = dist.batch_isend_irecv(operations)
    if blocking:
        return _arrived((received, works)), []
    return received, works


def _arrived(coming: Received) -> list[torch.Tensor]:
    tensors, works = coming
    for work in works:
        work.wait()
    return tensors


def _merge(
    out: torch.Tensor | None, lse: torch.Tensor | None, part: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over the keys so far and those of `part`, by their log-sum-exp."""
    if out is None or lse is None:
        return part, part_lse
    out = out - sigmoid(part_lse - lse) * (out - part)
    return out, lse - logsigmoid(lse - part_lse)
