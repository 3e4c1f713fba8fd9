"""SwiGLU with a weight for each row, and its backward: a few rows at a time, while in cache.

Computed in at least float32, each result rounded once.

Shape suffixes: R rows, F inner width.
"""

from __future__ import annotations

import torch
from torch.nn import functional as fn

from echelon.models.precision import at_least_fp32
from echelon.parallel.pieces import row_pieces


def gated(gate_up: torch.Tensor, gates_R: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) x up x the row's weight, [R, F], for gate and up side by side."""
    y = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    wide = at_least_fp32(gate_up.dtype)
    for rows in row_pieces(gate_up):
        gate, up = gate_up[rows].to(wide).chunk(2, dim=-1)
        product = fn.silu(gate).mul_(up)
        torch.mul(product, gates_R[rows, None].to(wide), out=product)
        y[rows] = product
    return y


def gated_backward(
    dy: torch.Tensor, gate_up: torch.Tensor, gates_R: torch.Tensor, dgates_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output again and the gradient of gate and up; write that of the weights."""
    y, dgate_up = torch.empty_like(dy), torch.empty_like(gate_up)
    wide = at_least_fp32(gate_up.dtype)
    one = torch.ones((), dtype=wide, device=dy.device)
    for rows in row_pieces(gate_up):
        gate, up = gate_up[rows].to(wide).chunk(2, dim=-1)
        weights, dy_wide = gates_R[rows, None].to(wide), dy[rows].to(wide)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        plain = silu * up
        dgates_R[rows] = torch.linalg.vecdot(dy_wide, plain)
        y[rows] = plain.mul_(weights)
        inner = dy_wide * weights
        dgate, dup = dgate_up[rows].chunk(2, dim=-1)
        dup.copy_(inner * silu)
        # d silu / d gate = sigmoid + silu (1 - sigmoid) = silu + sigmoid (1 - silu)
        slope = torch.lerp(silu, one, sigmoid)
        dgate.copy_(slope.mul_(up).mul_(inner))
    return y, dgate_up
