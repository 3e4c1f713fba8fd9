"""What a wrong gradient norm or a wrong update looks like."""

from __future__ import annotations

import torch

from echelon.core.parameters import ParameterSpec, parameters
from echelon.core.plan import Plan
from echelon.prove.checks import Evidence
from echelon.prove.diagnosis import ROUNDING, Finding
from echelon.prove.factors import (
    EXPLAINED,
    Factor,
    close,
    fit_basis,
    fit_factor,
    furthest,
    known_factors,
    name_factor,
)
from echelon.prove.oracle import OracleStep
from echelon.prove.ranks import INITIAL

_EXACT = 1e-9


def explain_norm(evidence: Evidence, step: int) -> Finding:
    """Return what the wrong gradient norm is the norm of."""
    oracle = evidence.oracle[step]
    values = [report.grad_norm for report in evidence.observed.reports(step)]
    wrong = furthest(values, oracle.grad_norm)
    if close(wrong / oracle.grad_norm, 1.0):
        return Finding(factor="none", says=ROUNDING)
    return _name_norm(evidence.plan, oracle, wrong) or name_factor(
        wrong / oracle.grad_norm, known_factors(evidence.plan, oracle)
    )


def _name_norm(plan: Plan, oracle: OracleStep, norm: float) -> Finding | None:
    for candidate in norms_of_parts(plan, oracle):
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


def explain_update(evidence: Evidence, step: int, name: str) -> Finding:
    """Return what is wrong with what the optimizer added to `name`, its gradient being right."""
    oracle = evidence.oracle[step]
    known = known_factors(evidence.plan, oracle)
    before = evidence.observed.whole("parameters", step - 1 if step else INITIAL, name)
    seen = evidence.observed.whole("parameters", step, name) - before
    update = oracle.updates[name]
    if not bool(seen.isfinite().all()):
        return Finding(factor="not finite", says="not finite")
    if not float(seen.norm()):
        return Finding(factor="zero", says="not updated at all", value=0.0)
    finding = _clip_epsilon(evidence, oracle, seen - update.decay, name)
    if finding is not None:
        return finding
    if float(update.decay.norm()):
        weights, residual = fit_basis(seen, (update.main, update.decay))
        if residual < EXPLAINED:
            return _name_parts(weights[0], weights[1], known, residual)
    factor, residual = fit_factor(seen, update.main)
    if residual < EXPLAINED:
        if not close(factor, 1.0):
            return _learning_rate(factor, known, residual)
        if float(update.decay.norm()):
            return Finding(factor="zero", says="weight decay is missing", value=0.0)
        return Finding(factor="none", says=ROUNDING, residual=residual)
    return _clip(evidence, oracle, seen - update.decay, name) or Finding(
        factor="none", says="another update: no factor of its parts explains it"
    )


def _name_parts(adam: float, decay: float, known: tuple[Factor, ...], residual: float) -> Finding:
    if close(adam, 1.0) and close(decay, 1.0):
        return Finding(factor="none", says=ROUNDING, residual=residual)
    if close(adam, decay):
        return _learning_rate(adam, known, residual)
    if close(adam, 1.0):
        named = name_factor(decay, known, residual)
        times = "is missing" if close(decay, 0.0) else f"is applied {decay:.6g} times"
        return Finding(
            factor=named.factor,
            says=f"weight decay {times}",
            value=decay,
            residual=residual,
        )
    says = f"{adam:.6g} x the Adam part + {decay:.6g} x the weight decay"
    return Finding(factor="parts weighted", says=says, value=adam, residual=residual)


def _learning_rate(factor: float, known: tuple[Factor, ...], residual: float) -> Finding:
    named = name_factor(factor, known, residual)
    return Finding(
        factor=named.factor,
        says=f"the learning rate is {factor:.6g} times the right one",
        axis=named.axis,
        value=factor,
        residual=residual,
    )


def _clip_epsilon(
    evidence: Evidence, oracle: OracleStep, adam: torch.Tensor, name: str
) -> Finding | None:
    """Know torch's own clipping, which divides by the norm + 1e-6, from rounding."""
    clip_norm = evidence.plan.mathematics.optimizer.clip_norm
    scale, residual = _scale_behind(evidence, oracle, adam, name)
    if clip_norm is None or residual > _EXACT:
        return None
    padded = clip_norm / (oracle.grad_norm + 1e-6)
    if abs(scale / padded - 1) > _EXACT or abs(scale / oracle.clip_scale - 1) < _EXACT:
        return None
    says = "clipped by the norm + 1e-6, as torch.nn.utils.clip_grad_norm_ does"
    return Finding(factor="clip epsilon", says=says, value=scale / oracle.clip_scale)


def _clip(evidence: Evidence, oracle: OracleStep, adam: torch.Tensor, name: str) -> Finding | None:
    """Name the scale of the gradient behind the first update."""
    scale, residual = _scale_behind(evidence, oracle, adam, name)
    # The inverse magnifies rounding where the share is near 1.
    if residual > 1e3 * EXPLAINED or not scale:
        return None
    if close(scale, 1.0):
        return Finding(factor="clip", says="the gradient was not clipped", value=1.0)
    clip_norm = evidence.plan.mathematics.optimizer.clip_norm
    if clip_norm is not None:
        named = _name_norm(evidence.plan, oracle, clip_norm / scale)
        if named is not None:
            says = f"clipped by a wrong norm: {named.says}"
            return Finding(factor="partial norm", says=says, axis=named.axis, value=named.value)
    ratio = scale / oracle.clip_scale
    named = name_factor(ratio, known_factors(evidence.plan, oracle), residual)
    says = f"the update is that of a gradient {ratio:.6g} times the clipped one"
    return Finding(factor=named.factor, says=says, axis=named.axis, value=ratio)


def _scale_behind(
    evidence: Evidence, oracle: OracleStep, adam: torch.Tensor, name: str
) -> tuple[float, float]:
    """Invert the first update to the gradient that it was made from; return its scale and residual.

    In step 0 both moments are the gradient's own: u = -lr g / (|g| + eps), so |g| is
    eps |u / lr| / (1 - |u / lr|). Later steps cannot be inverted: their residual is infinite.
    """
    if oracle.step:
        return 0.0, float("inf")
    share = -adam / oracle.learning_rate
    gradient = evidence.plan.mathematics.optimizer.eps * share / (1 - share.abs())
    return fit_factor(gradient, oracle.gradients[name])


def stage_of(plan: Plan, spec: ParameterSpec) -> str:
    """Return which pipeline stages hold a parameter, as text."""
    stages = sorted(_stages_of(plan, spec))
    return " and ".join(str(stage) for stage in stages)
