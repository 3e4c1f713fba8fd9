"""SwiGLU with a weight for each row, and its backward: a few rows at a time, while in cache.

Computed in at least float32, each result rounded once.

Shape suffixes: R rows, F inner width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as fn

from echelon.models.precision import at_least_fp32
from echelon.parallel.pieces import row_pieces

_SILU_BACKWARD: Any = torch.ops.aten.silu_backward.grad_input


def gated(gate_up: torch.Tensor, gates_R: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) x up x the row's weight, [R, F], for gate and up side by side."""
    y = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    wide = at_least_fp32(gate_up.dtype)
    for rows in row_pieces(gate_up):
        gate, up = gate_up[rows].to(wide).chunk(2, dim=-1)
        torch.mul(fn.silu(gate).mul_(up), gates_R[rows, None].to(wide), out=y[rows])
    return y


def gated_backward(
    dy: torch.Tensor, gate_up: torch.Tensor, gates_R: torch.Tensor, dgates_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output again and the gradient of gate and up; write that of the weights."""
    y, dgate_up = torch.empty_like(dy), torch.empty_like(gate_up)
    wide = at_least_fp32(gate_up.dtype)
    for rows in row_pieces(gate_up):
        gate, up = gate_up[rows].to(wide).chunk(2, dim=-1)
        dgate, dup = dgate_up[rows].chunk(2, dim=-1)
        weights, dy_wide = gates_R[rows, None].to(wide), dy[rows].to(wide)
        silu = fn.silu(gate)
        plain = silu * up
        dgates_R[rows] = torch.linalg.vecdot(dy_wide, plain)
        torch.mul(plain, weights, out=y[rows])
        inner = torch.mul(dy_wide, weights, out=plain)
        torch.mul(inner, silu, out=dup)
        _SILU_BACKWARD(inner.mul_(up), gate, grad_input=dgate)
    return y, dgate_up
