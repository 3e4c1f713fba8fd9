"""Bugs in the slices that ranks of a node keep of gathered parameters."""

from __future__ import annotations

import pytest

from echelon.core.plan import Plan
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.zero import SecondarySlices
from tests.parallel.secondary.nodes import node_layout
from tests.proof.layouts import Changes
from tests.proof.mutants.planting import Told, mutant

NODES: Changes = {"dp": 4, "each": 2}


@mutant(
    Told(
        "prove-activations",
        "embedding.weight",
        "stale",
        "dp_shard",
        step=1,
        plan=NODES,
        of=node_layout,
    )
)
def secondary_slice_stale_after_the_optimizer_step(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Go on with the slices of a step when its update has changed the parameters."""
    patch.setattr(SecondarySlices, "forget", lambda self: None)


@mutant(Told("prove-activations", "embedding", "slice", plan=NODES, of=node_layout))
def secondary_slice_of_the_other_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Keep the slice that belongs to the next rank of the node."""
    keep = SecondarySlices.keep

    def shifted(self: SecondarySlices, bucket: Bucket) -> None:
        known = self.has(bucket)
        keep(self, bucket)
        if not known and self.has(bucket):
            piece, group = self._slices[bucket.name], self._nodes[bucket.plan.expert]
            start = (group.index + 1) % group.size * piece.numel()
            piece.copy_(bucket.values.detach()[start : start + piece.numel()])

    patch.setattr(SecondarySlices, "keep", shifted)
