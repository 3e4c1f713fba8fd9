# SPDX-License-Identifier: Apache-2.0
"""What must hold of a program that is not ours, and how far off it may be.

Errors and tolerances are those of `proof/claims`: norm-wise relative errors, 1e-10 in float64; in
the run's own precision what one device in that precision is off by, drawn eight times, and one more
rounding for each partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from echelon.core.rulebook import prove as rules
from echelon.core.rulebook import verify as verify_rules
from echelon.core.rules import Rule
from echelon.proof.claims.checks import Check, exact_check, relative_error
from echelon.proof.claims.claims import ClaimResult, judged
from echelon.proof.claims.factor_fit import fit_factor
from echelon.proof.claims.tolerance import (
    FLOOR,
    ErrorSample,
    Tolerance,
    float64_tolerance,
    measured,
    tensor_errors,
)
from echelon.proof.ranks import INITIAL
from echelon.proof.verify.capture import GRADIENTS, PARAMETERS
from echelon.proof.verify.named_mesh import NamedMesh
from echelon.proof.verify.observation import SubjectRun
from echelon.proof.verify.reference import Reference, ReferencePass, ReferenceStep
from echelon.proof.verify.sharding import sharding_checks

_Key = tuple[str, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectEvidence:
    """Hold the two sides of a pass: one device in float64, and what the ranks captured."""

    mesh: NamedMesh
    reference: Reference
    run: SubjectRun
    tolerance: Tolerance
    dtype: torch.dtype

    def wanted_gradient(self, step: ReferenceStep, name: str) -> torch.Tensor:
        """Return the gradient that the ranks must have where it is read: clipped or not."""
        gradient = step.clipped(name) if self.run.reads_clipped else step.gradients[name]
        return gradient.double()

    @property
    def explained(self) -> float:
        """Return the relative residual below which an explanation fits in this precision."""
        roundoff = torch.finfo(self.dtype).eps / 2
        return max(1e-6, 64 * roundoff)


def subject_tolerance(one: ReferencePass, num_partial_sums: int) -> Tolerance:
    """Return how far off a right program may be in the precision of a pass."""
    if not one.rough:
        return float64_tolerance()
    roundoff = torch.finfo(getattr(torch, one.dtype)).eps / 2
    runs = [dict(_errors(one.exact, rough)) for rough in one.rough]
    return measured(
        runs, num_partial_sums * roundoff, _flats(one.exact, num_partial_sums, roundoff)
    )


def _errors(exact: Reference, rough: Reference) -> Iterator[tuple[_Key, ErrorSample]]:
    for right, other in zip(exact.steps, rough.steps, strict=True):
        step = right.step
        off = abs(other.loss - right.loss) / abs(right.loss), False
        yield ("loss", step, ""), off
        yield ("losses", step, ""), off
        norm = abs(other.grad_norm - right.grad_norm) / right.grad_norm
        yield ("grad_norm", step, ""), (norm, False)
        yield from tensor_errors(GRADIENTS, step, right.gradients, other.gradients)
        updates = {name: right.update(name) for name in right.after}
        seen = {name: other.update(name) for name in other.after}
        yield from tensor_errors("updates", step, updates, seen)
        after = {name: value.double() for name, value in right.after.items()}
        yield from tensor_errors(PARAMETERS, step, after, other.after)
        for key, values in right.state.items():
            doubles = {name: value.double() for name, value in values.items()}
            yield from tensor_errors(key, step, doubles, other.state[key])


def _flats(exact: Reference, count: int, roundoff: float) -> dict[_Key, float]:
    """Return what a program may add to the error of each value: its own rounding, its updates'."""
    flats: dict[_Key, float] = {}
    for step in exact.steps:
        for name, value in step.after.items():
            moved = float((value.double() - exact.initial[name].double()).norm())
            length = float(value.double().norm())
            share = moved / length if length else 0.0
            flats[PARAMETERS, step.step, name] = max(roundoff, count * roundoff * share)
            change = float(step.update(name).norm())
            lost = roundoff * length / change if change else 0.0
            flats["updates", step.step, name] = count * roundoff + lost
    return flats


def _nothing_dropped(evidence: SubjectEvidence) -> Iterator[Check]:
    run, logical = evidence.run, evidence.reference.logical
    for position, name in enumerate(logical.shapes):
        yield exact_check(INITIAL, name, _coverage(run, PARAMETERS, INITIAL, name), position)
    for step in evidence.reference.steps:
        for position, name in enumerate(step.gradients):
            if not run.pieces(PARAMETERS, INITIAL, name):
                continue
            problem = _coverage(run, GRADIENTS, step.step, name)
            yield exact_check(step.step, name, problem and f"gradient: {problem}", position)


def _coverage(run: SubjectRun, kind: str, step: int, name: str) -> str:
    pieces = run.pieces(kind, step, name)
    if not pieces:
        return "no rank holds it" if kind == PARAMETERS else "no optimizer of any rank took it"
    missing = int((run.coverage(kind, step, name) == 0).sum())
    if missing:
        return f"{missing} of {math.prod(run.logical.shapes[name])} elements are on no rank"
    for rank in run.holders(kind, step, name):
        own = [piece for holder, piece in pieces if holder == rank]
        indices = torch.cat([piece.index for piece in own])
        sources = list(dict.fromkeys(piece.source for piece in own))
        if len(sources) > 1 and indices.numel() > indices.unique().numel():
            return f"rank {rank} holds it twice: {' and '.join(sources[:2])}"
    return ""


