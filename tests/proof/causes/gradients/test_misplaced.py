"""Gradients of other microbatches, and slices of other ranks, are recognised."""

from __future__ import annotations

from dataclasses import replace

import torch

from echelon.proof.causes.factors import known_factors
from echelon.proof.causes.gradients.gradients import explain_gradient, slices_of_others
from echelon.proof.causes.gradients.microbatch_weights import WrongGradientOfPlan
from echelon.proof.claims.checks import Check
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.observed import ObservedRun
from echelon.proof.oracle.oracle import build_decoder, run_oracle, whole_loss
from echelon.proof.ranks import ObservedShard, RankResult
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.replicas import replicas

NAME = "layers.0.mlp.down.weight"


def test_gradients_that_changed_places_between_two_stages_are_told() -> None:
    plan = shrink(layout(pp=2, accumulation=3), precision="fp64")
    size, (oracle,) = plan.layout.microbatch_sequences, run_oracle(plan, 1)
    model = build_decoder(plan, oracle.before)

    def exchanged(dh_ND: torch.Tensor) -> torch.Tensor:
        by_microbatch = dh_ND.unflatten(0, (-1, plan.num_microbatches, size)).unbind(1)
        return torch.stack([by_microbatch[one] for one in (2, 1, 0)], 1).flatten(0, 2)

    last = model.layers[str(plan.layout.pipeline.stages[0][-1])]
    last.register_forward_hook(lambda *run: run[-1].register_hook(exchanged) and None)
    whole_loss(plan, model, oracle).backward()
    wrong = model.get_parameter(NAME).grad
    assert wrong is not None

    def shard(piece: ObservedShard) -> torch.Tensor:
        return wrong if (piece.kind, piece.name) == ("gradients", NAME) else piece.tensor

    finding = explain_gradient(replicas(plan, shard=shard), Check(0, NAME, 1.0))
    assert (finding.factor, finding.axis) == ("order", "pp")
    assert finding.description.endswith("microbatch 0 got that of 2, and 2 that of 0")


def halves(*, exchanged: bool) -> WrongGradientOfPlan:
    """Return a gradient of which two ranks hold a half, each its own or that of the other."""
    plan = shrink(layout(dp=2, zero={"stage": 1}), precision="fp64")
    evidence: PlanEvidence = replicas(plan)
    oracle = evidence.steps[0]
    rows = len(oracle.gradients[NAME]) // 2
    cut = oracle.gradients[NAME].split(rows)
    shards = [
        ObservedShard(
            rank=rank,
            kind="gradients",
            step=0,
            name=NAME,
            global_shape=tuple(oracle.gradients[NAME].shape),
            offset=(rank * rows, 0),
            primary=True,
            tensor=cut[1 - rank if exchanged else rank],
        )
        for rank in range(2)
    ]
    results = [RankResult(rank=one.rank, reports=(), shards=(one,)) for one in shards]
    return WrongGradientOfPlan(
        evidence=replace(evidence, run=ObservedRun(plan, results)),
        step=oracle,
        name=NAME,
        wrong=shards,
        known=known_factors(plan, oracle),
    )


def test_a_slice_that_another_rank_should_hold_is_permuted() -> None:
    (finding,) = slices_of_others(halves(exchanged=True))
    assert (finding.factor, finding.axis) == ("slices permuted", "dp_shard")
    assert finding.description.startswith("dp_shard 0 holds the slice of dp_shard 1")
    assert list(slices_of_others(halves(exchanged=False))) == []
