# SPDX-License-Identifier: Apache-2.0
"""What a wrong gradient of a program looks like, the most telling explanation first.

Beside the gradient that the optimizer takes stand those that each backward of each rank made: with
them a mean of means, a rank that is left out, and ranks that read the same rows are told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from echelon.proof.causes.factors import name_partial_norm, named_on_mesh
from echelon.proof.causes.finding import ProofFinding, distinguishing_axis, with_distinguishing_axis
from echelon.proof.causes.gradients.sums import missing_sums
from echelon.proof.causes.passing.places import PassedStep
from echelon.proof.claims.checks import Check
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import fit_basis, fit_factor, relative_residual
from echelon.proof.evidence.groups import group_of
from echelon.proof.evidence.run import GRADIENTS
from echelon.proof.evidence.steps import ReferenceStep

_ALIKE = 1e-4  # relative difference of weights that are the same
_OTHER_ROWS = 0.1  # relative difference that a part of the rows makes; less is another function
_MOST_PARTS = 64  # gradients that a wrong one is taken to be a sum of


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongGradientOfSubject:
    """Hold a wrong gradient: what it must be, and what each rank has, flat, NaN elsewhere."""

    evidence: CapturedEvidence
    step: ReferenceStep
    name: str
    right: torch.Tensor
    held: Mapping[int, torch.Tensor]
    wrong: tuple[int, ...]

    @property
    def fits(self) -> float:
        """Return the residual below which an explanation fits."""
        return self.evidence.explained

    def part(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a rank has, and what it must have, of the elements that it holds."""
        mine = ~torch.isnan(self.held[rank])
        return self.held[rank][mine], self.right[mine]


def wrong_gradient(evidence: CapturedEvidence, failure: Check) -> WrongGradientOfSubject:
    """Return a wrong gradient with the ranks that have it wrong."""
    step, name = evidence.steps[failure.step], failure.subject
    right = evidence.wanted_gradient(step.step, name).reshape(-1)
    run = evidence.run
    held = {
        rank: evidence.run.vector(GRADIENTS, failure.step, name, rank)
        for rank in run.holders(GRADIENTS, failure.step, name)
    }
    allowed = evidence.tolerance.allowed(GRADIENTS, failure.step, name) * float(right.norm())
    wrong = {
        part.rank: None
        for part in run.parts(GRADIENTS, failure.step, name)
        if not float((part.tensor.double() - part.of(right)).norm()) <= allowed / 2
    }
    return WrongGradientOfSubject(
        evidence=evidence,
        step=step,
        name=name,
        right=right,
        held=held,
        wrong=tuple(sorted(wrong or held)),
    )


