# SPDX-License-Identifier: Apache-2.0
"""The proof as a value: what was claimed, how far off it was, what it may be, what is wrong.

Several strategies of one run, each proven, make a table: the largest error of the claims about
loss, gradients and parameters in two precisions. The table names the sums that a plan cuts into
parts, because floating-point sums depend on their order; sums over ranks have the order of
`docs/decisions/009-order-of-reduction.md`.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.errors import Problem, ProofFailed
from echelon.core.notebook import NOTEBOOK_VIEWS
from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.proof.causes.finding import Diagnosis
from echelon.proof.claims.claims import ClaimResult

PROOF_SCHEMA = 1  # of the written JSON
SUBJECT_PROOF_SCHEMA = 1  # of the written JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofPass:
    """Hold the claims in one precision; `diagnosis` tells what is wrong, where something is.

    `note` says what was not compared, where that is worth a line.
    """

    precision: str
    claims: tuple[ClaimResult, ...]
    diagnosis: Diagnosis | None
    note: str = ""

    @property
    def holds(self) -> bool:
        """Return whether every claim holds."""
        return all(claim.holds for claim in self.claims)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofVerdict(ABC):
    """Hold the passes of a proof, and what it ran with."""

    mesh: str
    """The mesh, as users read it."""
    seed: int
    """Seed of weights and data."""
    num_steps: int
    """Optimizer steps."""
    versions: Mapping[str, str]
    """Versions of what it ran with, by package."""
    passes: tuple[ProofPass, ...]
    """The passes, one for each precision."""

    @property
    def every_pass(self) -> tuple[ProofPass, ...]:
        """Return the passes, and those beside them that there are."""
        return self.passes

    @property
    def proven(self) -> bool:
        """Return whether every claim holds in every precision."""
        return all(one.holds for one in self.every_pass)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Return what is wrong, told in the first precision in which something is."""
        found = (one.diagnosis for one in self.every_pass if one.diagnosis is not None)
        return next(found, None)

    @abstractmethod
    def to_json(self) -> dict[str, object]:
        """Return the proof as one JSON object."""

    def write(self, path: Path) -> None:
        """Write the proof to `path` (``proof.json`` beside a plan)."""
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    def require(self) -> None:
        """Raise ProofFailed, with one problem for each broken claim, unless all hold."""
        if not self.proven:
            raise ProofFailed(
                [
                    claim_problem(one, c)
                    for one in self.every_pass
                    for c in one.claims
                    if not c.holds
                ]
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof(ProofVerdict):
    """Hold the proof of a plan."""

    plan: str
    """Name of the plan."""
    plan_hash: str
    """Hash of its content."""
    shrunk_plan: Plan
    """What ran: the same split of a small model."""
    subject: str
    """The engine that was put through the claims."""
    independent: ProofPass | None = None
    """How one device fares beside the independent implementation, where it was asked for."""
    whole_run: ProofPass | None = None
    """How a whole run of our trainer fares, from data to text, where there was one."""

    @property
    def every_pass(self) -> tuple[ProofPass, ...]:
        """Return the passes, and those beside them that there are."""
        beside = (self.independent, self.whole_run)
        return (*self.passes, *(one for one in beside if one is not None))

    def to_json(self) -> dict[str, object]:
        """Return the proof as one JSON object."""
        return {
            "schema": PROOF_SCHEMA,
            "proven": self.proven,
            "plan": self.plan,
            "plan_hash": self.plan_hash,
            "mesh": self.mesh,
            "shrunk_plan_hash": self.shrunk_plan.content_hash(),
            "shrunk_plan": json.loads(self.shrunk_plan.to_json()),
            "subject": self.subject,
            "seed": self.seed,
            "num_steps": self.num_steps,
            "versions": dict(self.versions),
            "passes": [pass_json(one) for one in self.passes],
            "independent": pass_json(self.independent),
            "whole_run": pass_json(self.whole_run),
        }

    def _repr_html_(self) -> str | None:
        """Return the proof, as a notebook shows it: its page without a script."""
        return NOTEBOOK_VIEWS.html("proof", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectProof(ProofVerdict):
    """Hold the proof of a user's file."""

    file: str
    """The file, as it was named."""
    framework: str
    """What its placement was read from."""
    num_parameters: int
    """Parameters of one device, tied ones once."""
    num_elements: int
    """Their elements."""

    def to_json(self) -> dict[str, object]:
        """Return the proof as one JSON object."""
        return {
            "schema": SUBJECT_PROOF_SCHEMA,
            "proven": self.proven,
            "file": self.file,
            "mesh": self.mesh,
            "framework": self.framework,
            "seed": self.seed,
            "num_steps": self.num_steps,
            "num_parameters": self.num_parameters,
            "num_elements": self.num_elements,
            "versions": dict(self.versions),
            "passes": [pass_json(one) for one in self.passes],
        }


def claim_problem(one: ProofPass, claim: ClaimResult) -> Problem:
    """Return the problem of a claim that does not hold."""
    first, diagnosis = claim.failures[0], one.diagnosis
    message = f"{claim.statement} does not hold in {one.precision}: step {first.step}, "
    message += f"{first.subject}" + (f", {first.detail}" if first.detail else "")
    if math.isfinite(first.error) and first.error > first.allowed > 0:
        message += f" (error {first.error:.2g}, allowed {first.allowed:.2g})"
    if diagnosis is not None and diagnosis.rule == claim.rule.id:
        message += f"; {diagnosis.sentence()}"
    return claim.rule.problem(message)


def pass_json(one: ProofPass | None) -> dict[str, object] | None:
    """Return a pass as a JSON object; None where there was none."""
    if one is None:
        return None
    return {
        "precision": one.precision,
        "holds": one.holds,
        "claims": [_claim_json(claim) for claim in one.claims],
        "diagnosis": None if one.diagnosis is None else asdict(one.diagnosis),
        "note": one.note,
    }


def _claim_json(claim: ClaimResult) -> dict[str, object]:
    told = ("statement", "holds", "compared", "max_error", "allowed", "worst", "note")
    failed = ("step", "subject", "error", "allowed", "detail")
    failures = [_fields(failure, failed) for failure in claim.failures]
    return {"rule": claim.rule.id, **_fields(claim, told), "failures": failures}


def _fields(record: object, names: Sequence[str]) -> dict[str, object]:
    """Return fields by name; JSON has no infinity and no NaN, which are told as text."""
    values = {name: getattr(record, name) for name in names}
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


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
