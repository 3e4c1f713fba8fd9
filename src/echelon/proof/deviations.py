# SPDX-License-Identifier: Apache-2.0
"""How far each strategy is from one process: loss, gradients, parameters, in two precisions.

Each strategy is a plan of the same run, proven as `echelon prove` proves it; what is told is the
largest error of the claims about these tensors: the norm of a difference over that of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.planner.explain.reduction_order import reduction_order
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
