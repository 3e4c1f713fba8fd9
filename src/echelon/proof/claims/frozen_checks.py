# SPDX-License-Identifier: Apache-2.0
"""The comparison of what nothing may move: the weights below adapters, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from echelon.proof.claims.checks import Check, exact_check
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.run import INITIAL


def frozen(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare every rank's frozen values after each step with the first ones, and gradients.

    A rank must hold no gradient of what is frozen.
    """
    observed = evidence.run
    names = [
        (place, name) for place, (name, one) in enumerate(observed.specs.items()) if one.frozen
    ]
    for oracle, (position, name) in product(evidence.steps, names):
        held = observed.parts("gradients", oracle.step, name)
        problem = f"ranks {sorted({one.rank for one in held})} hold a gradient" * bool(held)
        yield exact_check(oracle.step, name, problem, position)
        for kind in observed.value_kinds:
            first = observed.whole(kind, INITIAL, name)
            moved = {
                piece.rank
                for piece in observed.parts(kind, oracle.step, name)
                if not torch.equal(piece.tensor.double(), first[piece.region])
            }
            problem = f"{kind} moved on ranks {sorted(moved)}" * bool(moved)
            yield exact_check(oracle.step, name, problem, position)
