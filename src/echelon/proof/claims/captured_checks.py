# SPDX-License-Identifier: Apache-2.0
"""The comparisons of what hooks captured of a program that is not ours, and how far off it may be.

Errors and tolerances are those of `proof/claims`: norm-wise relative errors, 1e-10 in float64; in
the run's own precision what one device in that precision is off by, drawn eight times, and one more
rounding for each partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from echelon.proof.claims.checks import Check, exact_check, relative_error, tensor_error
from echelon.proof.claims.taken import error_of_update, moves_untaken
from echelon.proof.claims.value_checks import tensor_checks
from echelon.proof.evidence.captured import CapturedRun, Reference, ReferencePass
from echelon.proof.evidence.evidence import (
    AnyEvidence,
    CapturedEvidence,
    ErrorSample,
    Tolerance,
    float64_tolerance,
    measured,
    tensor_errors,
)
from echelon.proof.evidence.fits import FLOOR, fit_factor
from echelon.proof.evidence.run import GRADIENTS, INITIAL, PARAMETERS, ReferenceStep
from echelon.proof.oracle.optimizers import global_norm

_Key = tuple[str, int, str]


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


def nothing_dropped(evidence: CapturedEvidence) -> Iterator[Check]:
    """Ask that each parameter is on some rank, and that some optimizer takes its gradient."""
    run = evidence.run
    for position, name in enumerate(run.shapes):
        yield exact_check(INITIAL, name, _coverage(run, PARAMETERS, INITIAL, name), position)
    for step in evidence.steps:
        for position, name in enumerate(step.gradients):
            if not run.parts(PARAMETERS, INITIAL, name):
                continue
            problem = _coverage(run, GRADIENTS, step.step, name)
            if problem and moves_untaken(evidence, step.step, name):
                problem = ""
            yield exact_check(step.step, name, problem and f"gradient: {problem}", position)


def _coverage(run: CapturedRun, kind: str, step: int, name: str) -> str:
    pieces = run.parts(kind, step, name)
    if not pieces:
        return "no rank holds it" if kind == PARAMETERS else "no optimizer of any rank took it"
    missing = int((run.coverage(kind, step, name) == 0).sum())
    if missing:
        return f"{missing} of {math.prod(run.shapes[name])} elements are on no rank"
    for rank in run.holders(kind, step, name):
        own = [piece for piece in pieces if piece.rank == rank]
        indices = torch.cat([piece.index for piece in own])
        sources = list(dict.fromkeys(piece.source for piece in own))
        if len(sources) > 1 and indices.numel() > indices.unique().numel():
            return f"rank {rank} holds it twice: {' and '.join(sources[:2])}"
    return ""


def initial_weights(evidence: CapturedEvidence) -> Iterator[Check]:
    """Compare first weights that the program drew with those of one device."""
    if evidence.run.copied_initial:
        return
    allowed = torch.finfo(evidence.dtype).eps / 2
    for position, (name, value) in enumerate(evidence.initial.items()):
        error = tensor_error(evidence.run, PARAMETERS, INITIAL, name, value)
        scale = float(value.double().norm())
        # A bias starts at zero: whatever else it holds is off by all of it.
        yield Check(INITIAL, name, error / (scale or 1.0), allowed=allowed, position=position)


def loss(evidence: CapturedEvidence) -> Iterator[Check]:
    """Compare the loss of all ranks together with that of the whole batch."""
    for step in evidence.steps:
        value = evidence.run.loss(step.step)
        if value is not None:
            yield Check(
                step.step,
                "loss",
                abs(value - step.loss) / abs(step.loss),
                allowed=evidence.tolerance.allowed("loss", step.step, ""),
                detail=f"{value:.10g} instead of {step.loss:.10g}",
            )


def local_gradients(evidence: CapturedEvidence) -> Iterator[Check]:
    """Compare the sum of what all ranks' backwards made, but for a factor of degrees.

    A reduction may weigh ranks by their tokens: where its result is right, so is what it is made
    of.
    """
    run = evidence.run
    for step in evidence.steps:
        floor = FLOOR * global_norm(step.gradients)
        known = reduction_factors(evidence, step.step)
        for position, name in enumerate(reversed(list(step.gradients))):
            parts = run.local_gradients(step.step, name)
            right = step.gradients[name].double().reshape(-1)
            if not parts or not float(right.norm()) > floor:
                continue
            total = torch.stack(list(parts.values())).sum(0)
            factor, _ = fit_factor(total, right)
            nearest = min(known, key=lambda one: abs(one - factor))
            times = nearest if abs(nearest - factor) <= 1e-2 * nearest else 1.0
            error = relative_error(total / times, right, floor)
            allowed = evidence.tolerance.allowed(GRADIENTS, step.step, name)
            if error <= allowed or not is_right(evidence, step, name):
                detail = f"adds up to {factor:.6g} times the right one" * (error > allowed)
                yield Check(
                    step.step, name, error, allowed=allowed, detail=detail, position=position
                )


def is_right(evidence: AnyEvidence, step: ReferenceStep, name: str) -> bool:
    """Return whether the gradient that the optimizer takes is right, or was in its update."""
    wanted = evidence.wanted_gradient(step.step, name)
    error = tensor_error(evidence.run, GRADIENTS, step.step, name, wanted)
    scale = max(float(wanted.norm()), FLOOR * global_norm(step.gradients) * step.clip_scale)
    right = error <= evidence.tolerance.allowed(GRADIENTS, step.step, name) * scale
    if right or not isinstance(evidence, CapturedEvidence):
        return right
    return error_of_update(evidence, step, name) is not None


def gradients_are_right(evidence: AnyEvidence, step: int) -> bool:
    """True if a step still begins with right values, and has right gradients."""
    right = evidence.steps[step]
    return not right.skipped and all(is_right(evidence, right, name) for name in right.gradients)


def reduction_factors(evidence: CapturedEvidence, step: int) -> list[float]:
    """Return by what the sum of local gradients may be larger than the gradient."""
    degrees = [1, *(evidence.mesh.degree(axes) for axes in evidence.mesh.axis_sets())]
    calls = [1, evidence.run.num_calls(step)]
    return sorted({float(degree * call) for degree in degrees for call in calls})


def optimizer_state(evidence: CapturedEvidence) -> Iterator[Check]:
    """Compare what the optimizer keeps of each parameter, as far as it was captured."""
    for step in evidence.steps:
        captured = evidence.run.kinds(step.step)
        for key, values in step.state.items():
            if key in captured:
                held = {
                    name: value.double()
                    for name, value in values.items()
                    if evidence.run.parts(key, step.step, name)
                }
                yield from tensor_checks(evidence, key, step.step, held, detail=key)


def replicas(evidence: CapturedEvidence) -> Iterator[Check]:
    """Compare all copies of a parameter after each step with that of the first rank."""
    run = evidence.run
    for step in evidence.steps:
        for position, name in enumerate(step.after):
            whole = run.whole(PARAMETERS, step.step, name)
            scale = max(float(whole.norm()), 1e-30)
            errors = {
                piece.rank: float((piece.tensor.double() - piece.of(whole)).norm()) / scale
                for piece in run.parts(PARAMETERS, step.step, name)
            }
            worst = max(errors.values(), default=0.0)
            allowed = evidence.tolerance.allowed(PARAMETERS, step.step, name)
            odd = sorted(rank for rank, error in errors.items() if not error <= allowed)
            detail = f"ranks {odd} differ from rank {min(errors)}" if odd else ""
            yield Check(step.step, name, worst, allowed=allowed, detail=detail, position=position)


def same_bits_note(_: CapturedEvidence, checks: Sequence[Check]) -> str:
    """Return whether copies are the same bits, or for rounding alone."""
    return "same bits" if all(check.error == 0.0 for check in checks) else "but for rounding"


def sharding(evidence: CapturedEvidence) -> Iterator[Check]:
    """Compare what ranks hold of each tensor with what the program asks to share out."""
    asked, held = evidence.run.asked, evidence.run.held_copies()
    if asked is None:
        return
    shared = any(len(one.ranks) < one.num_holders for one in held.values())
    for position, (name, shape) in enumerate(evidence.run.shapes.items()):
        if math.prod(shape) == 1:
            continue
        if name in asked.held:
            kept, whole = asked.held[name]
            text = f"each rank keeps {kept} of {whole} bytes; {asked.by} asks for shards"
            yield exact_check(INITIAL, name, text * (kept >= whole), position)
        elif name in held:
            problem = "" if asked.wrapped and shared else held[name].problem(asked.by)
            yield exact_check(INITIAL, name, problem, position)
