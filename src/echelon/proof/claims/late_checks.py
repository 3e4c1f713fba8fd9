# SPDX-License-Identifier: Apache-2.0
"""The comparisons of a run with late completion: with its own races, and with the other run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch

from echelon.parallel.completion.in_flight import RaceKind
from echelon.proof.claims.checks import Check, exact_check, relative_error
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.run import INITIAL
from echelon.proof.observed import ObservedRun
from echelon.proof.subject import StepRecord

_NUMBERS = ("loss", "grad_norm", "tokens", "skipped", "loss_scale", "microbatch_losses", "routing")
"""What of a report must be the same; that of the order of actions and of bytes has its claims."""


def races(*kinds: RaceKind) -> Callable[[PlanEvidence | CapturedEvidence], Iterator[Check]]:
    """Return the checks that no rank had a race of some kinds."""

    def checks(evidence: PlanEvidence | CapturedEvidence) -> Iterator[Check]:
        late = evidence.late
        if late is None:
            return
        for rank in range(len(late.num_operations)):
            yield exact_check(0, f"operations of rank {rank}", "")
        for position, race in enumerate(late.races):
            if race.kind in kinds:
                problem = f"{race.kind}: {race.says}, rank {race.rank}, at {race.at}"
                yield exact_check(race.step, race.operation, problem, position - 10_000)

    return checks


def operations_note(evidence: PlanEvidence | CapturedEvidence, _: Sequence[Check]) -> str:
    """Return how many operations all ranks were watched in."""
    return f"{sum(evidence.late.num_operations)} operations" if evidence.late else ""


def same_bits(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare what the ranks said in both runs, bit for bit."""
    late = evidence.late
    if late is None or late.observed is None or late.observed is evidence.run:
        return
    one, other = evidence.run, late.observed
    kinds = [(kind, INITIAL) for kind in one.value_kinds]
    for oracle in evidence.steps:
        kinds += [(kind, oracle.step) for kind in ("gradients", *one.value_kinds)]
        for rank, reports in enumerate(
            zip(one.reports(oracle.step), other.reports(oracle.step), strict=True)
        ):
            for name in _NUMBERS:
                problem = _number_problem(name, *reports)
                yield exact_check(oracle.step, f"{name} of rank {rank}", problem, position=-1)
    for kind, step in kinds:
        for position, name in enumerate(one.specs):
            yield _tensor_check(one, other, (kind, step, name), position)


def _number_problem(name: str, one: StepRecord, other: StepRecord) -> str:
    values = [getattr(report, name) for report in (one, other)]
    told = [asdict(value) if name == "routing" and value is not None else value for value in values]
    # By their text: NaN is not equal to itself.
    same = repr(told[0]) == repr(told[1])
    return "" if same else f"{values[1]} with late completion, {values[0]} without"


def _tensor_check(
    one: ObservedRun, other: ObservedRun, key: tuple[str, int, str], position: int
) -> Check:
    kind, step, name = key
    pairs = list(zip(one.parts(*key), other.parts(*key), strict=True))
    wrong = [(a, b) for a, b in pairs if not _same(a.tensor, b.tensor)]
    if not wrong:
        return exact_check(step, name, "", position)
    error = max(relative_error(b.tensor, a.tensor, 0.0) for a, b in wrong)
    ranks = sorted({a.rank for a, _ in wrong})
    detail = f"{kind}: other bits with late completion, on ranks {ranks}"
    return Check(step, name, error if error > 0 else math.inf, detail=detail, position=position)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(flat[0], flat[1])
