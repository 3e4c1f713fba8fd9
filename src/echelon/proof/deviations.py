# SPDX-License-Identifier: Apache-2.0
"""How far each strategy is from one process: loss, gradients, parameters, in two precisions.

Each strategy is a plan of the same run, proven as `echelon prove` proves it; what is told is the
largest error of the claims about these tensors: the norm of a difference over that of the tensor.

Floating-point sums depend on their order: this is why a split run differs from one process in the
last bits, and by how much is a matter of the precision. In which order a plan adds up what one
process adds up at once is told, too; sums over ranks have the order of
`docs/decisions/009-order-of-reduction.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.proof.verdict import Proof, ProofPass

TENSORS: Mapping[str, tuple[str, ...]] = {
    "loss": (rules.PROVE_LOSS.id, rules.PROVE_MICROBATCH_LOSS.id),
    "gradient": (rules.PROVE_GRADIENTS.id,),
    "parameter": (rules.PROVE_PARAMETERS.id,),
}
"""What is told, and the rules of the claims that it is read from."""


class Prover(Protocol):
    """Prove a plan on ranks that are there."""

    def __call__(self, plan: Plan, /) -> Proof:
        """Return the proof."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Say how far one tensor is off at most, and how much is allowed."""

    error: float
    """The norm of the difference over the norm of the tensor, at its largest."""
    allowed: float
    """What rounding may make of it."""
    worst: str
    """The tensor that is off by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyDeviation:
    """Say how one strategy compares with one process; `refused` says why it was not run."""

    strategy: str
    """Its name."""
    about: str
    """What it splits."""
    mesh: str = ""
    """Its degrees, as users read them."""
    order: tuple[str, ...] = ()
    """Which sums it cuts into parts, and their order."""
    holds: bool = False
    """Whether every claim of the proof holds."""
    deviations: Mapping[str, Mapping[str, Deviation]] | None = None
    """By precision, then by what is told."""
    refused: tuple[str, ...] = ()
    """Ids of the rules that refuse it for this run."""
    why: str = ""
    """What these rules say."""


def deviation_of(strategy: str, about: str, plan: Plan, prove: Prover) -> StrategyDeviation:
    """Return how far a plan is from one process."""
    proof = prove(plan)
    return StrategyDeviation(
        strategy=strategy,
        about=about,
        mesh=proof.mesh,
        order=reduction_order(plan),
        holds=proof.proven,
        deviations={one.precision: dict(_deviations(one)) for one in proof.passes},
    )


def _deviations(one: ProofPass) -> Iterator[tuple[str, Deviation]]:
    for name, ids in TENSORS.items():
        claims = [claim for claim in one.claims if claim.rule.id in ids]
        if claims:
            worst = max(claims, key=lambda claim: claim.max_error)
            allowed = max(claim.allowed for claim in claims)
            yield name, Deviation(error=worst.max_error, allowed=allowed, worst=worst.worst)


def all_hold(found: Sequence[StrategyDeviation]) -> bool:
    """Return whether whatever was run holds, and something was."""
    ran = [one for one in found if not one.refused]
    return bool(ran) and all(one.holds for one in ran)


def reduction_order(plan: Plan) -> tuple[str, ...]:
    """Return the sums that a plan cuts into parts, each with the order of its parts."""
    return (*_inside_blocks(plan), *_gradients(plan)) or ("nothing: as in one process",)


def _inside_blocks(plan: Plan) -> Iterator[str]:
    mesh, layout = plan.mesh, plan.layout
    if mesh.tp > 1:
        how = "reduce-scatter" if layout.sequence_parallel else "all-reduce"
        yield f"outputs of row-parallel layers: parts of {mesh.tp} tensor ranks ({how})"
    if mesh.cp > 1:
        kind = CONTEXT_KINDS[layout.context.kind]
        degree = mesh.cp // kind.exchange_degree(mesh.cp, layout.context.ulysses_degree)
        if degree > 1 and not kind.gathers_keys:
            yield f"attention: {degree} blocks of keys, its own first, joined by their log-sum-exp"
        elif degree > 1:
            yield f"gradients of keys and values: parts of {degree} context ranks (reduce-scatter)"
    if mesh.ep > 1:
        yield "weights of experts: rows of all ranks that sent them, rank after rank"


def _gradients(plan: Plan) -> Iterator[str]:
    """Yield what adds up to a gradient of weights, from the inside."""
    mesh, zero = plan.mesh, plan.layout.zero
    parts: list[str] = []
    slices = zero.stage > 0 and zero.accumulate == "slices"
    microbatches = f"{plan.num_microbatches} microbatches in the order of backward"
    if plan.num_microbatches > 1 and not slices:
        parts.append(microbatches)
    shards = mesh.dp_shard * mesh.cp
    readers = "context ranks" if mesh.cp > 1 else "data ranks"
    if mesh.cp > 1 and shards * mesh.dp_replicate > mesh.cp:
        readers = "data and context ranks"
    if mesh.servers:
        parts.append(f"{mesh.num_workers} workers, one after the other, on each server")
    elif zero.stage and shards > 1:
        parts.append(f"{shards} {readers} (reduce-scatter)")
    elif shards * mesh.dp_replicate > 1 and not zero.stage:
        parts.append(f"{shards * mesh.dp_replicate} {readers} (all-reduce)")
    if slices and plan.num_microbatches > 1:
        parts.append(microbatches)
    if zero.stage and mesh.dp_replicate > 1:
        parts.append(f"{mesh.dp_replicate} replicas (all-reduce)")
    if parts:
        yield f"gradients of weights: {', then '.join(parts)}"
