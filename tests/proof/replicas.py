"""PlanEvidence without ranks: what one device computed, as if whole replicas had said it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from echelon.core.plan import Plan
from echelon.proof.claims.checks import dp_rank_of
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.evidence import float64_tolerance
from echelon.proof.evidence.run import INITIAL
from echelon.proof.observed import ObservedRun
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import OracleStep, run_oracle
from echelon.proof.ranks import ObservedActivation, ObservedShard, RankResult
from echelon.proof.subject import StepRecord

ChangeShard = Callable[[ObservedShard], torch.Tensor]
"""From a piece to what the rank says of it instead."""

ChangeActivation = Callable[[ObservedActivation], ObservedActivation]
"""From what passed a boundary on a rank to what it says of it instead."""

ChangeReport = Callable[[int, int, StepRecord], StepRecord]
"""From a rank, a step and its report to what the rank reports instead."""


def replicas(
    plan: Plan,
    num_steps: int = 1,
    *,
    shard: ChangeShard = lambda piece: piece.tensor,
    report: ChangeReport = lambda rank, step, record: record,
    activation: ChangeActivation = lambda one: one,
) -> PlanEvidence:
    """Return the evidence of a run in float64 whose ranks all hold everything; rank 0 answers.

    Each tells the activations of its own rows.
    """
    oracle = run_oracle(plan, num_steps)
    results: list[RankResult] = []
    for rank in range(plan.mesh.world_size):
        pieces = _pieces(rank, "parameters", INITIAL, oracle[0].before, shard)
        for one in oracle:
            pieces += _pieces(rank, "gradients", one.step, one.gradients, shard)
            pieces += _pieces(rank, "parameters", one.step, one.after, shard)
        reports = [report(rank, one.step, _report(plan, rank, one)) for one in oracle]
        results.append(
            RankResult(
                rank=rank,
                reports=tuple(reports),
                shards=tuple(pieces),
                activations=tuple(
                    activation(seen) for one in oracle for seen in _activations(plan, rank, one)
                ),
            )
        )
    return PlanEvidence(
        plan=plan,
        reference_plan=plan,
        steps=oracle,
        run=ObservedRun(plan, results),
        tolerance=float64_tolerance(),
    )


def _activations(plan: Plan, rank: int, oracle: OracleStep) -> Iterator[ObservedActivation]:
    length = plan.mathematics.sequence_length
    samples = torch.tensor(global_batch(plan, oracle.step).sample_ids)
    share = len(samples) // plan.mesh.dp
    replica = dp_rank_of(plan, rank)
    own = slice(replica * share, (replica + 1) * share)
    tokens_BT = samples[own, None] * length + torch.arange(length)
    for gradient, of in ((False, oracle.activations), (True, oracle.activation_gradients)):
        for name, value_BTW in of.items():
            yield ObservedActivation(
                rank=rank,
                step=oracle.step,
                name=name,
                gradient=gradient,
                recomputed=False,
                tokens_n=tokens_BT.reshape(-1),
                values_nW=value_BTW[own].flatten(0, 1),
            )


def _pieces(
    rank: int, kind: str, step: int, held: Mapping[str, torch.Tensor], shard: ChangeShard
) -> list[ObservedShard]:
    found = [
        ObservedShard(
            rank=rank,
            kind=kind,
            step=step,
            name=name,
            global_shape=tuple(tensor.shape),
            offset=(0,) * tensor.dim(),
            primary=rank == 0,
            tensor=tensor,
        )
        for name, tensor in held.items()
    ]
    return [replace(piece, tensor=shard(piece)) for piece in found]


def _report(plan: Plan, rank: int, oracle: OracleStep) -> StepRecord:
    replica = dp_rank_of(plan, rank)
    samples = global_batch(plan, oracle.step).sample_ids
    share = len(samples) // plan.mesh.dp
    return StepRecord(
        loss=oracle.loss,
        tokens=oracle.tokens,
        grad_norm=oracle.grad_norm,
        microbatch_losses={
            slot: said for slot, said in oracle.microbatch_losses.items() if slot[0] == replica
        },
        samples=samples[replica * share : (replica + 1) * share],
        layers=tuple(range(plan.model.layers)),
        skipped=oracle.skipped,
        loss_scale=oracle.loss_scale,
    )
