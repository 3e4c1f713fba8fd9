# SPDX-License-Identifier: Apache-2.0
"""Wrong factors that have a name: a degree of the mesh, a count, a ratio of tokens, a sign."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from echelon.core.plan import Plan
from echelon.layout.buckets import data_degree
from echelon.proof.causes.context_parts import tokens_by_context_rank
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import nearly_equal
from echelon.proof.evidence.run import INITIAL, PARAMETERS
from echelon.proof.evidence.steps import ReferenceStep
from echelon.proof.oracle.oracle import OracleStep


@dataclass(frozen=True, slots=True)
class Factor:
    """Name a factor, its value in this plan, and the axis that it points to."""

    name: str
    value: float
    axis: str = ""


def known_factors(plan: Plan, oracle: OracleStep, *, expert: bool = False) -> tuple[Factor, ...]:
    """Return the factors that parallel training is known to get wrong, most telling first.

    Those of routed experts are summed over ranks of their own.
    """
    mesh = plan.mesh
    own = {"edp": data_degree(plan, expert=True), "ep": mesh.ep} if expert else {}
    counts = {
        **own,
        "dp": mesh.dp,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "cp": mesh.cp,
        "microbatches": plan.num_microbatches,
    }
    found = [Factor("zero", 0.0), Factor("sign", -1.0)]
    degrees = {axis: degree for axis, degree in counts.items() if degree > 1}
    for axis, degree in degrees.items():
        found += [Factor(axis, degree, axis), Factor(f"1/{axis}", 1 / degree, axis)]
    for name, value in {"tokens": oracle.tokens, "clip scale": oracle.clip_scale, "2": 2.0}.items():
        found += [Factor(name, value), Factor(f"1/{name}", 1 / value)]
    # Of four ranks or microbatches the root is 2: what is twice as large is told so.
    found += [Factor(f"sqrt({axis})", degree**0.5, axis) for axis, degree in degrees.items()]
    if mesh.dp > 1:
        for dp_rank, tokens in enumerate(tokens_of_replicas(oracle)):
            found += _token_ratios(f"dp {dp_rank}", "dp", mesh.dp, tokens / oracle.tokens)
    if mesh.cp > 1:
        for (dp_rank, cp_rank), tokens in tokens_by_context_rank(plan, oracle.step).items():
            whose = f"cp {cp_rank}" if mesh.dp == 1 else f"dp {dp_rank} cp {cp_rank}"
            axis = "cp" if mesh.dp == 1 else "dp and cp"
            found += _token_ratios(whose, axis, mesh.dp * mesh.cp, tokens / oracle.tokens)
    return tuple(found)


def _token_ratios(whose: str, axis: str, degree: int, share: float) -> list[Factor]:
    """Return the ways in which the share of a rank in the tokens gets into a factor."""
    of = f"token ratio of {whose}"
    if not share:
        return [Factor(of, 0.0, axis)]
    return [
        Factor(of, share, axis),
        Factor(f"1/{of}", 1 / share, axis),
        Factor(f"1/({axis.replace(' and ', ' x ')} x {of})", 1 / (degree * share), axis),
    ]


def tokens_of_replicas(oracle: OracleStep) -> list[int]:
    """Return the valid tokens of each data-parallel rank."""
    totals: dict[int, int] = {}
    for (dp_rank, _), (_, count) in oracle.microbatch_losses.items():
        totals[dp_rank] = totals.get(dp_rank, 0) + count
    return [totals[dp_rank] for dp_rank in sorted(totals)]


def name_factor(value: float, known: Sequence[Factor], residual: float = 0.0) -> ProofFinding:
    """Return the finding that a thing is `value` times what it should be.

    Where several axes have that degree, all are named: the number alone cannot tell them apart.
    """
    same = [factor for factor in known if nearly_equal(factor.value, value)]
    if not same:
        return ProofFinding(
            "number", f"{value:.6g} times the right value", value=value, residual=residual
        )
    axes = [factor.axis for factor in same if factor.axis]
    names = " = ".join(dict.fromkeys(factor.name for factor in same))
    says = {"zero": "zero", "sign": "the right value with its sign turned"}.get(
        same[0].name, f"{value:.6g} times the right value ({names})"
    )
    return ProofFinding(
        same[0].name, says, " or ".join(dict.fromkeys(axes)), value=value, residual=residual
    )


def named_factor(
    plan: Plan, oracle: OracleStep, value: float, residual: float = 0.0, *, of_norm: bool = False
) -> ProofFinding:
    """Return the finding that a thing of a step is `value` times what it should be.

    Of a norm the root of a degree tells most: squares were added up several times.
    """
    known = known_factors(plan, oracle)
    if of_norm:
        known = sorted(known, key=lambda factor: not factor.name.startswith("sqrt"))
    return name_factor(value, known, residual)


def subject_factors(
    evidence: CapturedEvidence, step: ReferenceStep, axes_of: Collection[str]
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


def named_on_mesh(
    evidence: CapturedEvidence,
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


def _is_held_along(evidence: CapturedEvidence, name: str, axis: str) -> bool:
    """Return whether several places of an axis hold a parameter, or part of it."""
    holders = evidence.run.holders(PARAMETERS, INITIAL, name)
    return not name or len({evidence.mesh.coordinates(rank)[axis] for rank in holders}) > 1


def split_axes(evidence: CapturedEvidence, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes along which ranks hold different elements of a parameter, and the same."""
    mesh, run = evidence.mesh, evidence.run
    held = _held(evidence, name)
    cut, same = [], []
    for axis in mesh.axes:
        groups = [mesh.group(rank, (axis,)) for rank in run.holders(PARAMETERS, INITIAL, name)]
        differ = any(held.get(rank) != held.get(group[0]) for group in groups for rank in group)
        (cut if differ else same).append(axis)
    return tuple(cut), tuple(same)


def place_of_parameter(evidence: CapturedEvidence, name: str) -> str:
    """Return how a parameter lies on the ranks, as text; nothing for what is none."""
    if name not in evidence.run.shapes:
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


def _held(evidence: CapturedEvidence, name: str) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for piece in evidence.run.parts(PARAMETERS, INITIAL, name):
        found[piece.rank] = (*found.get(piece.rank, ()), *piece.index.tolist())
    return found


def partial_norms(evidence: CapturedEvidence, step: ReferenceStep) -> Iterator[Factor]:
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


def _squares_of_ranks(evidence: CapturedEvidence, step: ReferenceStep) -> list[float]:
    squares = [0.0] * evidence.mesh.world_size
    for name, gradient in step.gradients.items():
        flat = gradient.double().reshape(-1).square()
        for piece in evidence.run.parts(PARAMETERS, INITIAL, name):
            squares[piece.rank] += float(flat[piece.index].sum())
    return squares


def _copied(evidence: CapturedEvidence, step: ReferenceStep, axis: str) -> float:
    """Return the norm in which copies over an axis count as often as they are held."""
    square = 0.0
    for name, gradient in step.gradients.items():
        copies = evidence.mesh.degrees[axis] if axis in split_axes(evidence, name)[1] else 1
        square += copies * float(gradient.double().square().sum())
    return math.sqrt(square)


def name_partial_norm(
    evidence: CapturedEvidence, step: ReferenceStep, norm: float
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
