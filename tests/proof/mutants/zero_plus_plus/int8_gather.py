"""Bugs in the blocks of int8 that ranks make of their slices."""

from __future__ import annotations

import pytest
import torch

from echelon.core.plan import Plan
from echelon.parallel.storage import buckets as int8_gather
from echelon.parallel.storage.buckets import Int8Message
from tests.proof.layouts import Changes
from tests.proof.mutants.planting import Told, mutant

ROUNDED: Changes = {
    "dp": 3,
    "zero": {"stage": 3, "gather": "int8"},
    "precision": {"int8_block": 8},
}


@mutant(Told("prove-activations", "embedding", "none", plan=ROUNDED))
def quantisation_scale_of_the_wrong_block(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Round each block with the scale of the block before it."""
    codes = int8_gather.block_codes

    def beside(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return codes(blocks, scales.roll(1))

    patch.setattr(int8_gather, "block_codes", beside)


@mutant(Told("prove-activations", "embedding", "none", plan=ROUNDED))
def codes_cut_off_in_place_of_rounded(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Cut off what is between two codes, in place of taking the nearest."""

    def cut(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (blocks / scales[:, None]).trunc().clamp(-127, 127).to(torch.int8)

    patch.setattr(int8_gather, "block_codes", cut)


@mutant(Told("prove-activations", "embedding", "slices permuted", "dp_shard", plan=ROUNDED))
def messages_of_two_ranks_swapped(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the pieces of ranks in another order than that of their slices."""
    write = Int8Message.write_values

    def swapped(self: Int8Message, values: torch.Tensor, num_pieces: int) -> None:
        pieces = self.whole.view(num_pieces, -1)
        pieces.copy_(pieces.roll(1, 0).clone())
        write(self, values, num_pieces)

    patch.setattr(Int8Message, "write_values", swapped)
