# SPDX-License-Identifier: Apache-2.0
"""What a wrong gradient norm is the norm of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch

from echelon.core.axis import SHARD_AXES
from echelon.core.parameters import ParameterSpec, parameters
from echelon.core.plan import Plan
from echelon.cost.bytes.servers import SERVERS_AXIS
from echelon.layout.buckets import data_degree
from echelon.layout.stage import pieces_of
from echelon.proof.causes.factors import Factor, named_factor
from echelon.proof.causes.finding import ROUNDING, ProofFinding, most_telling
from echelon.proof.claims.captured_checks import gradients_are_right
from echelon.proof.claims.checks import Check
from echelon.proof.claims.plan_evidence import JudgedEvidence, PlanEvidence
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import EXPLAINED, furthest_value, nearly_equal
from echelon.proof.evidence.mesh import index_in_group, shard_axis
from echelon.proof.evidence.run import INITIAL, PARAMETERS, ReferenceStep
from echelon.proof.oracle.oracle import OracleStep


def explain_norm(evidence: JudgedEvidence, failure: Check) -> ProofFinding:
    """Explain a wrong gradient norm by the part of the gradient that has it."""
    step = failure.step
    later = [other.step for other in evidence.steps[step + 1 :]]
    finding = most_telling(
        _causes(evidence, step),
        lambda: (
            (f"gradient norm of step {other}", _causes(evidence, other))
            for other in later
            if gradients_are_right(evidence, other)
        ),
    )
    return replace(finding or ProofFinding("none", ROUNDING), tensor="gradient norm")


def _causes(evidence: JudgedEvidence, number: int) -> Iterator[ProofFinding]:
    """Yield each cause that fits the norm of a step which is furthest off."""
    step, reports = evidence.steps[number], evidence.run.reports(number)
    values = [report.grad_norm for report in reports if report.grad_norm is not None]
    wrong = furthest_value(values, step.grad_norm) if values else step.grad_norm
    if not nearly_equal(wrong / step.grad_norm, 1.0):
        yield from _parts_with_norm(evidence, step, wrong)
        yield named_factor(evidence, step, wrong / step.grad_norm, of="norm")


def name_norm(evidence: JudgedEvidence, step: ReferenceStep, norm: float) -> ProofFinding | None:
    """The part of the gradient that has this norm; None if no part has it."""
    return next(_parts_with_norm(evidence, step, norm), None)


def _parts_with_norm(
    evidence: JudgedEvidence, step: ReferenceStep, norm: float
) -> Iterator[ProofFinding]:
    """Yield each part of the gradient that has this norm."""
    whole = step.grad_norm
    if isinstance(evidence, PlanEvidence):
        oracle = evidence.steps[step.step]
        parts = (*norms_of_parts(evidence.plan, oracle), *_norms_of_ranks(evidence, oracle))
    else:
        parts = _norms_on_mesh(evidence, step)
    fits = max(_ADDED_BY_CLIPPING, evidence.explained)
    for part in parts:
        wrong = abs(part.value - whole) > EXPLAINED * whole
        if wrong and abs(norm - part.value) <= fits * part.value:
            says = f"{norm:.6g} is the norm {part.name}; the whole gradient has {whole:.6g}"
            yield ProofFinding("partial norm", says, part.axis, value=norm / whole)


_ADDED_BY_CLIPPING = 1e-5
"""Relative: torch clips by the norm + 1e-6, so a norm that is read from its clipping is larger."""


def _norms_on_mesh(evidence: CapturedEvidence, step: ReferenceStep) -> Iterator[Factor]:
    """Yield the norms that a program may take for the norm of the whole gradient.

    The sum of squares of what each rank holds, summed over the ranks of some axes: too few axes
    leave parts out, axes of copies count them several times.
    """
    mesh, squares = evidence.mesh, [0.0] * evidence.mesh.world_size
    whole = {name: one.double().square() for name, one in step.gradients.items()}
    for name, square in whole.items():
        for piece in evidence.run.parts(PARAMETERS, INITIAL, name):
            squares[piece.rank] += float(piece.of(square).sum())
    for rank in range(mesh.world_size):
        label = mesh.label(rank) or "rank 0"
        yield Factor(f"of what {label} holds alone", squares[rank] ** 0.5, " and ".join(mesh.axes))
    for axes in mesh.axis_sets():
        over = " and ".join(axes)
        left = " and ".join(axis for axis in mesh.axes if axis not in axes) or over
        for group in sorted(mesh.groups(axes)):
            norm = sum(squares[rank] for rank in group) ** 0.5
            yield Factor(f"of all that ranks hold, summed over {over}, copies too", norm, left)
    for axis in mesh.axes:
        copied = [n for n in whole if axis in evidence.run.split_axes(n)[1]]
        twice = (mesh.degrees[axis] - 1) * sum(float(whole[name].sum()) for name in copied)
        norm = (sum(float(one.sum()) for one in whole.values()) + twice) ** 0.5
        yield Factor(f"with copies over {axis} counted once per rank", norm, axis)
    flat = torch.cat([one.reshape(-1) for one in whole.values()])
    for axes in mesh.axis_sets():
        over, count = " and ".join(axes), mesh.degree(axes)
        for place, part in enumerate(flat.split(-(-len(flat) // count))):
            yield Factor(f"of flat slice {place} of {count}", float(part.sum()) ** 0.5, over)
    yield from _norms_of_modules({name: float(one.sum()) for name, one in whole.items()})


def _norms_of_modules(squares: Mapping[str, float]) -> Iterator[Factor]:
    """Yield the norms without, and of, each parameter and all parameters of each module."""
    total, parts = sum(squares.values()), defaultdict[str, float](float)
    for name, square in squares.items():
        words = name.split(".")
        for count in range(1, len(words) + 1):
            parts[".".join(words[:count])] += square
    for name, square in parts.items():
        yield Factor(f"without {name}", max(total - square, 0.0) ** 0.5)
    for name, square in parts.items():
        yield Factor(f"of {name} alone", square**0.5)


_NamedSquare = tuple[str, float, str]
"""What a norm is of, its square, and the axis that it points to."""


def norms_of_parts(plan: Plan, oracle: OracleStep) -> list[Factor]:
    """Return the norms that a run may take for the norm of the whole gradient."""
    specs = list(parameters(plan.model))
    parts = (_of_tensor_ranks, _of_experts, _of_stages)
    squares = chain.from_iterable(part(plan, oracle, specs) for part in parts)
    return [Factor(name, square**0.5, axis) for name, square, axis in squares]


def _of_tensor_ranks(
    plan: Plan, oracle: OracleStep, specs: Sequence[ParameterSpec]
) -> Iterator[_NamedSquare]:
    if plan.mesh.tp == 1:
        return
    whole = _square(oracle, (s for s in specs if s.split_dim is None))
    # Whole experts are neither split nor replicated: their ranks are data ranks to them.
    once = oracle.grad_norm**2 - whole
    name = "with what tensor ranks replicate counted once per rank"
    yield name, once + plan.mesh.tp * whole, "tp"
    cut = (s for s in specs if s.split_dim is not None and pieces_of(plan, s) > 1)
    yield "of what tensor ranks split", _square(oracle, cut), "tp"


def _of_stages(
    plan: Plan, oracle: OracleStep, specs: Sequence[ParameterSpec]
) -> Iterator[_NamedSquare]:
    """Yield the norms of stages, of tensor ranks, and of a tensor rank of a stage."""
    tp, several = plan.mesh.tp, plan.mesh.pp > 1
    if plan.model.tied and several:
        tied = _square(oracle, specs[:1])
        name = "with the tied embedding counted on both its stages"
        yield name, oracle.grad_norm**2 + tied, "pp"
    ranks = range(tp) if tp > 1 else ()
    for stage in range(plan.num_stages) if several else ():
        own = [s for s in specs if stage in _stages_of(plan, s)]
        yield f"of pipeline stage {stage} alone", _square(oracle, own), "pp"
        for rank in ranks:
            name = f"of tp {rank} of stage {stage} alone"
            yield name, _square(oracle, own, tp=tp, tp_rank=rank), "pp and tp"
    for rank in ranks:
        yield f"of tp {rank} alone", _square(oracle, specs, tp=tp, tp_rank=rank), "tp"


def _of_experts(
    plan: Plan, oracle: OracleStep, specs: Sequence[ParameterSpec]
) -> Iterator[_NamedSquare]:
    """Yield the norms without some of the experts, and with some counted for several ranks."""
    mesh = plan.mesh
    if plan.model.experts is None:
        return
    dense = _square(oracle, (spec for spec in specs if spec.expert is None))
    share = plan.model.experts.num_experts // mesh.ep
    squares = [
        _square(oracle, (s for s in specs if s.expert is not None and s.expert // share == e))
        for e in range(mesh.ep)
    ]
    yield "without the experts", dense, "ep" if mesh.ep > 1 else ""
    for index, square in enumerate(squares if mesh.ep > 1 else ()):
        yield f"with the experts of ep {index} alone", dense + square, "ep"
        yield f"of ep {index} alone", square, "ep"
        yield f"without the experts of ep {index}", dense + sum(squares) - square, "ep"
    # Tensor ranks with the same experts are data ranks to them.
    only_tensor = data_degree(plan) == 1 and plan.layout.experts.expert_tp == 1
    copies = data_degree(plan, expert=True)
    degrees = {"tp" if only_tensor else "edp": copies, "dp": mesh.dp, "cp": mesh.cp}
    for degree in dict.fromkeys(degree for degree in degrees.values() if degree > 1):
        axis = " or ".join(axis for axis, other in degrees.items() if other == degree)
        yield f"with experts counted {degree} times", dense + degree * sum(squares), axis


def _norms_of_ranks(evidence: PlanEvidence, oracle: OracleStep) -> list[Factor]:
    """Return the norms of the slices of each rank, and of one data rank's in all groups."""
    observed, plan = evidence.run, evidence.plan
    cut = plan.layout.zero.stage and plan.mesh.degree(*SHARD_AXES) > 1
    if not cut and not plan.mesh.servers:
        return []
    axis = SERVERS_AXIS if plan.mesh.servers else shard_axis(plan)
    shards: dict[str, float] = defaultdict(float)
    ranks: dict[str, float] = defaultdict(float)
    for name in observed.specs:
        for piece in observed.parts("gradients", oracle.step, name):
            square = float(oracle.gradients[name][piece.region].double().square().sum())
            ranks[f"rank {piece.rank}"] += square
            if piece.primary and not plan.mesh.servers:
                shards[f"{axis} {index_in_group(plan, piece.rank, SHARD_AXES)}"] += square
    squares = (*shards.items(), *ranks.items())
    return [Factor(f"of the slices of {of} alone", square**0.5, axis) for of, square in squares]


def _stages_of(plan: Plan, spec: ParameterSpec) -> set[int]:
    last = plan.num_stages - 1
    if spec.layer is not None:
        return {s for s, blocks in enumerate(plan.layout.pipeline.stages) if spec.layer in blocks}
    if spec.name == "embedding.weight":
        return {0, last} if plan.model.tied else {0}
    return {0} if spec.name.startswith("positions") else {last}


def _square(
    oracle: OracleStep, specs: Iterable[ParameterSpec], *, tp: int = 1, tp_rank: int = 0
) -> float:
    total = 0.0
    for spec in specs:
        gradient = oracle.gradients[spec.name].double()
        if spec.split_dim is not None and tp > 1:
            start, end = spec.local_range(tp, tp_rank)
            gradient = gradient.narrow(spec.split_dim, start, end - start)
        total += float(gradient.square().sum())
    return total


def stage_of(plan: Plan, spec: ParameterSpec) -> str:
    """Return which pipeline stages hold a parameter, as text."""
    stages = sorted(_stages_of(plan, spec))
    return " and ".join(str(stage) for stage in stages)
