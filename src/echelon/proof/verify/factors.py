# SPDX-License-Identifier: Apache-2.0
"""Wrong factors and norms that have a name on the user's mesh; the axis that wrong ranks show."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch

from echelon.proof.causes.factors import Factor, name_factor
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.ranks import INITIAL
from echelon.proof.verify.capture import PARAMETERS
from echelon.proof.verify.claims import SubjectEvidence
from echelon.proof.verify.named_mesh import NamedMesh
from echelon.proof.verify.reference import ReferenceStep


def subject_factors(
    evidence: SubjectEvidence, step: ReferenceStep, axes_of: Collection[str]
) -> list[Factor]:
    """Return the factors that parallel training is known to get wrong, over sets of these axes."""
    found = [Factor("zero", 0.0), Factor("sign", -1.0)]
    for axes in evidence.mesh.axis_sets():
        if not set(axes) <= set(axes_of):
            continue
        degree, name, axis = evidence.mesh.degree(axes), " x ".join(axes), " and ".join(axes)
        inverse = f"1/({name})" if len(axes) > 1 else f"1/{name}"
        found += [Factor(name, degree, axis), Factor(inverse, 1 / degree, axis)]
        found.append(Factor(f"sqrt({name})", degree**0.5, axis))
    calls = evidence.run.num_calls(step.step)
    counts = {"microbatches": calls, "parts of the batch": len(step.parts) or 1}
    for name, value in {**counts, "clip scale": step.clip_scale, "2": 2.0}.items():
        if value != 1.0:
            found += [Factor(name, value), Factor(f"1/{name}", 1 / value)]
    return found


def named(
    evidence: SubjectEvidence,
    step: ReferenceStep,
    value: float,
    residual: float = 0.0,
    *,
    parameter: str = "",
) -> ProofFinding:
    """Return the finding that a thing is `value` times what it should be.

    Of a `parameter`, axes along which one place alone holds it are named last: nothing is summed
    over them.
    """
    every = evidence.mesh.axes
    held = [axis for axis in every if _is_held_along(evidence, parameter, axis)]
    told = ProofFinding("number", "")
    for axes in (held, every):
        known = subject_factors(evidence, step, axes)
        # Where all is rough, a factor is what it is near to.
        near = [one.value for one in known if abs(one.value - value) <= evidence.explained]
        told = name_factor(near[0] if near else value, known, residual)
        if told.factor not in ("number", "2", "1/2"):
            break
    return told


def _is_held_along(evidence: SubjectEvidence, name: str, axis: str) -> bool:
    """Return whether several places of an axis hold a parameter, or part of it."""
    holders = evidence.run.holders(PARAMETERS, INITIAL, name)
    return not name or len({evidence.mesh.coordinates(rank)[axis] for rank in holders}) > 1


def telling_axis(mesh: NamedMesh, wrong: Collection[int], right: Iterable[int]) -> str:
    """Return an axis along which wrong and right ranks have no place in common, or nothing."""
    right = set(right) - set(wrong)
    if wrong and right:
        for axis in mesh.axes:
            places = [{mesh.coordinates(r)[axis] for r in ranks} for ranks in (wrong, right)]
            if not places[0] & places[1]:
                return axis
    return ""


def with_telling_axis(
    mesh: NamedMesh, finding: ProofFinding, wrong: Collection[int], right: Iterable[int]
) -> ProofFinding:
    """Return the finding with its ranks, and the axis that tells them from the right ones."""
    axis = telling_axis(mesh, wrong, right)
    says = finding.description
    if axis:
        places = sorted({mesh.coordinates(rank)[axis] for rank in wrong})
        says = f"only on {axis} {places}: {says}"
    return replace(finding, description=says, axis=finding.axis or axis, ranks=tuple(sorted(wrong)))


def split_axes(evidence: SubjectEvidence, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes along which ranks hold different elements of a parameter, and the same."""
    mesh, run = evidence.mesh, evidence.run
    held = _held(evidence, name)
    cut, same = [], []
    for axis in mesh.axes:
        groups = [mesh.group(rank, (axis,)) for rank in run.holders(PARAMETERS, INITIAL, name)]
        differ = any(held.get(rank) != held.get(group[0]) for group in groups for rank in group)
        (cut if differ else same).append(axis)
    return tuple(cut), tuple(same)


