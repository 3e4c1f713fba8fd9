"""Bugs in sums of gradients that are rounded and take two hops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.quantised_sums import BlockCodes, QuantisedSums, SecondHop
from tests.parallel.secondary.nodes import on_nodes
from tests.proof.layouts import layout
from tests.proof.mutants.planting import Told, mutant


def summed_in_hops(kind: str) -> Plan:
    """Return a plan of two nodes of two ranks, whose gradients are summed in codes."""
    return on_nodes(layout(dp=4, zero={"stage": 2, "reduce": kind}), 2)


INT8, INT4 = {"kind": "int8"}, {"kind": "int4"}
SUMS = "prove-quantised-sums"


@mutant(Told(SUMS, "head.weight", "none", plan=INT8, of=summed_in_hops))
def sum_scale_of_the_wrong_block(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give each block of a slice the scale of the block before it."""
    scales = BlockCodes._scales
    patch.setattr(BlockCodes, "_scales", lambda self, blocks: scales(self, blocks).roll(1, 1))


@mutant(Told(SUMS, "head.weight", "none", plan=INT8, of=summed_in_hops))
def second_hop_skipped_for_the_last_chunk(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave what comes from the last node out of a sum."""
    exchange = Group.all_to_all

    def skipped(
        self: Group, received: torch.Tensor, sent: torch.Tensor, *, name: str, **how: Any
    ) -> Pending:
        pending = exchange(self, received, sent, name=name, **how)
        if self.axis == "dp_shard_across":
            pending.wait()
            received[-1] = 0
        return pending

    patch.setattr(Group, "all_to_all", skipped)


@mutant(Told(SUMS, "head.weight", "none", plan=INT4, of=summed_in_hops))
def codes_of_four_bits_swapped(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Read the two codes of a byte in the wrong order."""
    decode = BlockCodes.decode

    def swapped(self: BlockCodes, message: torch.Tensor, count: int) -> torch.Tensor:
        found = decode(self, message, count)
        even = count // 2 * 2
        pairs = found[:, :even].reshape(len(found), -1, 2)
        return torch.cat((pairs.flip(2).flatten(1), found[:, even:]), dim=1)

    patch.setattr(BlockCodes, "decode", swapped)


@mutant(Told(SUMS, "head.weight", "none", plan=INT8, of=summed_in_hops))
def sums_of_four_bits_in_place_of_eight(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Round to 15 numbers where 255 are promised."""
    encode = BlockCodes.encode

    def coarse(self: BlockCodes, values: torch.Tensor) -> torch.Tensor:
        four = replace(self, kind="int4")
        return encode(self, four.decode(encode(four, values), values.shape[1]))

    patch.setattr(BlockCodes, "encode", coarse)


@mutant(
    Told(
        "prove-awaited",
        "all_to_all gradients.bucket0",
        "used before it was awaited",
        "dp_shard_across",
        plan=INT8,
        late=True,
        of=summed_in_hops,
    )
)
def codes_of_other_nodes_not_awaited(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Add up what comes from other nodes before it is there."""
    finish = QuantisedSums.finish

    def at_once(self: QuantisedSums, hop: SecondHop, *args: Any, **more: Any) -> None:
        finish(self, replace(hop, pending=Pending()), *args, **more)

    patch.setattr(QuantisedSums, "finish", at_once)