def _initial(evidence: SubjectEvidence) -> Iterator[Check]:
    if evidence.run.copied_initial:
        return
    allowed = torch.finfo(evidence.dtype).eps / 2
    for position, (name, value) in enumerate(evidence.reference.initial.items()):
        error = _tensor_error(evidence.run, PARAMETERS, INITIAL, name, value)
        scale = float(value.double().norm())
        # A bias starts at zero: whatever else it holds is off by all of it.
        yield Check(INITIAL, name, error / (scale or 1.0), allowed=allowed, position=position)


def _loss(evidence: SubjectEvidence) -> Iterator[Check]:
    for step in evidence.reference.steps:
        value = evidence.run.loss(step.step)
        if value is not None:
            yield Check(
                step.step,
                "loss",
                abs(value - step.loss) / abs(step.loss),
                allowed=evidence.tolerance.allowed("loss", step.step, ""),
                detail=f"{value:.10g} instead of {step.loss:.10g}",
            )


def _local(evidence: SubjectEvidence) -> Iterator[Check]:
    """Compare the sum of what all ranks' backwards made, but for a factor of degrees.

    A reduction may weigh ranks by their tokens: where its result is right, so is what it is made
    of.
    """
    run = evidence.run
    for step in evidence.reference.steps:
        floor = _floor(step.gradients)
        known = reduction_factors(evidence, step.step)
        for position, name in enumerate(reversed(step.gradients)):
            parts = run.local_gradients(step.step, name)
            right = step.gradients[name].double().reshape(-1)
            if not parts or not float(right.norm()) > floor:
                continue
            total = torch.stack(list(parts.values())).sum(0)
            factor, _ = fit_factor(total, right)
            error = relative_error(total / (_nearest(factor, known) or 1.0), right, floor)
            allowed = evidence.tolerance.allowed(GRADIENTS, step.step, name)
            if error <= allowed or not is_right(evidence, step, name):
                detail = f"adds up to {factor:.6g} times the right one" * (error > allowed)
                yield Check(
                    step.step, name, error, allowed=allowed, detail=detail, position=position
                )


def is_right(evidence: SubjectEvidence, step: ReferenceStep, name: str) -> bool:
    """Return whether the gradient that the optimizer takes is right."""
    wanted = evidence.wanted_gradient(step, name)
    error = _tensor_error(evidence.run, GRADIENTS, step.step, name, wanted)
    scale = max(float(wanted.norm()), _floor(step.gradients) * step.clip_scale)
    return error <= evidence.tolerance.allowed(GRADIENTS, step.step, name) * scale


def reduction_factors(evidence: SubjectEvidence, step: int) -> list[float]:
    """Return by what the sum of local gradients may be larger than the gradient."""
    degrees = [1, *(evidence.mesh.degree(axes) for axes in evidence.mesh.axis_sets())]
    calls = [1, evidence.run.num_calls(step)]
    return sorted({float(degree * call) for degree in degrees for call in calls})


def _nearest(factor: float, known: list[float]) -> float | None:
    best = min(known, key=lambda one: abs(one - factor))
    return best if abs(best - factor) <= 1e-2 * best else None


def _gradients(evidence: SubjectEvidence) -> Iterator[Check]:
    for step in evidence.reference.steps:
        wanted = {name: evidence.wanted_gradient(step, name) for name in step.gradients}
        names = list(reversed(wanted))
        yield from _tensors(evidence, GRADIENTS, step.step, {n: wanted[n] for n in names})


def _norm(evidence: SubjectEvidence) -> Iterator[Check]:
    for step in evidence.reference.steps:
        for rank, report in enumerate(evidence.run.reports(step.step)):
            if report.grad_norm is not None:
                yield Check(
                    step.step,
                    f"gradient norm of rank {rank}",
                    abs(report.grad_norm - step.grad_norm) / step.grad_norm,
                    allowed=evidence.tolerance.allowed("grad_norm", step.step, ""),
                    detail=f"{report.grad_norm:.10g} instead of {step.grad_norm:.10g}",
                    position=rank,
                )


def _state(evidence: SubjectEvidence) -> Iterator[Check]:
    for step in evidence.reference.steps:
        captured = evidence.run.kinds(step.step)
        for key, values in step.state.items():
            if key in captured:
                held = {
                    name: value.double()
                    for name, value in values.items()
                    if evidence.run.pieces(key, step.step, name)
                }
                yield from _tensors(evidence, key, step.step, held, detail=key)


def _updates(evidence: SubjectEvidence) -> Iterator[Check]:
    for step in evidence.reference.steps:
        wanted = {name: step.update(name) for name in step.after}
        floor = _floor(wanted)
        for position, (name, value) in enumerate(wanted.items()):
            error = relative_error(evidence.run.update(step.step, name), value, floor)
            allowed = evidence.tolerance.allowed("updates", step.step, name)
            yield Check(step.step, name, error, allowed=allowed, position=position)


