"""What a wrong gradient norm is the norm of."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.axis import SHARD_AXES
from echelon.core.parameters import ParameterSpec, parameters
from echelon.core.plan import Plan
from echelon.cost.buckets import data_degree
from echelon.cost.stage import pieces_of
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
        cut = [s for s in specs if s.split_dim is not None and pieces_of(plan, s) > 1]
        split = sum(_square(oracle, s) for s in cut)
        whole = sum(_square(oracle, s) for s in specs if s.split_dim is None)
        # Whole experts are neither: their ranks are data ranks to them.
        once = oracle.grad_norm**2 - whole
        name = "with what tensor ranks replicate counted once per rank"
        found.append(Factor(name=name, value=(once + mesh.tp * whole) ** 0.5, axis="tp"))
        name = "of what tensor ranks split"
        found.append(Factor(name=name, value=split**0.5, axis="tp"))
    found += _of_experts(plan, oracle)
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


def _of_experts(plan: Plan, oracle: OracleStep) -> Iterator[Factor]:
    """Yield the norms without some of the experts, and with some counted for several ranks."""
    specs, mesh = _specs(plan), plan.mesh
    if plan.model.experts is None:
        return
    dense = sum(_square(oracle, spec) for spec in specs if spec.expert is None)
    share = plan.model.experts.num_experts // mesh.ep
    squares = [
        sum(_square(oracle, s) for s in specs if s.expert is not None and s.expert // share == e)
        for e in range(mesh.ep)
    ]
    yield Factor(name="without the experts", value=dense**0.5, axis="ep" if mesh.ep > 1 else "")
    for index, square in enumerate(squares if mesh.ep > 1 else ()):
        name = f"with the experts of ep {index} alone"
        yield Factor(name=name, value=(dense + square) ** 0.5, axis="ep")
        name = f"of ep {index} alone"
        yield Factor(name=name, value=square**0.5, axis="ep")
        name = f"without the experts of ep {index}"
        yield Factor(name=name, value=(dense + sum(squares) - square) ** 0.5, axis="ep")
    copies = data_degree(plan, expert=True)
    # Tensor ranks with the same experts are data ranks to them.
    only_tensor = data_degree(plan) == 1 and plan.layout.experts.expert_tp == 1
    degrees = {"tp" if only_tensor else "edp": copies, "dp": mesh.dp, "cp": mesh.cp}
    times: dict[int, list[str]] = {}
    for axis, degree in degrees.items():
        if degree > 1:
            times.setdefault(degree, []).append(axis)
    for degree, axes in times.items():
        name = f"with experts counted {degree} times"
        value = (dense + degree * sum(squares)) ** 0.5
        yield Factor(name=name, value=value, axis=" or ".join(axes))


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
