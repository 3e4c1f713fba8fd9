"""First weights that are others are told by where the right ones are."""

from __future__ import annotations

import torch

from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.first_weights import explain_first_weights
from echelon.proof.claims.checks import Check
from echelon.proof.evidence.run import INITIAL
from echelon.proof.ranks import ObservedShard
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.replicas import replicas
from tests.proof.verify.captures import BEFORE, Values, evidence_of

NAME = "layers.0.mlp.down.weight"
PLAN = shrink(layout(dp=2), precision="fp64")


def told(values: Values) -> ProofFinding:
    """Return what is said of a program's first weights."""
    return explain_first_weights(evidence_of(values), Check(INITIAL, "w", 1.0))


def told_of_plan(change: torch.Tensor | float) -> ProofFinding:
    """Return what is said of a plan whose second rank has other first weights."""

    def shard(piece: ObservedShard) -> torch.Tensor:
        this = (piece.rank, piece.step, piece.name) == (1, INITIAL, NAME)
        return piece.tensor * change if this else piece.tensor

    return explain_first_weights(replicas(PLAN, shard=shard), Check(INITIAL, NAME, 1.0))


def test_first_weights_of_a_program_that_differ_are_told() -> None:
    found = told({(1, "initial"): {"w": BEFORE["w"].flip(0)}})
    assert (found.factor, found.axis, found.ranks) == ("permuted", "dp", (1,))
    drawn = told({(1, "initial"): {"w": torch.ones(4)}})
    assert drawn.description.endswith("set OnRank.copy_initial")


def test_first_weights_of_a_plan_are_told_alike() -> None:
    double = told_of_plan(2.0)
    assert (double.factor, double.ranks) == ("dp", (1,))
    noise = torch.rand(replicas(PLAN).run.specs[NAME].shape, dtype=torch.float64)
    assert told_of_plan(noise).description == (
        "only on dp [1]: other random numbers than one device has"
    )
