"""Bugs in codes that ranks make of their slices, and in the scales that all of them share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.parallel import fp8_gather
from echelon.parallel.fp8_gather import SliceCodes
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Group, Pending
from tests.proof.layouts import Changes
from tests.proof.mutants.planting import Told, mutant

CODES: Changes = {
    "dp": 3,
    "zero": {"stage": 3, "gather": "fp8"},
    "precision": {"matmul": "fp8", "fp8_block": 8},
}
FAST: Changes = {**CODES, "optimizer": {"learning_rate": 0.05, "warmup_steps": 0}}
"""So fast that scales change in an update."""


@mutant(Told("prove-activations", "layers.0.attention", "none", plan=CODES))
def scale_of_the_neighbouring_square(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Cast each number with the scale of the square beside its own."""
    write = SliceCodes._write_codes

    def beside(self: SliceCodes, bucket: Bucket, scales: torch.Tensor) -> None:
        write(self, bucket, scales.roll(1))

    patch.setattr(SliceCodes, "_write_codes", beside)


@mutant(Told("prove-activations", "layers.0.attention", "slice", step=1, plan=FAST))
def scales_of_before_the_update(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Multiply new codes by the scales of the step before.

    A scale twice too large that codes were made with, too, would change next to nothing: a power of
    two leaves the digits of a code as they are.
    """
    write = SliceCodes._write_codes
    known: dict[str, torch.Tensor] = {}

    def old(self: SliceCodes, bucket: Bucket, scales: torch.Tensor) -> None:
        write(self, bucket, scales)
        assert bucket.fp8 is not None
        bucket.fp8.scales.copy_(known.get(bucket.name, scales))
        known[bucket.name] = scales.clone()

    patch.setattr(SliceCodes, "_write_codes", old)


@mutant(Told("prove-activations", "layers.0.attention", "none", plan=CODES))
def slice_cast_with_its_first_scale(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Cast all numbers of a slice with the scale of the square in which it begins."""
    write = SliceCodes._write_codes

    def first(self: SliceCodes, bucket: Bucket, scales: torch.Tensor) -> None:
        box = next(fp8_gather._whole_boxes(bucket), None)
        one = scales if box is None else box.squares(scales)[0, 0].expand_as(scales).contiguous()
        write(self, bucket, one)
        assert bucket.fp8 is not None
        bucket.fp8.scales.copy_(scales)

    patch.setattr(SliceCodes, "_write_codes", first)


@mutant(Told("prove-activations", "layers.0.attention", "none", plan=CODES))
def largest_numbers_of_one_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let each rank make scales of the numbers that it holds itself."""
    reduce = Group.all_reduce

    def alone(self: Group, tensor: torch.Tensor, **how: Any) -> Pending:
        return Pending() if how.get("op") == "max" else reduce(self, tensor, **how)

    patch.setattr(Group, "all_reduce", alone)
