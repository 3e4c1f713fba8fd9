# SPDX-License-Identifier: Apache-2.0
"""Numbers of 8 bits with scales: how a matrix becomes such, and products of two of them.

A number is a code of e4m3 (4 significant bits, at most 448) times the scale of its tile. A tile is
`block` neighbours of one row of an activation or of a gradient, or a square of a weight, or the
whole matrix. Gradients may be codes of e5m2 (3 significant bits, at most 57344). A scale is a power
of two, the least with which the largest number of its tile is in range; so what a code stands for
is exact in bf16. The scale of a whole matrix is given: what is then out of range becomes the
largest number, and what is not finite no number. Products add up in float32: what they multiply has
4 significant bits, so that each single product is exact, and only the order of sums is left open.

On a Hopper GPU the product is PyTorch's `_scaled_mm`, where the block is 128 and both are e4m3;
of whole matrices on Ada and all later GPUs, that of a weight gradient too. Elsewhere, on a CPU
above all, it is that of the numbers that the codes stand for, as wide as is exact.

Source: DeepSeek-V3, 2024, section 3.3 (tiles of 1 x 128, squares of 128 x 128, e4m3 throughout);
Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (the format, rounding, saturation).
Shape suffixes: R rows, C columns, N tokens, I inputs, O outputs of a layer on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.models.precision import E4M3, E5M2, at_least_fp32

LARGEST = {E4M3: 448.0, E5M2: 57344.0}  # number of a format
_LARGEST_MANTISSA = 0.875  # of the largest number of either format
_LARGEST_EXPONENT = {E4M3: 9, E5M2: 16}  # of the same: 448 is 0.875 x 2^9
_LEAST_POWER = -126  # of two that float32 has with all its digits, as it has the inverse
_MOST_POWER = 127  # of two in float32
_SCALED_MM: Any = getattr(torch, "_scaled_mm", None)
_functional: Any = functional  # its stubs hide products with scales
_SCALE_STEP = 4  # rows, and scales along the sum of a product of blocks, come in whole such
_SCALE_BYTES_STEP = 16  # of the address of a scale
_KERNEL_BLOCK = 128  # numbers that share a scale
_HOPPER = (9, 0)  # compute capability
_ADA = (8, 9)  # compute capability, the first that multiplies 8-bit numbers
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of steps; it adds up in float32
_KERNEL_STEP = 16  # numbers of which the sum and the output of a product are whole multiples


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Matrix:
    """Hold the codes of a matrix [R, C], and a scale for each tile of it, float32.

    `scales` is [R, C / block], or [R / block, C / block] where tiles are `square`, or the one scale
    of the whole matrix, without a dim, where `block` is 0.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: int
    square: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether the whole matrix has one scale."""
        return not self.block

    def rows(self, part: slice) -> Fp8Matrix:
        """Return some rows of a matrix whose tiles lie in one row each."""
        scales = self.scales if self.is_whole else self.scales[part]
        return replace(self, codes=self.codes[part], scales=scales)

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what the codes stand for, exact in every dtype but fp16."""
        if self.is_whole:
            return self.codes.to(dtype).mul_(self.scales.to(dtype))
        tiles = self.codes.to(dtype).unflatten(1, (-1, self.block))
        scales = self.scales.to(dtype)
        if not self.square:
            return tiles.mul_(scales[:, :, None]).flatten(1)
        tiles = tiles.unflatten(0, (-1, self.block))
        return tiles.mul_(scales[:, None, :, None]).flatten(0, 1).flatten(1)


def quantised_rows(
    x_RC: torch.Tensor,
    block: int,
    pieces: PieceSizes = TRAINING_PIECES,
    kind: torch.dtype = E4M3,
) -> Fp8Matrix:
    """Return a matrix in 8 bits, a scale for each `block` numbers of a row."""
    return _quantised(x_RC, (1, block), pieces, kind)


def quantised_weight(
    weight_OI: torch.Tensor, block: int, pieces: PieceSizes = TRAINING_PIECES
) -> Fp8Matrix:
    """Return a weight in 8 bits, a scale for each square of `block` rows and columns."""
    return _quantised(weight_OI, (block, block), pieces, E4M3)


def quantised_whole(
    x_RC: torch.Tensor,
    scale: torch.Tensor,
    pieces: PieceSizes = TRAINING_PIECES,
    kind: torch.dtype = E4M3,
) -> Fp8Matrix:
    """Return a matrix in 8 bits by a scale that is given, float32 without a dim.

    A number beyond the largest of the format becomes that; one that is not finite, no number.
    """
    codes = torch.empty(x_RC.shape, dtype=kind, device=x_RC.device)
    inverse, most = scale.reciprocal().to(x_RC.dtype), LARGEST[kind]
    for part in _row_parts(x_RC, 1, pieces):
        # What is infinite is not to be told from what is large once it is clamped.
        fitted = x_RC[part].nan_to_num(math.nan, math.nan, math.nan)
        codes[part] = rounded_to_fp8(fitted.mul_(inverse).clamp_(-most, most), kind)
    return Fp8Matrix(codes=codes, scales=scale, block=0)


