"""Bugs in products of 8-bit numbers: scales, formats, tiles, and how numbers are rounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.parallel import fp8_linear
from echelon.parallel.kernels import fp8
from echelon.parallel.kernels.fp8 import Fp8Matrix
from tests.proof.layouts import Changes
from tests.proof.mutants.planting import Told, mutant

FP8: Changes = {"precision": {"matmul": "fp8", "fp8_block": 8}}
TP: Changes = {**FP8, "tp": 2, "sequence_parallel": True}


@mutant(Told("prove-activations", "layers.0.attention", "none", plan=TP))
def scale_inverted(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Divide what codes stand for by the scale of its tile."""
    numbers = Fp8Matrix.numbers

    def divided(self: Fp8Matrix, dtype: torch.dtype) -> torch.Tensor:
        return numbers(replace(self, scales=1 / self.scales), dtype)

    patch.setattr(Fp8Matrix, "numbers", divided)


@mutant(Told("prove-activations", "layers.0.attention", "none", plan=FP8))
def five_bits_of_exponent_forward(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Round to e5m2, which has two bits after the first."""
    patch.setattr(fp8, "E4M3", torch.float8_e5m2)


@mutant(Told("prove-activations", "layers.1.mlp", "slice", "tp", plan=TP))
def scales_of_rank_rows(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take one scale for all numbers of a row that a rank holds: another one for each layout."""
    quantised = fp8_linear.quantised_rows

    def of_rows(x: torch.Tensor, block: int, *pieces: Any) -> Fp8Matrix:
        whole = quantised(x, x.shape[1], *pieces)
        scales = whole.scales.expand(-1, x.shape[1] // block).contiguous()
        return replace(whole, scales=scales, block=block)

    patch.setattr(fp8_linear, "quantised_rows", of_rows)


@mutant(Told("prove-gradients", "layers.1.mlp_norm", "none", plan=FP8))
def weight_scales_upside_down_in_backward(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Multiply the rows of a weight by the scales of others, in backward alone."""
    multiply = fp8_linear.multiply

    def mixed(x: Fp8Matrix, weight: Fp8Matrix, *rest: Any, **options: Any) -> torch.Tensor:
        if options.get("transposed"):
            weight = replace(weight, scales=weight.scales.flip(0))
        return multiply(x, weight, *rest, **options)

    patch.setattr(fp8_linear, "multiply", mixed)


@mutant(Told("prove-activations", "layers.0.attention", "none", plan=FP8))
def rounded_towards_zero(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Round to the number nearer to zero, not to the nearest."""
    rounded = fp8.rounded_to_e4m3

    def truncated(x: torch.Tensor) -> torch.Tensor:
        near = rounded(x)
        back = near.to(x.dtype)
        down = (back.abs() > x.abs()) & (back != 0)
        return (near.view(torch.uint8) - down.to(torch.uint8)).view(near.dtype)

    patch.setattr(fp8, "rounded_to_e4m3", truncated)
