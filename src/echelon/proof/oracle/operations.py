# SPDX-License-Identifier: Apache-2.0
"""What one device does otherwise than plainly: attention as kernels round, tokens as ranks sent.

Autograd through the plain operations keeps the gradient of the scores in float32 at the least, and
subtracts from it the sum over its own products. A kernel that keeps no scores takes that sum from
the rounded output, and rounds the gradient of the scores before it is multiplied with keys and
queries (Dao et al., "FlashAttention", 2022, algorithm 4). One device rounds alike: its error is
the measure of the plan's.

In a precision of few digits two experts of a token may score next to the same: which of them it
goes to is then a matter of rounding, and all that follows is not. So the oracle of such a precision
takes over the choices of the ranks, and that of float64 takes over ties. That they are right ones
is judged by itself (`proof/claims/choice_errors.py`), and all else as ever.
Why: docs/decisions/023-one-device-takes-over-the-choices-of-ranks.md.

Shape suffixes: see `models/operations.py`; S positions of keys, B sequences of the global batch, T
positions, N = T * B, D hidden, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from echelon.core.model_shape import ModelShape
from echelon.models.attention.reference import visible
from echelon.models.batch import TokenBatch
from echelon.models.moe import (
    MixtureOfExperts,
    RoutingNotes,
    gates_of,
    mix_experts,
    route_reference,
)
from echelon.models.operations import Operations
from echelon.models.precision import widened


class _RoundedAttention(torch.autograd.Function):
    """softmax(scale q k^T) v where visible; operands are rounded, sums are wide."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rule: tuple[torch.Tensor, ModelShape],
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output, [B, H, T, head_dim], for as many key as query heads.

        `rule` is what is seen, and the shape that says how products become scores.
        """
        seen, shape = rule
        soft_cap = shape.soft_cap
        scores = widened(q) @ widened(k).mT * shape.score_scale
        slope_BHTS = torch.ones((), dtype=scores.dtype)
        if soft_cap is not None:
            tanh = torch.tanh(scores / soft_cap)
            scores, slope_BHTS = soft_cap * tanh, 1 - tanh.square()
        scores = scores.masked_fill(~seen, float("-inf"))
        shares_BHT = scores.new_zeros(scores.shape[:-1])
        if sinks_H is not None:
            sinks_BHT1 = widened(sinks_H)[:, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sinks_BHT1.to(scores.dtype)), dim=-1).softmax(dim=-1)
            weights_BHTS, shares_BHT = weights[..., :-1], weights[..., -1]
        else:
            weights_BHTS = scores.softmax(dim=-1)
        out = (_rounded(weights_BHTS, q) @ widened(v)).to(q.dtype)
        ctx.save_for_backward(q, k, v, weights_BHTS, slope_BHTS, out, shares_BHT)
        ctx.scale, ctx.sinks_dtype = shape.score_scale, None if sinks_H is None else sinks_H.dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k and v, and of sinks."""
        q, k, v, weights_BHTS, slope_BHTS, out, shares_BHT = ctx.saved_tensors
        dout = widened(dout)
        dv = _rounded(weights_BHTS, q).mT @ dout
        pull = (dout * out).sum(-1, keepdim=True)
        dscores = weights_BHTS * (dout @ widened(v).mT - pull) * slope_BHTS
        dscores = _rounded(dscores, q) * ctx.scale
        dq, dk = dscores @ widened(k), dscores.mT @ widened(q)
        dsinks_H = None
        if ctx.sinks_dtype is not None:
            dsinks_H = -(shares_BHT * pull.squeeze(-1)).sum((0, 2)).to(ctx.sinks_dtype)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, dsinks_H


def _rounded(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return widened(x.to(like.dtype))


ForcedRouting = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""To which experts each layer sends each token, and which had room: chosen_BTK, kept_BTK.

Layers that are left out go by the rule."""


@dataclass(slots=True, kw_only=True)
class ForcedRoutingNotes(RoutingNotes):
    """Say, beside the rule, where tokens are to go; `unforced` keeps where the rule sends them."""

    forced: ForcedRouting
    unforced: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


class OracleOperations(Operations):
    """The plain operations, but for attention that rounds and tokens that are told where to go."""

    def __init__(self, *, rounds: bool) -> None:
        """Round attention where kernels do, if `rounds`."""
        self.rounds = rounds

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
        """Return attention of q [T,B,H,hd] over k, v [T,B,K,hd], as [N, H * hd]."""
        if not self.rounds:
            return super().attend(q, k, v, shape, batch, sinks_H=sinks_H)
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        positions_T = batch.positions_T
        seen = visible(positions_T, positions_T, shape.mask, batch.documents)
        seen = seen if seen.dim() == 2 else seen[:, None]
        operands = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = _RoundedAttention.apply(*operands, (seen, shape), sinks_H)
        return out.permute(2, 0, 1, 3).reshape(q.shape[0] * q.shape[1], -1)

    def mixture(
        self, x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Return the weighted sum of what the told experts (or its own) make of each token."""
        notes = self.routing
        if not isinstance(notes, ForcedRoutingNotes) or mixture.layer not in notes.forced:
            return super().mixture(x_ND, mixture, batch)
        by_rule = route_reference(x_ND, mixture, batch, notes)
        notes.unforced[mixture.layer] = by_rule.chosen_NK
        chosen_NK, kept_NK = (
            one_BTK.transpose(0, 1).flatten(0, 1) for one_BTK in notes.forced[mixture.layer]
        )
        gates_NK = gates_of(by_rule.scores_NE, chosen_NK, mixture.routing)
        routed = replace(by_rule, chosen_NK=chosen_NK, gates_NK=gates_NK, kept_NK=kept_NK)
        notes.routed[mixture.layer] = routed
        return mix_experts(x_ND, mixture, routed)
