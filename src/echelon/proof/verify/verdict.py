# SPDX-License-Identifier: Apache-2.0
"""The verdict on a program that is not ours: claims in each precision, and what is wrong first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.core.errors import ProofFailed
from echelon.proof.claims.proof import ProofPass, claim_problem, pass_json
from echelon.proof.diagnose.diagnosis import Diagnosis

SUBJECT_PROOF_SCHEMA = 1  # of the written JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectProof:
    """Hold the proof of a user's file."""

    file: str
    """The file, as it was named."""
    mesh: str
    """Its mesh, as users read it."""
    framework: str
    """What its placement was read from."""
    seed: int
    """Seed of weights and data."""
    num_steps: int
    """Optimizer steps."""
    num_parameters: int
    """Parameters of one device, tied ones once."""
    num_elements: int
    """Their elements."""
    versions: Mapping[str, str]
    """Versions of what it ran with, by package."""
    passes: tuple[ProofPass, ...]
    """The passes, one for each precision."""

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

    def write(self, path: Path) -> None:
        """Write the proof to `path`."""
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    def require(self) -> None:
        """Raise ProofFailed, with one problem for each broken claim, unless all hold."""
        if not self.proven:
            raise ProofFailed(
                [claim_problem(one, c) for one in self.passes for c in one.claims if not c.holds]
            )
