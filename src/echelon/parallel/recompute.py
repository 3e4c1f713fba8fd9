"""Recompute: keep only the input of a block, and run its forward again in backward.

Split: nothing; it trades compute for memory.
Sent:  the forward collectives of each recomputed block a second time.
Bytes: `tensor_bytes` in `cost/bytes/sent.py` counts the forward of a recomputed block twice.
Must divide: nothing.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.

The policy says which blocks: none, all ("full"), or every k-th. Dropout masks are functions of the
token, so the second forward drops what the first did and no generator state is kept. The inputs
that are kept wait for backward on the device, or on the host (`offload/activations.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from echelon.core.plan import Recompute
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Block, run_block
from echelon.parallel.completion.completion import Completion
from echelon.parallel.offload.activations import HostActivations


class _RecomputedBlock(torch.autograd.Function):
    """Run a block without keeping what its backward needs; make it again when asked."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        block: Block,
        batch: TokenBatch,
        host: HostActivations | None,
    ) -> torch.Tensor:
        """Return the block's output; keep its input only."""
        if host is None:
            ctx.save_for_backward(x_ND)
        else:
            ctx.stored = host.store(x_ND, forward_pass=batch)
        ctx.block, ctx.batch, ctx.on_host = block, batch, host is not None
        return block(x_ND, batch)

    @staticmethod
    def backward(ctx: Any, dy_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run the block forward again, then its backward."""
        x_ND = ctx.stored.take() if ctx.on_host else ctx.saved_tensors[0].detach()
        x_ND.requires_grad_()
        with torch.enable_grad():
            y_ND = ctx.block(x_ND, ctx.batch)
        torch.autograd.backward(y_ND, dy_ND)
        return x_ND.grad, None, None, None


class RecomputingRunner:
    """Run the blocks of a decoder under a policy; `host` is where inputs wait off the device."""

    def __init__(self, policy: Recompute, completion: Completion | None = None) -> None:
        """Store nothing yet; `completion` says when copies complete."""
        self.policy = policy
        streams = (completion or Completion()).copy_streams
        self.host = HostActivations(streams) if policy.offload == "host" else None

    def __call__(self, block: Block, x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return the output of a block, keeping what the policy says."""
        if self.policy.recomputes(block.index) and torch.is_grad_enabled():
            return _RecomputedBlock.apply(x_ND, block, batch, self.host)
        return run_block(block, x_ND, batch)
