# SPDX-License-Identifier: Apache-2.0
"""What a context rank sends for the attention of a module of one's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from echelon.core.attention_mask import AttentionMask
from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.context.sent import block_bytes


class CallSizes(Protocol):
    """What a call of attention is: heads, their width, and its mask."""

    @property
    def heads(self) -> int:
        """Return the query heads."""
        ...

    @property
    def kv_heads(self) -> int:
        """Return the key/value heads."""
        ...

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        ...

    @property
    def mask(self) -> AttentionMask:
        """Return which keys a query meets."""
        ...


def module_context_bytes(plan: Plan, calls: Iterable[CallSizes], *, rank: int) -> int:
    """Return the bytes that `rank` sends over `cp` in a step of one backward per microbatch."""
    cp_rank = plan.mesh.coordinates(rank)[Axis.CP]
    return plan.num_microbatches * sum(
        sum(block_bytes(_with_attention(plan, one), cp_rank)) for one in calls
    )


def _with_attention(plan: Plan, call: CallSizes) -> Plan:
    """Return the plan of a model whose blocks have this attention."""
    model = replace(
        plan.model,
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_dim=call.head_dim,
        causal=call.mask.causal,
        window=call.mask.window,
    )
    return replace(plan, mathematics=replace(plan.mathematics, model=model))
