"""The proof as a value: what was claimed, how far off it was, what it may be, what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from echelon.core.errors import Problem, ProofFailed
from echelon.core.plan import Plan
from echelon.prove.claims import ClaimResult
from echelon.prove.diagnosis import Diagnosis

PROOF_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofPass:
    """Hold the claims in one precision; `diagnosis` tells what is wrong, where something is."""

    precision: str
    claims: tuple[ClaimResult, ...]
    diagnosis: Diagnosis | None

    @property
    def holds(self) -> bool:
        """Return whether every claim holds."""
        return all(claim.holds for claim in self.claims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Hold a whole proof: of which plan, of what subject, with which seed and versions."""

    plan: str
    plan_hash: str
    mesh: str
    shrunk_plan: Plan
    subject: str
    seed: int
    num_steps: int
    versions: Mapping[str, str]
    passes: tuple[ProofPass, ...]

    @property
    def proven(self) -> bool:
        """Return whether every claim holds in every precision."""
        return all(one.holds for one in self.passes)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Return what is wrong, told in the first precision in which something is."""
        return next((one.diagnosis for one in self.passes if one.diagnosis is not None), None)

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
            "passes": [_pass_json(one) for one in self.passes],
        }

    def write(self, path: Path) -> None:
        """Write the proof to `path` (``proof.json`` beside the plan)."""
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    def require(self) -> None:
        """Raise ProofFailed, with one problem for each broken claim, unless all hold."""
        problems = [
            problem
            for one in self.passes
            for claim in one.claims
            if (problem := _problem(one, claim)) is not None
        ]
        if problems:
            raise ProofFailed(problems)


def _problem(one: ProofPass, claim: ClaimResult) -> Problem | None:
    if claim.holds:
        return None
    first, diagnosis = claim.failures[0], one.diagnosis
    message = f"{claim.statement} does not hold in {one.precision}: step {first.step}, "
    message += f"{first.subject}" + (f", {first.detail}" if first.detail else "")
    if math.isfinite(first.error) and first.error > first.allowed > 0:
        message += f" (error {first.error:.2g}, allowed {first.allowed:.2g})"
    if diagnosis is not None and diagnosis.rule == claim.rule.id:
        message += f"; {diagnosis.sentence()}"
    return claim.rule.problem(message)


def _pass_json(one: ProofPass) -> dict[str, object]:
    return {
        "precision": one.precision,
        "holds": one.holds,
        "claims": [_claim_json(claim) for claim in one.claims],
        "diagnosis": None if one.diagnosis is None else asdict(one.diagnosis),
    }


def _claim_json(claim: ClaimResult) -> dict[str, object]:
    return {
        "rule": claim.rule.id,
        "statement": claim.statement,
        "holds": claim.holds,
        "compared": claim.compared,
        "max_error": _number(claim.max_error),
        "allowed": _number(claim.allowed),
        "worst": claim.worst,
        "note": claim.note,
        "failures": [
            {
                "step": failure.step,
                "subject": failure.subject,
                "error": _number(failure.error),
                "allowed": _number(failure.allowed),
                "detail": failure.detail,
            }
            for failure in claim.failures
        ],
    }


def _number(value: float) -> float | str:
    # JSON has no infinity and no NaN.
    return value if math.isfinite(value) else str(value)
