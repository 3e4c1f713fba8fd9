"""Numbers of 8 bits with scales: how a matrix becomes such, and products of two of them.

A number is a code of e4m3 (4 significant bits, at most 448) times the scale of its tile. A tile is
`block` neighbours of one row of an activation or of a gradient, or a square of a weight. A scale is
a power of two, the least with which the largest number of its tile is in range; so what a code
stands for is exact in bf16. Products add up in float32: what they multiply has 4 significant bits,
so that each single product is exact, and only the order of sums is left open.

On a Hopper GPU the product is PyTorch's `_scaled_mm`, where the block is 128. Elsewhere, on a CPU
above all, it is that of the numbers that the codes stand for, as wide as is exact.

Source: DeepSeek-V3, 2024, section 3.3 (tiles of 1 x 128, squares of 128 x 128, e4m3 throughout);
Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (the format, rounding, saturation).
Shape suffixes: R rows, C columns, N tokens, I inputs, O outputs of a layer on this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from echelon.models.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.models.precision import at_least_fp32

E4M3 = torch.float8_e4m3fn
_LARGEST_MANTISSA = 0.875  # of 448, the largest e4m3 number
_LARGEST_EXPONENT = 9  # of the same: it is 0.875 x 2^9
_LEAST_POWER = -126  # of two that float32 has with all its digits, as it has the inverse
_MOST_POWER = 127  # of two in float32
_SCALED_MM: Any = getattr(torch, "_scaled_mm", None)
_KERNEL_BLOCK = 128  # numbers that share a scale
_HOPPER = (9, 0)  # compute capability


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Matrix:
    """Hold the codes of a matrix [R, C], and a scale for each tile of it, float32.

    `scales` is [R, C / block], or [R / block, C / block] where tiles are `square`.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: int
    square: bool = False

    def rows(self, part: slice) -> Fp8Matrix:
        """Return some rows of a matrix whose tiles lie in one row each."""
        return replace(self, codes=self.codes[part], scales=self.scales[part])

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what the codes stand for, exact in every dtype but fp16."""
        tiles = self.codes.to(dtype).unflatten(1, (-1, self.block))
        scales = self.scales.to(dtype)
        if not self.square:
            return tiles.mul_(scales[:, :, None]).flatten(1)
        tiles = tiles.unflatten(0, (-1, self.block))
        return tiles.mul_(scales[:, None, :, None]).flatten(0, 1).flatten(1)


def quantised_rows(
    x_RC: torch.Tensor, block: int, pieces: PieceSizes = TRAINING_PIECES
) -> Fp8Matrix:
    """Return a matrix in 8 bits, a scale for each `block` numbers of a row."""
    return _quantised(x_RC, block, 1, pieces)


def quantised_weight(
    weight_OI: torch.Tensor, block: int, pieces: PieceSizes = TRAINING_PIECES
) -> Fp8Matrix:
    """Return a weight in 8 bits, a scale for each square of `block` rows and columns."""
    return _quantised(weight_OI, block, block, pieces)


def multiply(
    x_NI: Fp8Matrix,
    weight_OI: Fp8Matrix,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight^T in `dtype`, or x @ weight where it is `transposed`; in `out` if given."""
    if _has_kernel(x_NI):
        made = _scaled_product(x_NI, weight_OI, dtype, transposed=transposed)
        return made if out is None else out.copy_(made)
    on_cpu = x_NI.codes.device.type == "cpu"
    wide = at_least_fp32(dtype) if on_cpu else torch.bfloat16
    weight = weight_OI.numbers(wide)
    made = x_NI.numbers(wide) @ (weight if transposed else weight.t())
    return made.to(dtype) if out is None else out.copy_(made)


def power_of_two_scales(largest: torch.Tensor) -> torch.Tensor:
    """Return the scale of tiles whose largest numbers are these, float32.

    A tile that has a number which is not finite gets one that is no number: nothing is hidden.
    """
    mantissa, exponent = torch.frexp(largest)
    power = exponent - _LARGEST_EXPONENT + (mantissa > _LARGEST_MANTISSA).to(exponent.dtype)
    power = power.clamp(_LEAST_POWER, _MOST_POWER)
    # Bits of float32: a power of two by `pow` is not exact on every device.
    scale = ((power + 127).to(torch.int32) << 23).view(torch.float32)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    return torch.where(torch.isfinite(largest), scale, torch.full_like(scale, torch.nan))


def rounded_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return codes of numbers in range: the nearest each, of two the even one."""
    return (_odd_float32(x) if x.dtype == torch.float64 else x).to(E4M3)


def _quantised(x_RC: torch.Tensor, block: int, height: int, pieces: PieceSizes) -> Fp8Matrix:
    num_rows, num_columns = x_RC.shape
    codes = torch.empty((num_rows, num_columns), dtype=E4M3, device=x_RC.device)
    scales = torch.empty(
        (num_rows // height, num_columns // block), dtype=torch.float32, device=x_RC.device
    )
    limit = pieces.row_elements if x_RC.device.type == "cpu" else pieces.gpu_row_elements
    step = max(1, limit // max(1, num_columns * height))
    for start in range(0, num_rows // height, step):
        end = min(start + step, num_rows // height)
        part = slice(start * height, end * height)
        tiles = x_RC[part].unflatten(1, (-1, block)).unflatten(0, (-1, height))
        largest = torch.linalg.vector_norm(tiles, math.inf, dim=(1, 3))
        scale = power_of_two_scales(largest.to(at_least_fp32(x_RC.dtype)))
        scales[start:end] = scale
        # The inverse of a power of two is exact, and so is the product.
        fitted = (tiles * scale.reciprocal()[:, None, :, None]).flatten(0, 1).flatten(1)
        codes[part] = rounded_to_e4m3(fitted)
    return Fp8Matrix(codes=codes, scales=scales, block=block, square=height > 1)


def _odd_float32(x: torch.Tensor) -> torch.Tensor:
    """Return float64 in float32, towards zero, with the last bit set where that is not exact.

    What is rounded once more from there is what would be rounded at once (Boldo and Melquiond,
    "Emulation of FMA and Correctly Rounded Sums", 2008): a tie does not come of rounding.
    """
    near = x.float()
    back = near.double()
    bits = near.view(torch.int32) - (back.abs() > x.abs()).to(torch.int32)
    return (bits | ((back != x) & ~torch.isnan(x)).to(torch.int32)).view(torch.float32)


def _has_kernel(x: Fp8Matrix) -> bool:
    """Return whether PyTorch multiplies such tiles in one launch: on a Hopper GPU."""
    if x.block != _KERNEL_BLOCK or not x.codes.shape[0]:
        return False
    if x.codes.is_meta:  # is rehearsed
        return True
    return x.codes.is_cuda and torch.cuda.get_device_capability(x.codes.device) == _HOPPER


def _scaled_product(
    x_NI: Fp8Matrix, weight_OI: Fp8Matrix, dtype: torch.dtype, *, transposed: bool
) -> torch.Tensor:
    """Return the product by PyTorch's kernel, which wants both with the sum's dim contiguous.

    Scales of rows lie column by column.
    """
    codes, scales = weight_OI.codes, weight_OI.scales
    if transposed:
        codes, scales = codes.t().contiguous(), scales.t().contiguous()
    x_scales = x_NI.scales.t().contiguous().t()
    made = torch.bfloat16 if dtype != torch.float32 else dtype
    return _SCALED_MM(
        x_NI.codes, codes.t(), x_scales, scales.t(), out_dtype=made, use_fast_accum=False
    ).to(dtype)
