# SPDX-License-Identifier: Apache-2.0
"""What lies between the matrices of an expert: SwiGLU, or the clamped one, weighted row by row.

The clamped SwiGLU (gpt-oss, 2025) of a gate g and of u, the other columns, with a limit l:
g' = min(g, l), u' = u within [-l, l], y = (u' + 1) g' sigmoid(alpha g'). As `weighted_swiglu`, it
is computed in at least float32 a few rows at a time, keeps its input alone, and rounds once. Its
slopes are dy/du' = g' s and dy/dg' = (u' + 1) s (1 + alpha g' (1 - s)) for s = sigmoid(alpha g'),
and 0 in g and u beyond the limit.

Shape suffixes: R rows, F inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.core.choices.kernels import KernelProvider
from echelon.core.model_shape import Experts
from echelon.core.piece_sizes import PieceSizes
from echelon.models.precision import at_least_fp32
from echelon.parallel.kernels.fused import weighted_swiglu, weighted_swiglu_backward
from echelon.parallel.kernels.low_precision import row_chunks
from echelon.parallel.tensor import TensorSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerActivation:
    """Compute the activation of experts; rows are cut into `pieces`."""

    experts: Experts
    pieces: PieceSizes
    provider: KernelProvider

    @classmethod
    def of(cls, experts: Experts, split: TensorSplit) -> InnerActivation:
        """Return what a rank computes with."""
        return cls(experts=experts, pieces=split.pieces, provider=split.kernels.of("swiglu"))

    def forward(self, gate_up: torch.Tensor, gates_R: torch.Tensor) -> torch.Tensor:
        """Return the activation times the weight of each row, [R, F], for gate and up side by side.

        Of rows without a weight, as dispatchers pad with, it is 0.
        """
        limit = self.experts.limit
        if limit is None:
            return weighted_swiglu(gate_up, gates_R, self.pieces, provider=self.provider)
        y = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        wide = at_least_fp32(gate_up.dtype)
        for rows in row_chunks(gate_up, self.pieces):
            gate, up = gate_up[rows].to(wide).chunk(2, dim=-1)
            cut = gate.clamp(max=limit)
            made = torch.mul(cut, self.experts.alpha).sigmoid_().mul_(cut)
            made.mul_(torch.clamp(up, -limit, limit, out=cut).add_(1))
            torch.mul(made, gates_R[rows, None].to(wide), out=y[rows])
        return y

    def backward(
        self,
        dy: torch.Tensor,
        gate_up: torch.Tensor,
        gates_R: torch.Tensor,
        dgates_R: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output again and the gradient of gate and up; write that of the weights."""
        limit, alpha = self.experts.limit, self.experts.alpha
        if limit is None:
            return weighted_swiglu_backward(
                dy, gate_up, gates_R, dgates_R, self.pieces, provider=self.provider
            )
        y, dgate_up = torch.empty_like(dy), torch.empty_like(gate_up)
        wide = at_least_fp32(gate_up.dtype)
        for rows in row_chunks(gate_up, self.pieces):
            gate, up = gate_up[rows].to(wide).chunk(2, dim=-1)
            dgate, dup = dgate_up[rows].chunk(2, dim=-1)
            weights, dy_wide = gates_R[rows, None].to(wide), dy[rows].to(wide)
            cut = gate.clamp(max=limit)
            sigmoid = torch.mul(cut, alpha).sigmoid_()
            glu = cut * sigmoid
            more = up.clamp(-limit, limit).add_(1)
            plain = glu * more
            dgates_R[rows] = torch.linalg.vecdot(dy_wide, plain)
            torch.mul(plain, weights, out=y[rows])
            inner = torch.mul(dy_wide, weights, out=plain)
            glu.mul_(inner).masked_fill_(up > limit, 0).masked_fill_(up < -limit, 0)
            dup.copy_(glu)
            inner.mul_(more)
            # d glu / d gate = s + alpha gate s (1 - s) = s (1 + alpha gate (1 - s)).
            torch.neg(sigmoid, out=more).add_(1)
            more.mul_(cut.mul_(alpha)).add_(1).mul_(sigmoid)
            dgate.copy_(inner.mul_(more).masked_fill_(gate > limit, 0))
        return y, dgate_up