def place_of_parameter(evidence: SubjectEvidence, name: str) -> str:
    """Return how a parameter lies on the ranks, as text; nothing for what is none."""
    if name not in evidence.reference.logical.shapes:
        return ""
    cut, same = split_axes(evidence, name)
    holders = evidence.run.holders(PARAMETERS, INITIAL, name)
    if not holders:
        return ""
    texts = [f"split over {' and '.join(cut)}"] if cut else []
    texts += [f"copies over {' and '.join(same)}"] if same else []
    if len(holders) < evidence.mesh.world_size:
        texts.append(f"ranks {holders}")
    return ", ".join(texts)


def _held(evidence: SubjectEvidence, name: str) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for rank, piece in evidence.run.pieces(PARAMETERS, INITIAL, name):
        found[rank] = (*found.get(rank, ()), *piece.index.tolist())
    return found


def partial_norms(evidence: SubjectEvidence, step: ReferenceStep) -> Iterator[Factor]:
    """Yield the norms that a program may take for that of the whole gradient, by what they are of.

    The sum of squares of what each rank holds, summed over the ranks of some axes: too few axes
    leave parts out, axes of copies count them several times.
    """
    mesh, squares = evidence.mesh, _squares_of_ranks(evidence, step)
    for rank in range(mesh.world_size):
        label = mesh.label(rank) or "rank 0"
        left = " and ".join(mesh.axes)
        yield Factor(f"of what {label} holds alone", math.sqrt(squares[rank]), left)
    for axes in mesh.axis_sets():
        over = " and ".join(axes)
        left = " and ".join(axis for axis in mesh.axes if axis not in axes) or over
        for group in sorted({mesh.group(rank, axes) for rank in range(mesh.world_size)}):
            norm = math.sqrt(sum(squares[rank] for rank in group))
            yield Factor(f"of all that ranks hold, summed over {over}, copies too", norm, left)
    for axis in mesh.axes:
        yield Factor(
            f"with copies over {axis} counted once per rank", _copied(evidence, step, axis), axis
        )


def _squares_of_ranks(evidence: SubjectEvidence, step: ReferenceStep) -> list[float]:
    squares = [0.0] * evidence.mesh.world_size
    for name, gradient in step.gradients.items():
        flat = gradient.double().reshape(-1).square()
        for rank, piece in evidence.run.pieces(PARAMETERS, INITIAL, name):
            squares[rank] += float(flat[piece.index].sum())
    return squares


def _copied(evidence: SubjectEvidence, step: ReferenceStep, axis: str) -> float:
    """Return the norm in which copies over an axis count as often as they are held."""
    square = 0.0
    for name, gradient in step.gradients.items():
        copies = evidence.mesh.degrees[axis] if axis in split_axes(evidence, name)[1] else 1
        square += copies * float(gradient.double().square().sum())
    return math.sqrt(square)


def name_partial_norm(
    evidence: SubjectEvidence, step: ReferenceStep, norm: float
) -> ProofFinding | None:
    """Return which part of the gradient a norm is of; None where it is of no part."""
    for part in partial_norms(evidence, step):
        wrong = abs(part.value - step.grad_norm) > 1e-6 * step.grad_norm
        if wrong and abs(norm - part.value) <= max(1e-5, evidence.explained) * part.value:
            says = (
                f"{norm:.6g} is the norm {part.name}; the whole gradient has {step.grad_norm:.6g}"
            )
            return ProofFinding("partial norm", says, part.axis, value=norm / step.grad_norm)
    return None


def vector_of(
    evidence: SubjectEvidence, kind: str, step: int, name: str, rank: int
) -> torch.Tensor:
    """Return what a rank holds of a tensor, flat and whole, NaN elsewhere."""
    size = math.prod(evidence.reference.logical.shapes[name])
    found = torch.full((size,), torch.nan, dtype=torch.float64)
    for holder, piece in evidence.run.pieces(kind, step, name):
        if holder == rank:
            found[piece.index] = piece.values.double()
    return found