def explain_gradient(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
    """Return what is wrong with a gradient, and the ranks that hold it wrong."""
    gradient = wrong_gradient(evidence, failure)
    if not gradient.held:
        return ProofFinding("missing", "no optimizer took it")
    says = "another function: no factor, sum, part of the batch or slice explains it"
    finding = next(_findings(gradient), None) or ProofFinding("none", says)
    finding = replace(finding, ranks=tuple(sorted(gradient.wrong)))
    return with_distinguishing_axis(evidence.axes(), finding, gradient.wrong, gradient.held)


def _findings(gradient: WrongGradientOfSubject) -> Iterator[ProofFinding]:
    values = [gradient.part(rank)[0] for rank in gradient.wrong]
    if not all(bool(one.isfinite().all()) for one in values):
        yield ProofFinding("not finite", "not finite")
        return
    if float(gradient.right.norm()) and not any(float(one.norm()) for one in values):
        yield ProofFinding("zero", "zero", value=0.0)
    yield from _missing_sum(gradient)
    yield from _wrong_clip(gradient)
    yield from _scalar(gradient)
    yield from _of_other_steps(gradient)
    yield from _parts_weighted(gradient)
    yield from _ranks_weighted(gradient)
    yield from _misplaced(gradient)


def _missing_sum(gradient: WrongGradientOfSubject) -> Iterator[ProofFinding]:
    """Find copies whose sum is missing, or that were each clipped by a norm of its own."""
    first = gradient.wrong[0]
    held = {first: gradient.held[first], **gradient.held}
    sums = gradient.evidence.sums(gradient.name)
    yield from missing_sums(sums, held, gradient.right, gradient.fits)
    if gradient.step.clip_norm is None or not gradient.evidence.run.reads_clipped:
        return
    for axis, groups in sums:
        copies = [held[rank] for rank in group_of(groups, first) if rank in held]
        common = ~torch.stack(copies).isnan().any(0)
        if not bool(common.any()) or all(one.equal(copies[0]) for one in copies):
            continue
        weights, residual = fit_basis(gradient.right[common], [one[common] for one in copies])
        if residual < gradient.fits and min(weights) > gradient.fits:
            says = f"copies differ along {axis}, and with each clipped by a norm of its own they "
            says += f"add up to the right one: they are not reduced over {axis}"
            yield ProofFinding("missing sum", says, axis, residual=residual)


def _wrong_clip(gradient: WrongGradientOfSubject) -> Iterator[ProofFinding]:
    """Find one factor in all gradients of a rank: they are clipped by another norm."""
    evidence, step = gradient.evidence, gradient.step
    clip = step.clip_norm
    if clip is None or not evidence.run.reads_clipped:
        return
    factors = _factors_of_rank(gradient, gradient.wrong[0])
    if len(factors) < 2:
        return
    bare = [name for name, one in factors.items() if abs(one * step.clip_scale - 1) < gradient.fits]
    clipped = [one for name, one in factors.items() if name not in bare]
    if not clipped:
        yield ProofFinding("1/clip scale", "no gradient is clipped", value=1 / step.clip_scale)
        return
    if max(clipped) - min(clipped) > gradient.fits * max(clipped):
        return
    norm = clip / (clipped[0] * step.clip_scale)
    says = f"gradients of the step are clipped by a norm of {norm:.6g}"
    if bare:
        says = f"{len(bare)} of {len(factors)} gradients are not clipped, the others by a norm of "
        yield ProofFinding("partial clip", f"{says}{norm:.6g}", value=norm / step.grad_norm)
        return
    told = name_partial_norm(evidence, step, norm)
    if told is not None:
        yield replace(told, description=f"{says}: {told.description}")
    else:
        says += f" instead of {step.grad_norm:.6g}"
        yield ProofFinding("wrong norm", says, value=norm / step.grad_norm)


def _factors_of_rank(gradient: WrongGradientOfSubject, rank: int) -> dict[str, float]:
    """Return the factor of each gradient of a rank; nothing where one is no multiple."""
    evidence, step = gradient.evidence, gradient.step
    factors: dict[str, float] = {}
    for name in step.gradients:
        mine = evidence.run.vector(GRADIENTS, step.step, name, rank)
        held = ~mine.isnan()
        right = evidence.wanted_gradient(step.step, name).reshape(-1)
        if bool(held.any()) and float(right[held].norm()):
            factors[name], residual = fit_factor(mine[held], right[held])
            if residual > gradient.fits or factors[name] <= 0:
                return {}
    return factors


def _scalar(gradient: WrongGradientOfSubject) -> Iterator[ProofFinding]:
    found: dict[int, tuple[float, float]] = {}
    for rank in gradient.wrong:
        mine, right = gradient.part(rank)
        if float(right.norm()):
            found[rank] = fit_factor(mine, right)
    if not found or any(residual > gradient.fits for _, residual in found.values()):
        return
    factors = [factor for factor, _ in found.values()]
    wrong = max(factors, key=lambda factor: abs(factor - 1.0))
    if max(factors) - min(factors) <= gradient.fits * max(1.0, abs(wrong)):
        residual = max(residual for _, residual in found.values())
        name = gradient.name
        yield named_on_mesh(gradient.evidence, gradient.step, wrong, residual, parameter=name)
        return
    told = ", ".join(f"rank {rank}: {factor:.6g}" for rank, (factor, _) in found.items())
    says = f"each rank has it times a factor of its own ({told})"
    yield ProofFinding("factors of ranks", says, value=wrong)


def _of_other_steps(gradient: WrongGradientOfSubject) -> Iterator[ProofFinding]:
    """Find the gradient of the step before, alone (stale) or added (not zeroed)."""
    number = gradient.step.step
    if number == 0:
        return
    evidence = gradient.evidence
    before = evidence.steps[number - 1]
    mine, right = gradient.part(gradient.wrong[0])
    held = ~gradient.held[gradient.wrong[0]].isnan()
    earlier = before.gradients[gradient.name].double().reshape(-1)[held]
    weights, residual = fit_basis(mine, (right, earlier))
    if residual > gradient.fits or abs(weights[1]) < gradient.fits:
        return
    if abs(weights[0]) < gradient.fits:
        yield ProofFinding("stale", "the gradient of the step before", value=weights[1])
    else:
        says = f"{weights[0]:.4g} times the right one and {weights[1]:.4g} times that of the step "
        says += "before: gradients are not zeroed, or averaged over steps"
        yield ProofFinding("accumulated", says, value=weights[1])


def _parts_weighted(gradient: WrongGradientOfSubject) -> Iterator[ProofFinding]:
    """Find the weights of the parts of the batch, where the file gives them."""
    step = gradient.step
    if not step.parts:
        return
    scale = step.clip_scale if gradient.evidence.run.reads_clipped else 1.0
    total = sum(tokens for tokens, _ in step.parts)
    rank = gradient.wrong[0]
    held = ~gradient.held[rank].isnan()
    basis = [
        part[gradient.name].double().reshape(-1)[held] * scale / total for _, part in step.parts
    ]
    weights, residual = fit_basis(gradient.held[rank][held], basis)
    if residual > gradient.fits:
        return
    means = [total / (len(step.parts) * tokens) for tokens, _ in step.parts]
    told = ", ".join(f"{weight:.4g}" for weight in weights)
    if len({tokens for tokens, _ in step.parts}) > 1 and _alike(weights, means, gradient.fits):
        says = f"a mean of means: parts of {[tokens for tokens, _ in step.parts]} tokens count "
        says += f"alike, with weights {told} instead of 1"
        yield ProofFinding("mean of means", says, residual=residual)
        return
    lost = [number for number, weight in enumerate(weights) if abs(weight) < gradient.fits]
    if lost:
        says = f"parts {lost} of the batch are missing (weights {told} instead of 1)"
        yield ProofFinding("parts missing", says, residual=residual)
        return
    says = f"parts of the batch have weights {told} instead of 1"
    yield ProofFinding("parts weighted", says, residual=residual)


def _alike(weights: list[float], wanted: list[float], fits: float) -> bool:
    """Return whether weights are the wanted ones but for one factor."""
    ratios = [weight / one for weight, one in zip(weights, wanted, strict=True)]
    return max(ratios) - min(ratios) < 10 * fits * max(map(abs, ratios))


def _ranks_weighted(gradient: WrongGradientOfSubject) -> Iterator[ProofFinding]:
    """Find what weights the gradients of ranks and of their backwards must have, and what not."""
    evidence, step = gradient.evidence, gradient.step
    local = evidence.run.local_gradients(step.step, gradient.name)
    if not 1 < len(local) <= _MOST_PARTS:
        return
    yield from _same_rows(gradient, local)
    slots, basis = list(local), list(local.values())
    scale = step.clip_scale if evidence.run.reads_clipped else 1.0
    whole = evidence.run.whole(GRADIENTS, step.step, gradient.name).reshape(-1)
    seen, residual = fit_basis(whole / scale, basis)
    wanted, unexplained = fit_basis(gradient.right / scale, basis)
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
    says = f"the gradients of ranks have weights other than 1 ({told})"
    yield ProofFinding("ranks weighted", says, axis, residual=residual)


def _same_rows(
    gradient: WrongGradientOfSubject, local: Mapping[tuple[int, int], torch.Tensor]
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


def _misplaced(gradient: WrongGradientOfSubject) -> Iterator[ProofFinding]:
    """Find the right values in another place: of other ranks, in another order, of another name."""
    evidence, rank = gradient.evidence, gradient.wrong[0]
    mine, right = gradient.part(rank)
    for other in gradient.held:
        held = ~gradient.held[other].isnan()
        theirs = gradient.right[held]
        if other != rank and theirs.shape == mine.shape and not torch.equal(theirs, right):
            factor, residual = fit_factor(mine, theirs)
            if residual < gradient.fits:
                says = f"rank {rank} has the slice of rank {other}: slices are permuted"
                says += "" if abs(factor - 1) < gradient.fits else f" (times {factor:.4g})"
                yield ProofFinding("shards permuted", says)
    ordered = relative_residual(mine.sort().values, right.sort().values)
    if ordered < gradient.fits:
        yield ProofFinding("permuted", "the right values in another order")
    shape = evidence.run.shapes[gradient.name]
    for name, value in gradient.step.gradients.items():
        if name != gradient.name and evidence.run.shapes[name] == shape:
            held = ~gradient.held[rank].isnan()
            factor, residual = fit_factor(mine, value.double().reshape(-1)[held])
            if residual < gradient.fits:
                says = f"it is the gradient of {name}: parameters are swapped"
                yield ProofFinding("swapped", says)
