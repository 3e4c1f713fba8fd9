# SPDX-License-Identifier: Apache-2.0
"""The proof as a value: what was claimed, how far off it was, what it may be, what is wrong."""

from __future__ import annotations

import json
import math
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from echelon.core.errors import Problem, ProofFailed
from echelon.core.notebook import NOTEBOOK_VIEWS
from echelon.core.plan import Plan
from echelon.core.version import __version__
from echelon.proof.causes.finding import Diagnosis
from echelon.proof.changes import Change
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
    changes: tuple[Change, ...]
    """Every number of the plan that the small plan changes."""
    subject: str
    """The engine that was put through the claims."""
    independent: ProofPass | None = None
    """How one device fares beside the independent implementation, where it was asked for."""
    whole_run: ProofPass | None = None
    """How a whole run of our trainer fares, from data to text, where there was one."""
    left_out: tuple[str, ...] = ()
    """Parts of a proof that a quick proof leaves out."""
    resumed: ProofPass | None = None
    """Claims about our trainer in the plan's own precision, resumed between overflows."""
    data: ProofPass | None = None
    """Claims about the data of the run, if they were given; no claims if they are not here."""

    @property
    def every_pass(self) -> tuple[ProofPass, ...]:
        """Return the passes, and those beside them that there are."""
        beside = (self.independent, self.whole_run, self.resumed, self.data)
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
            "changes": [asdict(change) for change in self.changes],
            "subject": self.subject,
            "seed": self.seed,
            "num_steps": self.num_steps,
            "versions": dict(self.versions),
            "passes": [pass_json(one) for one in self.passes],
            "independent": pass_json(self.independent),
            "whole_run": pass_json(self.whole_run),
            "resumed": pass_json(self.resumed),
            "data": pass_json(self.data),
            "left_out": list(self.left_out),
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


def running_versions() -> dict[str, str]:
    """Versions that this process runs with, by package."""
    return {
        "echelon": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
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
