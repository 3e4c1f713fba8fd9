"""What a wrong gradient norm is the norm of."""

from __future__ import annotations

from echelon.core.axis import SHARD_AXES
from echelon.core.parameters import ParameterSpec, parameters
from echelon.core.plan import Plan
from echelon.prove.checks import Evidence
from echelon.prove.diagnosis import ROUNDING, Finding
from echelon.prove.factors import Factor, close, furthest, known_factors, name_factor
from echelon.prove.oracle import OracleStep
from echelon.prove.places import place_of, shard_axis


def explain_norm(evidence: Evidence, step: int) -> Finding:
    """Return what the wrong gradient norm is the norm of."""
    oracle = evidence.oracle[step]
    values = [report.grad_norm for report in evidence.observed.reports(step)]
    wrong = furthest(values, oracle.grad_norm)
    if close(wrong / oracle.grad_norm, 1.0):
        return Finding(factor="none", says=ROUNDING)
    return name_norm(evidence, oracle, wrong) or name_factor(
        wrong / oracle.grad_norm, known_factors(evidence.plan, oracle)
    )


def name_norm(evidence: Evidence, oracle: OracleStep, norm: float) -> Finding | None:
    """Return which part of the gradient a norm is the norm of; None where it is of no part."""
    for candidate in (*norms_of_parts(evidence.plan, oracle), *_norms_of_ranks(evidence, oracle)):
        if close(norm / candidate.value, 1.0):
            return Finding(
                factor="partial norm",
                says=f"{norm:.6g} is the norm {candidate.name}; all together it is "
                f"{oracle.grad_norm:.6g}",
                axis=candidate.axis,
                value=norm / oracle.grad_norm,
            )
    return None


def norms_of_parts(plan: Plan, oracle: OracleStep) -> tuple[Factor, ...]:
    """Return the norms that a run may take for the norm of the whole gradient."""
    mesh = plan.mesh
    specs = _specs(plan)
    found: list[Factor] = []
    if mesh.tp > 1:
        split = sum(_square(oracle, s) for s in specs if s.split_dim is not None)
        whole = sum(_square(oracle, s) for s in specs if s.split_dim is None)
        name = "with what tensor ranks replicate counted once per rank"
        found.append(Factor(name=name, value=(split + mesh.tp * whole) ** 0.5, axis="tp"))
        name = "of what tensor ranks split"
        found.append(Factor(name=name, value=split**0.5, axis="tp"))
    if plan.model.tied and mesh.pp > 1:
        tied = _square(oracle, specs[0])
        name = "with the tied embedding counted on both its stages"
        found.append(Factor(name=name, value=(oracle.grad_norm**2 + tied) ** 0.5, axis="pp"))
    for stage in range(plan.num_stages):
        own = [s for s in specs if stage in _stages_of(plan, s)]
        if mesh.pp > 1:
            value = sum(_square(oracle, s) for s in own) ** 0.5
            found.append(Factor(name=f"of pipeline stage {stage} alone", value=value, axis="pp"))
        for tp_rank in range(mesh.tp) if mesh.tp > 1 else ():
            value = sum(_square(oracle, s, tp=mesh.tp, tp_rank=tp_rank) for s in own) ** 0.5
            name = f"of tp {tp_rank}" + (f" of stage {stage}" if mesh.pp > 1 else "") + " alone"
            axis = "pp and tp" if mesh.pp > 1 else "tp"
            found.append(Factor(name=name, value=value, axis=axis))
    if mesh.pp > 1:
        for tp_rank in range(mesh.tp) if mesh.tp > 1 else ():
            value = sum(_square(oracle, s, tp=mesh.tp, tp_rank=tp_rank) for s in specs) ** 0.5
            found.append(Factor(name=f"of tp {tp_rank} alone", value=value, axis="tp"))
    return tuple(found)


def _norms_of_ranks(evidence: Evidence, oracle: OracleStep) -> list[Factor]:
    """Return the norms of the slices of each rank, and of one data rank's in all groups."""
    observed, mesh = evidence.observed, evidence.plan.mesh
    if not evidence.plan.layout.zero.stage or mesh.degree(*SHARD_AXES) == 1:
        return []
    axis = shard_axis(evidence.plan)
    squares: dict[int, float] = {}
    shards: dict[int, float] = {}
    for name in observed.specs:
        for piece in observed.pieces("gradients", oracle.step, name):
            square = float(oracle.gradients[name][piece.region].double().square().sum())
            squares[piece.rank] = squares.get(piece.rank, 0.0) + square
            if piece.primary:
                shard = place_of(evidence.plan, piece.rank, SHARD_AXES)
                shards[shard] = shards.get(shard, 0.0) + square
    found = [
        Factor(name=f"of the slices of {axis} {shard} alone", value=square**0.5, axis=axis)
        for shard, square in shards.items()
    ]
    return found + [
        Factor(name=f"of the slices of rank {rank} alone", value=square**0.5, axis=axis)
        for rank, square in squares.items()
    ]


def _specs(plan: Plan) -> list[ParameterSpec]:
    return list(parameters(plan.model))


def _stages_of(plan: Plan, spec: ParameterSpec) -> set[int]:
    last = plan.num_stages - 1
    if spec.layer is not None:
        return {s for s, blocks in enumerate(plan.layout.pipeline.stages) if spec.layer in blocks}
    if spec.name == "embedding.weight":
        return {0, last} if plan.model.tied else {0}
    return {0} if spec.name.startswith("positions") else {last}


def _square(oracle: OracleStep, spec: ParameterSpec, *, tp: int = 1, tp_rank: int = 0) -> float:
    gradient = oracle.gradients[spec.name].double()
    if spec.split_dim is not None and tp > 1:
        start, end = spec.local_range(tp, tp_rank)
        gradient = gradient.narrow(spec.split_dim, start, end - start)
    return float(gradient.square().sum())


def stage_of(plan: Plan, spec: ParameterSpec) -> str:
    """Return which pipeline stages hold a parameter, as text."""
    stages = sorted(_stages_of(plan, spec))
    return " and ".join(str(stage) for stage in stages)
