# SPDX-License-Identifier: Apache-2.0
"""A wrong gradient of a program compared with the gradients that each backward of each rank made.

They tell a mean of means, a rank that is left out, and ranks that read the same rows apart. Terms
of a loss that is a sum have weights of their own: a balance loss may be added up over ranks where
the cross-entropy is averaged. Weights must explain all gradients of a rank, and its clip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from echelon.proof.causes.factors import count_alike, named_factor
from echelon.proof.causes.finding import ProofFinding, distinguishing_axis
from echelon.proof.causes.gradients.microbatch_weights import WrongGradient
from echelon.proof.causes.passing.places import PassedStep
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import fit_basis, fit_factor, relative_residual
from echelon.proof.evidence.run import GRADIENTS

_ALIKE = 1e-4  # relative difference of weights that are the same
_OTHER_ROWS = 0.1  # relative difference that a part of the rows makes; less is another function
_MOST_PARTS = 64  # gradients that a wrong one is taken to be a sum of
_Slot = tuple[int, int]  # a rank, and which of its backwards


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongGradientOfProgram(WrongGradient):
    """Hold one wrong gradient of a captured program."""

    evidence: CapturedEvidence

    @property
    def scale(self) -> float:
        """The clip scale, if the gradients were read after clipping."""
        return self.step.clip_scale if self.evidence.run.reads_clipped else 1.0


def gradients_of_program(gradient: WrongGradientOfProgram) -> Iterator[ProofFinding]:
    """Find other steps, parts of the batch, ranks or places in a wrong gradient."""
    yield from _of_other_steps(gradient)
    yield from _rounded_sum(gradient)
    yield from _terms_weighted(gradient)
    yield from _parts_weighted(gradient)
    yield from _ranks_weighted(gradient)
    yield from _misplaced(gradient)


def _of_other_steps(gradient: WrongGradientOfProgram) -> Iterator[ProofFinding]:
    """Find the gradient of the step before, alone (stale) or added (not zeroed)."""
    number, part = gradient.step.step, gradient.wrong[0]
    if number == 0:
        return
    before = gradient.evidence.steps[number - 1].gradients[gradient.name].double()
    weights, residual = fit_basis(part.tensor, (part.of(gradient.right), part.of(before)))
    if residual > gradient.fits or abs(weights[1]) < gradient.fits:
        return
    if abs(weights[0]) < gradient.fits:
        yield ProofFinding("stale", "the gradient of the step before", value=weights[1])
    else:
        says = f"{weights[0]:.4g} times the right one and {weights[1]:.4g} times that of the step "
        says += "before: gradients are not zeroed, or averaged over steps"
        yield ProofFinding("accumulated", says, value=weights[1])


_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_LEAST_SHARE = 1 / 16  # root mean square of rounding errors, in unit roundoffs; 0.58 for one


def _rounded_sum(gradient: WrongGradientOfProgram) -> Iterator[ProofFinding]:
    """Find a dtype whose rounding all wrong gradients of the step are off by, element by element.

    The error of an element goes as the sum of the ranks' absolute values. That of another function
    does not.
    """
    evidence, step = gradient.evidence, gradient.step
    for dtype in _NARROW:
        if torch.finfo(dtype).eps <= torch.finfo(evidence.dtype).eps:
            continue
        shares = [_share_of_rounding(gradient, name, dtype) for name in step.gradients]
        off = [share for share in shares if share is not None]
        if off and max(most for most, _ in off) <= 1 and max(mean for _, mean in off) > 1:
            axis = " and ".join(evidence.run.split_axes(gradient.name)[1])
            name = str(dtype).removeprefix("torch.")
            says = f"the right one but for rounding to {name}, element by element: it is summed"
            over = f" over {axis}" if axis else ""
            yield ProofFinding("rounded sum", f"{says}{over} in {name}, or sent in it", axis)
            return


def _share_of_rounding(
    gradient: WrongGradientOfProgram, name: str, dtype: torch.dtype
) -> tuple[float, float] | None:
    """Return the largest error over the most that rounding makes, and the mean over the least."""
    evidence, number = gradient.evidence, gradient.step.step
    run = evidence.run
    right = evidence.wanted_gradient(number, name).reshape(-1)
    local = run.local_gradients(number, name)
    parts = list(local.values()) or [right]
    total = torch.stack(parts).sum(0)
    size = torch.stack(parts).abs().sum(0)
    size = size * abs(fit_factor(right, total)[0]) if local else size
    seen, info = run.whole(GRADIENTS, number, name).reshape(-1), torch.finfo(dtype)
    known = size > 4 * info.smallest_normal
    if not bool(known.any()) or not bool(seen.isfinite().all()):
        return None
    unit, count = info.eps / 2, len(parts) + evidence.mesh.world_size
    off = (seen - right)[known].abs() / size[known] / unit
    return float(off.max()) / count, float(off.square().mean().sqrt()) / _LEAST_SHARE


def _terms_weighted(gradient: WrongGradientOfProgram) -> Iterator[ProofFinding]:
    """Find the weights of the terms of the loss that explain all gradients of a rank at once."""
    evidence, step, rank = gradient.evidence, gradient.step, gradient.wrong[0].rank
    held = {name: evidence.run.vector(GRADIENTS, step.step, name, rank) for name in step.gradients}
    there = {name: ~value.isnan() for name, value in held.items()}
    seen = torch.cat([value[there[name]] for name, value in held.items()])
    terms = [
        torch.cat([term[name].double().reshape(-1)[there[name]] for name in held])
        for term in step.terms
    ]
    if len(terms) < 2 or min(float(one.norm()) for one in terms) == 0:
        return
    weights, residual = fit_basis(seen, terms)
    scale = _common_scale(gradient, weights)
    if residual > gradient.fits or scale is None:
        return
    odd = {k: w / scale for k, w in enumerate(weights) if abs(w / scale - 1) > _ALIKE}
    if not odd:
        return
    if len(odd) != 1:
        told = ", ".join(f"{w / scale:.4g}" for w in weights)
        says = f"the terms of the loss have weights {told} instead of 1"
        yield ProofFinding("terms weighted", says, residual=residual)
        return
    ((number, weight),) = odd.items()
    named = named_factor(evidence, step, weight, residual)
    reached = [name for name, one in step.terms[number].items() if bool(one.any())]
    whose = f"term {number + 1} of {len(terms)} of the loss, which reaches {len(reached)} of "
    whose += f"{len(held)} parameters ({reached[-1]} last)"
    if abs(weight) < gradient.fits:
        yield ProofFinding("term missing", f"{whose}, is not in it; the others are", value=0.0)
        return
    kind = "term weighted"
    if named.axis:
        kind = "term summed" if weight > 1 else "term divided"
    says = f"{whose}, is {named.description.replace('the right value', 'itself')}; the others are "
    says += f"right: it is {'added up' if weight > 1 else 'divided'} over {named.axis}"
    yield ProofFinding(kind, says, named.axis, value=weight, residual=residual)


def _common_scale(gradient: WrongGradientOfProgram, weights: list[float]) -> float | None:
    """Return the weight of the right terms: 1, or what clipping the sum of all makes of it."""
    step = gradient.step
    if step.clip_norm is None or not gradient.evidence.run.reads_clipped:
        return 1.0 if any(abs(one - 1) <= _ALIKE for one in weights) else None
    seen = gradient.evidence.run
    norm = sum(float(seen.whole(GRADIENTS, step.step, n).square().sum()) for n in step.gradients)
    for weight in weights:
        if weight > 0:
            clipped = min(1.0, step.clip_norm / (norm**0.5 / weight + 1e-6))
            if abs(weight - clipped) <= _ALIKE * clipped:
                return weight
    return None


def _parts_weighted(gradient: WrongGradientOfProgram) -> Iterator[ProofFinding]:
    """Find the weights of the parts of the batch, where the file gives them."""
    parts, part = gradient.step.parts, gradient.wrong[0]
    if not parts:
        return
    tokens = [count for count, _ in parts]
    share = gradient.scale / sum(tokens)
    basis = [part.of(one[gradient.name].double()) * share for _, one in parts]
    weights, residual = fit_basis(part.tensor, basis)
    if residual > gradient.fits:
        return
    told = ", ".join(f"{weight:.4g}" for weight in weights)
    lost = [number for number, weight in enumerate(weights) if abs(weight) < gradient.fits]
    if len(set(tokens)) > 1 and count_alike(weights, tokens, 10 * gradient.fits):
        says = f"a mean of means: parts of {tokens} tokens count alike, with weights {told} "
        yield ProofFinding("mean of means", says + "instead of 1", residual=residual)
    elif lost:
        says = f"parts {lost} of the batch are missing (weights {told} instead of 1)"
        yield ProofFinding("parts missing", says, residual=residual)
    else:
        says = f"parts of the batch have weights {told} instead of 1"
        yield ProofFinding("parts weighted", says, residual=residual)


def _ranks_weighted(gradient: WrongGradientOfProgram) -> Iterator[ProofFinding]:
    """Find what weights the gradients of ranks and of their backwards must have, and what not."""
    evidence, step = gradient.evidence, gradient.step
    local = evidence.run.local_gradients(step.step, gradient.name)
    if not 1 < len(local) <= _MOST_PARTS:
        return
    yield from _same_rows(gradient, local)
    slots, basis = list(local), list(local.values())
    whole = evidence.run.whole(GRADIENTS, step.step, gradient.name)
    seen, residual = fit_basis(whole / gradient.scale, basis)
    wanted, unexplained = fit_basis(gradient.right / gradient.scale, basis)
    if max(residual, unexplained) > gradient.fits:
        return
    left_out = [
        slot for slot, w, v in zip(slots, seen, wanted, strict=True) if abs(w) < _ALIKE < abs(v)
    ]
    told = distinguishing_axis(
        evidence.axes(), {rank for rank, _ in left_out}, {rank for rank, _ in slots}
    )
    axis = told[0] if told else ""
    if left_out:
        told = ", ".join(f"rank {rank} backward {call}" for rank, call in left_out)
        says = f"the gradients of {told} are left out of the sum"
        yield ProofFinding("missing part", says, axis, residual=residual)
        return
    factor = fmean(seen) / fmean(wanted) if fmean(wanted) else 1.0
    off = (abs(factor * v - w) for v, w in zip(wanted, seen, strict=True))
    if max(off) < _ALIKE * max(map(abs, seen)):
        return  # one factor, which is another cause
    alike = max(seen) - min(seen) < _ALIKE * max(map(abs, seen))
    if alike and min(wanted) > 0:
        by_rank = {rank: v for (rank, _), v in zip(slots, wanted, strict=True)}
        axis = " and ".join(a for a in evidence.mesh.axes if _differs(evidence, by_rank, a))
        told = ", ".join(f"{v / w:.4g}" for v, w in zip(wanted, seen, strict=True))
        says = "a mean of means: the gradients of ranks (and of their microbatches) count alike; "
        says += f"by their tokens they have weights {told} times these"
        yield ProofFinding("mean of means", says, axis, residual=residual)
        return
    ratios = {slot: w / v for slot, w, v in zip(slots, seen, wanted, strict=True) if v}
    of_ranks = {rank: ratio for (rank, _), ratio in ratios.items()}
    axis = " and ".join(a for a in evidence.mesh.axes if _differs(evidence, of_ranks, a))
    told = ", ".join(f"rank {r} backward {call}: {one:.4g}" for (r, call), one in ratios.items())
    if (pattern := _pattern_of_weights(gradient, ratios, axis)) is not None:
        yield replace(pattern, description=f"{pattern.description} ({told})", residual=residual)
        return
    says = f"the gradients of ranks have weights other than 1 ({told})"
    yield ProofFinding("ranks weighted", says, axis, residual=residual)


def _pattern_of_weights(
    gradient: WrongGradientOfProgram, weights: Mapping[_Slot, float], axis: str
) -> ProofFinding | None:
    """Name a mistake by the weights that it gives to ranks and their backwards; None: no such."""
    clip, mesh = gradient.step.clip_norm, gradient.evidence.mesh
    norms = _norms_of_ranks(gradient)
    for mean in (1.0, *(1.0 / mesh.degrees[a] for a in mesh.axes)):
        if clip is None:
            break
        alone = {
            slot: mean * min(1.0, clip / (norms[slot[0]] + BESIDE_THE_NORM)) for slot in weights
        }
        seen = {slot: weight * gradient.scale for slot, weight in weights.items()}
        if all(math.isclose(seen[slot], alone[slot], rel_tol=_ALIKE) for slot in seen):
            says = "each rank clips its own gradient before the sum, by its own norm ("
            says += ", ".join(f"rank {rank}: {norm:.6g}" for rank, norm in norms.items()) + ")"
            return ProofFinding("clipped before the sum", f"{says}: weights", axis)
    ratios = [w / weights[r, k + 1] for (r, k), w in weights.items() if weights.get((r, k + 1))]
    for summed in mesh.axes:
        degree = mesh.degrees[summed]
        if degree > 1 and ratios and all(math.isclose(x, degree, rel_tol=_ALIKE) for x in ratios):
            says = f"each backward counts {degree} times the next: what has accumulated is summed "
            return ProofFinding("summed again", f"{says}over {summed} again with each", summed)
    return None


BESIDE_THE_NORM = 1e-6
"""What torch adds to a norm that it divides by."""
_LEAST_ALIKE = 2  # gradients of a rank with one factor: its clip


def behind_the_clip(evidence: CapturedEvidence, step: int) -> tuple[CapturedEvidence, str] | None:
    """Return the evidence without the factor that clipping gives to all, and the first wrong name.

    A gradient that is wrong changes the norm, and so the factor of those that are right. None where
    no gradient is another than that factor makes it: then the norm itself is wrong.
    """
    reference, run = evidence.steps[step], evidence.run
    if reference.clip_norm is None or not run.reads_clipped or run.clip_undone:
        return None
    fits: dict[int, dict[str, float | None]] = {}
    for name in reference.gradients:
        right = evidence.wanted_gradient(step, name).reshape(-1)
        for rank, value in run.vectors(GRADIENTS, step, name).items():
            held = ~value.isnan()
            if float(right[held].norm()):
                factor, residual = fit_factor(value[held], right[held])
                known = factor if residual <= evidence.explained else None
                fits.setdefault(rank, {})[name] = known
    of_norm = _by_the_norm(evidence, step)
    common = {rank: _usual(own) if of_norm is None else of_norm for rank, own in fits.items()}
    usual = {rank: factor for rank, factor in common.items() if factor is not None}
    if not usual or all(math.isclose(x, 1.0, rel_tol=_ALIKE) for x in usual.values()):
        return None
    odd = {
        name: factor
        for rank, own in fits.items()
        for name, factor in own.items()
        if factor is None or not math.isclose(factor, usual.get(rank, factor), rel_tol=_ALIKE)
    }
    multiples = [factor for factor in odd.values() if factor is not None]
    bare = 1 / reference.clip_scale
    # Some are not clipped at all: that is a cause of its own.
    if not odd or any(math.isclose(x, bare, rel_tol=_ALIKE) for x in (*multiples, *usual.values())):
        return None
    first = next(iter(usual.values()))
    undone = {capture.rank: 1 / usual.get(capture.rank, first) for capture in run.captures}
    evidence = replace(evidence, run=run.with_scaled_gradients(step, undone))
    return evidence, next(name for name in reversed(list(reference.gradients)) if name in odd)


def _by_the_norm(evidence: CapturedEvidence, step: int) -> float | None:
    """Return the factor that the norm of the program gives to all; None where it is none of theirs.

    Gradients that are clipped by their own norm have the norm to clip to.
    """
    run, reference = evidence.run, evidence.steps[step]
    norms = [one.grad_norm for one in run.reports(step) if one.grad_norm is not None]
    clip, told = reference.clip_norm, max(norms, default=0.0)
    wholes = [run.whole(GRADIENTS, step, name) for name in reference.gradients]
    total = float(torch.stack([whole.norm() for whole in wholes]).norm())
    if clip is None or told <= clip or not math.isclose(min(norms), told, rel_tol=_ALIKE):
        return None
    if not math.isclose(total, clip, rel_tol=_ALIKE):
        return None
    return clip / (told + BESIDE_THE_NORM) / reference.clip_scale


SAME_NORM = 1e-4
"""Relative difference of norms that the constant beside the norm makes, where gradients clip."""


def all_multiplied(gradient: WrongGradient, clipped: float) -> Iterator[ProofFinding]:
    """Find the factor of all gradients before clipping, which forgives it but for its constant."""
    step, beside = gradient.step, BESIDE_THE_NORM
    left = step.grad_norm + beside - clipped * step.grad_norm
    if gradient.evidence.tolerance.own_precision or left <= 0:
        return
    factor = clipped * beside / left
    named = named_factor(gradient.evidence, step, factor, SAME_NORM)
    says = f"all gradients are {factor:.4g} times the right ones before they are clipped"
    yield replace(named, description=f"{says} ({named.factor})")


def _usual(factors: Mapping[str, float | None]) -> float | None:
    """Return the factor that most gradients of a rank have; None where too few have it."""
    known = [factor for factor in factors.values() if factor is not None and factor > 0]
    alike = {x: sum(math.isclose(x, y, rel_tol=_ALIKE) for y in known) for x in known}
    most = max(alike, key=lambda x: alike[x], default=None)
    return most if most is not None and alike[most] >= _LEAST_ALIKE else None


def _norms_of_ranks(gradient: WrongGradientOfProgram) -> dict[int, float]:
    """Return the norm of all gradients that each rank made itself, by rank."""
    run, number, squares = gradient.evidence.run, gradient.step.step, dict[int, float]()
    for name in gradient.step.gradients:
        own: dict[int, torch.Tensor] = {}
        for (rank, _), value in run.local_gradients(number, name).items():
            own[rank] = own[rank] + value if rank in own else value
        for rank, value in own.items():
            squares[rank] = squares.get(rank, 0.0) + float(value.square().sum())
    return {rank: square**0.5 for rank, square in squares.items()}


def _same_rows(
    gradient: WrongGradientOfProgram, local: Mapping[tuple[int, int], torch.Tensor]
) -> Iterator[ProofFinding]:
    mesh = gradient.evidence.mesh
    by_rank: dict[int, torch.Tensor] = {}
    for (rank, _), value in local.items():
        by_rank[rank] = by_rank.get(rank, torch.zeros_like(value)) + value
    first = min(by_rank)
    _, residual = fit_factor(by_rank[first], gradient.right)
    for axis in mesh.axes:
        others = [by_rank[r] for r in mesh.group(first, (axis,)) if r in by_rank and r != first]
        same = [relative_residual(by_rank[first], other) < gradient.fits for other in others]
        alike = others and all(same) and float(by_rank[first].norm()) and residual > _OTHER_ROWS
        # Tensor ranks make the same gradients of what they hold copies of.
        if alike and not PassedStep(gradient.evidence, gradient.step.step).covers_batch():
            says = f"all ranks along {axis} made the same gradient: they read the same rows"
            yield ProofFinding("same data", says, axis)


def _differs(evidence: CapturedEvidence, values: Mapping[int, float], axis: str) -> bool:
    """Return whether values differ between ranks that differ in one axis only."""
    for rank, value in values.items():
        for other in evidence.mesh.group(rank, (axis,)):
            if other in values and abs(values[other] - value) > _ALIKE * abs(value):
                return True
    return False


def _misplaced(gradient: WrongGradientOfProgram) -> Iterator[ProofFinding]:
    """Find the right values in another place: of other ranks, in another order, of another name."""
    run, part, step = gradient.evidence.run, gradient.wrong[0], gradient.step
    mine, right = part.tensor.double(), part.of(gradient.right)
    for other in run.parts(GRADIENTS, step.step, gradient.name):
        theirs = other.of(gradient.right)
        if theirs.shape == mine.shape and not torch.equal(theirs, right):
            factor, residual = fit_factor(mine, theirs)
            if residual < gradient.fits:
                says = f"rank {part.rank} has the slice of rank {other.rank}: slices are permuted"
                says += "" if abs(factor - 1) < gradient.fits else f" (times {factor:.4g})"
                yield ProofFinding("shards permuted", says, residual=residual)
    residual = relative_residual(mine.sort().values, right.sort().values)
    if residual < gradient.fits:
        yield ProofFinding("permuted", "the right values in another order", residual=residual)
    for name, value in step.gradients.items():
        alike = name != gradient.name and run.shapes[name] == run.shapes[gradient.name]
        if alike and (residual := fit_factor(mine, part.of(value))[1]) < gradient.fits:
            says = f"it is the gradient of {name}: parameters are swapped"
            yield ProofFinding("swapped", says, residual=residual)


def excluded_weights(gradient: WrongGradientOfProgram) -> Mapping[str, float]:
    """The shares that weights of ranks, terms and parts of the batch leave unexplained."""
    evidence, step, part = gradient.evidence, gradient.step, gradient.wrong[0]
    seen, left = part.tensor.double(), dict[str, float]()
    local = evidence.run.local_gradients(step.step, gradient.name)
    if 1 < len(local) <= _MOST_PARTS:
        basis = list(local.values())
        left["weights of ranks and their backwards"] = fit_basis(gradient.right, basis)[1]
    if step.terms:
        terms = [part.of(term[gradient.name].double()) for term in step.terms]
        left["weights of the terms of the loss"] = fit_basis(seen, terms)[1]
    if step.parts:
        parts = [part.of(one[gradient.name].double()) for _, one in step.parts]
        left["weights of parts of the batch"] = fit_basis(seen, parts)[1]
    return left