def multiply(
    x_NI: Fp8Matrix,
    weight_OI: Fp8Matrix,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight^T in `dtype`, or x @ weight where it is `transposed`; in `out` if given."""
    if _has_kernel(x_NI, weight_OI, dtype):
        made = _scaled_product(x_NI, weight_OI, dtype, transposed=transposed)
        return made if out is None else out.copy_(made)
    # What the codes stand for is exact in bf16; the sum must not have fewer digits than `dtype`.
    narrow = dtype == torch.bfloat16 and x_NI.codes.device.type != "cpu"
    wide = dtype if narrow else at_least_fp32(dtype)
    weight = weight_OI.numbers(wide)
    made = x_NI.numbers(wide) @ (weight if transposed else weight.t())
    return made.to(dtype) if out is None else out.copy_(made)


def weight_gradient(dy_NO: Fp8Matrix, x_NI: Fp8Matrix, dtype: torch.dtype) -> torch.Tensor | None:
    """Return dy^T x in float32 by PyTorch's kernel; None where there is none for such tiles.

    The sum goes over tokens, of which zeros make a multiple of 16. In a step that computes in
    float64 there is none either: `dtype` is that of the step.
    """
    if dtype not in _KERNEL_DTYPES:
        return None
    widths = dy_NO.codes.shape[1], x_NI.codes.shape[1]
    if not dy_NO.is_whole or any(width % _KERNEL_STEP for width in widths):
        return None
    if not dy_NO.codes.shape[0] or not _device_multiplies(dy_NO.codes):
        return None
    return _product_of_wholes(
        _tokens_last(dy_NO.codes),
        _tokens_last(x_NI.codes).t(),
        dy_NO.scales,
        x_NI.scales,
        torch.float32,
    )


def power_of_two_scales(largest: torch.Tensor, kind: torch.dtype = E4M3) -> torch.Tensor:
    """Return the scale of tiles whose largest numbers are these, float32.

    A tile that has a number which is not finite gets one that is no number: nothing is hidden.
    """
    mantissa, exponent = torch.frexp(largest)
    power = exponent - _LARGEST_EXPONENT[kind] + (mantissa > _LARGEST_MANTISSA).to(exponent.dtype)
    power = power.clamp(_LEAST_POWER, _MOST_POWER)
    # Bits of float32: a power of two by `pow` is not exact on every device.
    scale = ((power + 127).to(torch.int32) << 23).view(torch.float32)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    return torch.where(torch.isfinite(largest), scale, torch.full_like(scale, torch.nan))


def rounded_to_fp8(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return codes of numbers in range: the nearest each, of two the even one.

    Float64 goes through float32. A product of 8-bit numbers is often in the very middle of two of
    them, but for the order of its sums, which layouts choose: it leaves no trace in float32.
    """
    return (x.float() if x.dtype == torch.float64 else x).to(kind)


def _quantised(
    x_RC: torch.Tensor, tile: tuple[int, int], pieces: PieceSizes, kind: torch.dtype
) -> Fp8Matrix:
    num_rows, num_columns = x_RC.shape
    height, block = tile
    codes = torch.empty((num_rows, num_columns), dtype=kind, device=x_RC.device)
    scales = torch.empty(
        (num_rows // height, num_columns // block), dtype=torch.float32, device=x_RC.device
    )
    for part in _row_parts(x_RC, height, pieces):
        tiles = x_RC[part].unflatten(1, (-1, block)).unflatten(0, (-1, height))
        largest = torch.linalg.vector_norm(tiles, math.inf, dim=(1, 3))
        scale = power_of_two_scales(largest.to(at_least_fp32(x_RC.dtype)), kind)
        scales[part.start // height : part.stop // height] = scale
        # The inverse of a power of two is exact in the dtype of x, and so is the product: what
        # becomes too small for that dtype is 0 in 8 bits.
        inverse = scale.reciprocal().to(x_RC.dtype)
        fitted = (tiles * inverse[:, None, :, None]).flatten(0, 1).flatten(1)
        codes[part] = rounded_to_fp8(fitted, kind)
    return Fp8Matrix(codes=codes, scales=scales, block=block, square=height > 1)


def _row_parts(x_RC: torch.Tensor, height: int, pieces: PieceSizes) -> Iterator[slice]:
    """Yield the rows that are cast at a time, multiples of `height`."""
    num_rows, num_columns = x_RC.shape
    limit = pieces.row_elements if x_RC.device.type == "cpu" else pieces.gpu_row_elements
    step = max(1, limit // max(1, num_columns * height)) * height
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _has_kernel(x: Fp8Matrix, weight: Fp8Matrix, dtype: torch.dtype) -> bool:
    """Return whether PyTorch multiplies such tiles in one launch, on this device."""
    if not x.codes.shape[0] or dtype not in _KERNEL_DTYPES:
        return False
    if x.is_whole:
        whole = all(width % _KERNEL_STEP == 0 for width in weight.codes.shape)
        return whole and _device_multiplies(x.codes)
    if x.block != _KERNEL_BLOCK or x.codes.dtype != E4M3:
        return False
    if x.codes.is_meta:  # is rehearsed
        return True
    return _is_nvidia(x.codes) and torch.cuda.get_device_capability(x.codes.device) == _HOPPER


def _device_multiplies(codes: torch.Tensor) -> bool:
    """Return whether a device multiplies matrices of one scale; one that is rehearsed does."""
    if codes.is_meta:
        return True
    return _is_nvidia(codes) and torch.cuda.get_device_capability(codes.device) >= _ADA


def _is_nvidia(codes: torch.Tensor) -> bool:
    """Return whether a GPU has these formats: AMD's MI300 has others, under the same names."""
    return codes.is_cuda and torch.version.hip is None


def _scaled_product(
    x_NI: Fp8Matrix, weight_OI: Fp8Matrix, dtype: torch.dtype, *, transposed: bool
) -> torch.Tensor:
    """Return the product by PyTorch's kernel, which wants both with the sum's dim contiguous."""
    codes, scales = weight_OI.codes, weight_OI.scales
    if transposed:
        codes = codes.t().contiguous()
    made = dtype if dtype == torch.bfloat16 else torch.float32
    if not x_NI.is_whole:
        scales = scales.t().contiguous() if transposed else scales
        return _product_of_blocks(x_NI, codes.t(), scales, made).to(dtype)
    return _product_of_wholes(x_NI.codes, codes.t(), x_NI.scales, scales, made).to(dtype)


def _product_of_wholes(
    left: torch.Tensor,
    right: torch.Tensor,
    left_scale: torch.Tensor,
    right_scale: torch.Tensor,
    made: torch.dtype,
) -> torch.Tensor:
    """Return the product of codes with one scale each, which cuBLAS wants at whole 16 bytes."""
    scales = [
        one.clone() if one.is_cuda and one.data_ptr() % _SCALE_BYTES_STEP else one
        for one in (left_scale, right_scale)
    ]
    return _SCALED_MM(left, right, *scales, out_dtype=made, use_fast_accum=False)


def _product_of_blocks(
    x_NK: Fp8Matrix, codes_KO: torch.Tensor, scales_OK: torch.Tensor, made: torch.dtype
) -> torch.Tensor:
    """Return x @ codes by cuBLAS, whose scales of rows lie column by column, in whole fours.

    Those of squares lie along the sum, a multiple of four apart: where they end before it, the
    first of PyTorch's calls reads wrong ones, and the second takes them with what is between.
    """
    num_rows = x_NK.codes.shape[0]
    missing = 0 if x_NK.codes.is_meta else -num_rows % _SCALE_STEP
    codes, scales = x_NK.codes, x_NK.scales
    if missing:
        codes = functional.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(codes.dtype)
        scales = functional.pad(scales, (0, 0, 0, missing), value=1.0)
    scales = scales.t().contiguous().t()
    apart = -scales_OK.shape[1] % _SCALE_STEP
    if not apart or codes.is_meta:
        found = _SCALED_MM(
            codes, codes_KO, scales, scales_OK.t(), out_dtype=made, use_fast_accum=False
        )
    else:
        found = _functional.scaled_mm(
            codes,
            codes_KO,
            scales,
            _functional.ScalingType.BlockWise1x128,
            functional.pad(scales_OK, (0, apart)).t(),
            _functional.ScalingType.BlockWise128x128,
            output_dtype=made,
        )
    return found[:num_rows]


def _tokens_last(codes_NC: torch.Tensor) -> torch.Tensor:
    """Return codes with tokens side by side, [C, N], zeros after them up to a multiple of 16."""
    num_tokens, width = codes_NC.shape
    padded = -(-num_tokens // _KERNEL_STEP) * _KERNEL_STEP
    # Of zeros the code is 0 in both formats.
    turned = torch.zeros((width, padded), dtype=torch.uint8, device=codes_NC.device)
    turned[:, :num_tokens] = codes_NC.view(torch.uint8).t()
    return turned.view(codes_NC.dtype)