def _parameters(evidence: SubjectEvidence) -> Iterator[Check]:
    last = evidence.reference.steps[-1]
    after = {name: value.double() for name, value in last.after.items()}
    yield from _tensors(evidence, PARAMETERS, last.step, after)


def _replicas(evidence: SubjectEvidence) -> Iterator[Check]:
    """Compare all copies of a parameter after each step with that of the first rank."""
    run = evidence.run
    for step in evidence.reference.steps:
        for position, name in enumerate(step.after):
            whole = run.whole(PARAMETERS, step.step, name).reshape(-1)
            scale = max(float(whole.norm()), 1e-30)
            errors = {
                rank: float((piece.values.double() - whole[piece.index]).norm()) / scale
                for rank, piece in run.pieces(PARAMETERS, step.step, name)
            }
            worst = max(errors.values(), default=0.0)
            allowed = evidence.tolerance.allowed(PARAMETERS, step.step, name)
            odd = sorted(rank for rank, error in errors.items() if not error <= allowed)
            detail = f"ranks {odd} differ from rank {min(errors)}" if odd else ""
            yield Check(step.step, name, worst, allowed=allowed, detail=detail, position=position)


def _same_bits(results: list[Check]) -> str:
    return "same bits" if all(check.error == 0.0 for check in results) else "but for rounding"


def _tensors(
    evidence: SubjectEvidence,
    kind: str,
    step: int,
    wanted: Mapping[str, torch.Tensor],
    *,
    detail: str = "",
) -> Iterator[Check]:
    floor = _floor(wanted)
    for position, (name, value) in enumerate(wanted.items()):
        scale = max(float(value.norm()), floor)
        error = _tensor_error(evidence.run, kind, step, name, value)
        allowed = evidence.tolerance.allowed(kind, step, name)
        yield Check(
            step,
            name,
            error / scale if scale else error,
            allowed=allowed,
            detail=detail,
            position=position,
        )


def _floor(tensors: Mapping[str, torch.Tensor]) -> float:
    return FLOOR * math.sqrt(sum(float(one.double().square().sum()) for one in tensors.values()))


def _tensor_error(run: SubjectRun, kind: str, step: int, name: str, right: torch.Tensor) -> float:
    """Return the error of the piece that is furthest off, or of all of them together."""
    flat = right.double().reshape(-1)
    pieces = run.pieces(kind, step, name)
    if not pieces:
        return math.inf
    errors = [float((piece.values.double() - flat[piece.index]).norm()) for _, piece in pieces]
    errors.append(float((run.whole(kind, step, name).reshape(-1) - flat).norm()))
    return max(math.inf if math.isnan(error) else error for error in errors)


@dataclass(frozen=True, slots=True)
class SubjectClaim:
    """Name one claim about a subject, and the comparisons that decide it."""

    rule: Rule
    statement: str
    checks: Callable[[SubjectEvidence], Iterator[Check]]
    note: Callable[[list[Check]], str] = lambda _: ""


SUBJECT_CLAIMS: tuple[SubjectClaim, ...] = (
    SubjectClaim(
        rules.PROVE_NOTHING_DROPPED,
        "every parameter is on some rank, and has a gradient",
        _nothing_dropped,
    ),
    SubjectClaim(rules.PROVE_INITIAL_WEIGHTS, "first weights are those of one device", _initial),
    SubjectClaim(rules.PROVE_LOSS, "loss of the whole batch", _loss),
    SubjectClaim(
        verify_rules.VERIFY_LOCAL_GRADIENTS,
        "gradients of all ranks add up, before they are reduced",
        _local,
    ),
    SubjectClaim(rules.PROVE_GRADIENTS, "every gradient that the optimizer takes", _gradients),
    SubjectClaim(rules.PROVE_GRADIENT_NORM, "gradient norm that the program tells", _norm),
    SubjectClaim(verify_rules.VERIFY_OPTIMIZER_STATE, "optimizer state after every step", _state),
    SubjectClaim(rules.PROVE_CLIPPED_UPDATE, "every update", _updates),
    SubjectClaim(rules.PROVE_PARAMETERS, "every parameter after the last step", _parameters),
    SubjectClaim(rules.PROVE_REPLICAS, "copies stay the same on all ranks", _replicas, _same_bits),
    SubjectClaim(
        verify_rules.VERIFY_SHARDING,
        "ranks hold shards where the program asks for them",
        lambda one: sharding_checks(one.reference.logical, one.run.asked, one.run.held_copies()),
    ),
)
"""All claims, in the order in which one causes the next."""


def judge_subject(evidence: SubjectEvidence) -> tuple[ClaimResult, ...]:
    """Return how every claim fares; those about what the program does not show are left out."""
    results: list[ClaimResult] = []
    for claim in SUBJECT_CLAIMS:
        checks = list(claim.checks(evidence))
        if checks:
            note = claim.note(checks)
            results.append(judged(claim.rule, claim.statement, checks, note))
    return tuple(results)
