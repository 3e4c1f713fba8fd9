# SPDX-License-Identifier: Apache-2.0
"""The claims of local SGD: what islands make of their meetings, and that they agree on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from echelon.proof.claims.checks import Check, exact_check, tensor_error
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.oracle.optimizers import global_norm

OUTER_PARAMETERS, OUTER_MOMENTUM = "outer.parameters", "outer.momentum"
"""Kinds of tensors that a subject with islands tells."""


def outer_steps(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare outer parameters, and in float64 their momentum, with the formula's after each step.

    A momentum is a sum of differences of values: in a precision of few digits their rounding is
    most of it.
    """
    rounds = evidence.rounds
    if rounds is None:
        return
    for one in rounds.outer:
        yield from _kind(evidence, OUTER_PARAMETERS, one.step, one.after)
        if rounds.local.outer == "nesterov" and not evidence.tolerance.own_precision:
            yield from _kind(evidence, OUTER_MOMENTUM, one.step, one.momentum_after)


def _kind(
    evidence: PlanEvidence, kind: str, step: int, oracle: Mapping[str, torch.Tensor]
) -> Iterator[Check]:
    total = global_norm(oracle)
    for position, (name, right) in enumerate(oracle.items()):
        scale = max(float(right.double().norm()), FLOOR * total)
        error = tensor_error(evidence.run, kind, step, name, right)
        yield Check(
            step,
            name,
            error / scale if scale else error,
            allowed=evidence.tolerance.allowed("masters", step, name),
            detail=f"the {kind.replace('.', ' ')}",
            position=position,
        )


def islands_agree(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the outer state of an island with that of the first, bit for bit."""
    rounds = evidence.rounds
    if rounds is None:
        return
    first = rounds.observed[0]
    for one in rounds.outer:
        for kind in (OUTER_PARAMETERS, OUTER_MOMENTUM):
            for position, name in enumerate(evidence.run.specs):
                mine = evidence.run.parts(kind, one.step, name)
                theirs = first.parts(kind, one.step, name)
                same = len(mine) == len(theirs) and all(
                    torch.equal(a.tensor, b.tensor) for a, b in zip(mine, theirs, strict=True)
                )
                problem = f"the {kind.replace('.', ' ')} is not that of island 0" * (not same)
                yield exact_check(one.step, name, problem, position)
