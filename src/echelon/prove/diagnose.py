"""From the first thing that is wrong to a name for it: tensor, place, factor, axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from echelon.core.parameters import ParameterSpec, parameters
from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.cost.stage import pieces_of
from echelon.prove.checks import Evidence
from echelon.prove.claims import ClaimResult, Failure, first_failure
from echelon.prove.diagnose_gradients import explain_gradient
from echelon.prove.diagnose_losses import explain_loss, explain_microbatch_losses
from echelon.prove.diagnose_masters import explain_replayed, explain_written_back
from echelon.prove.diagnose_norm import explain_norm, stage_of
from echelon.prove.diagnose_routing import (
    explain_loads,
    explain_router_losses,
    explain_router_state,
    explain_routes,
)
from echelon.prove.diagnose_scale import explain_scale
from echelon.prove.diagnose_updates import explain_update
from echelon.prove.diagnosis import Diagnosis, Finding
from echelon.prove.factors import EXPLAINED, fit_factor, known_factors, name_factor
from echelon.prove.oracle import initial_parameters
from echelon.prove.places import telling_groups
from echelon.prove.ranks import INITIAL, Piece

Explained = tuple[str, Finding, tuple[int, ...]]
"""The tensor that is told, what is wrong with it, and the ranks that hold it wrong."""

_PROMISES = {
    rules.PROVE_BYTES_SENT.id: "",
    rules.PROVE_SCHEDULE_ORDER.id: "pp",
    rules.PROVE_BYTES_HELD.id: "",
}
"""What a plan promises beside its mathematics, each with the axis that a breach points to."""

_SHARP = frozenset({rules.PROVE_MASTER_WEIGHTS.id, rules.PROVE_LOSS_SCALE.id})
"""Claims that know no rounding, in the plan's own precision too."""

_FINE = 1e-6
_COARSE = 1e-2


def diagnose(evidence: Evidence, results: Sequence[ClaimResult]) -> Diagnosis | None:
    """Return what the first failure in the order of causes is; None where all claims hold."""
    failure = first_failure(results)
    if failure is None:
        return None
    result = next(one for one in results if one.rule is failure.rule)
    tensor, finding, ranks = _explain(evidence, failure)
    return Diagnosis(
        rule=failure.rule.id,
        step=failure.step,
        tensor=tensor,
        where=_where(evidence.plan, tensor),
        factor=finding.factor,
        axis=finding.axis,
        value=finding.value,
        says=finding.says,
        residual=finding.residual,
        ranks=ranks,
        num_wrong=len({(f.step, f.subject) for f in result.failures}),
        num_compared=result.compared,
    )


def _explain(evidence: Evidence, failure: Failure) -> Explained:
    if failure.rule.id in _PROMISES:
        return failure.subject, _promise(failure), ()
    rough = evidence.tolerance.own_precision and failure.rule.id not in _SHARP
    if rough and failure.allowed < failure.error < max(_COARSE, 4 * failure.allowed):
        # A wrong factor would be as wrong in float64, which is judged first.
        finding = _rounding(failure, "another order of sums, or a dtype coarser than the plan's")
        return failure.subject, finding, ()
    explain = _EXPLANATIONS.get(failure.rule.id)
    if explain is None:
        finding = Finding(factor="none", says=failure.detail or "not as on one device")
        return failure.subject, finding, ()
    tensor, finding, ranks = explain(evidence, failure)
    if finding.factor == "none" and 0 < failure.error < _FINE:
        finding = _rounding(failure, "another order of sums, or a part in a lower precision")
    return tensor, finding, ranks


def _promise(failure: Failure) -> Finding:
    over = failure.subject.rpartition(" over ")[2] if " over " in failure.subject else ""
    axis = over or _PROMISES[failure.rule.id]
    return Finding(factor="not as planned", says=failure.detail, axis=axis)


def _rounding(failure: Failure, why: str) -> Finding:
    says = f"off by rounding only ({failure.error:.1g}, allowed {failure.allowed:.1g}): {why}"
    return Finding(factor="reordering only", says=says, residual=failure.error)


def _gradient(evidence: Evidence, failure: Failure) -> Explained:
    finding, ranks = explain_gradient(evidence, failure.step, failure.subject)
    return failure.subject, finding, ranks


def _routes(evidence: Evidence, failure: Failure) -> Explained:
    tensor, finding = explain_routes(evidence, failure)
    return tensor, finding, ()


def _loads(evidence: Evidence, failure: Failure) -> Explained:
    tensor, finding = explain_loads(evidence, failure)
    return tensor, finding, ()


def _router_losses(evidence: Evidence, failure: Failure) -> Explained:
    tensor, finding = explain_router_losses(evidence, failure)
    return tensor, finding, ()


def _router_state(evidence: Evidence, failure: Failure) -> Explained:
    tensor, finding = explain_router_state(evidence, failure)
    return tensor, finding, ()


def _microbatch_loss(evidence: Evidence, failure: Failure) -> Explained:
    tensor, finding = explain_microbatch_losses(evidence, failure.step)
    return tensor or failure.subject, finding, ()


def _loss(evidence: Evidence, failure: Failure) -> Explained:
    return "loss", explain_loss(evidence, failure.step), ()


def _norm(evidence: Evidence, failure: Failure) -> Explained:
    return "gradient norm", explain_norm(evidence, failure.step), ()


def _update(evidence: Evidence, failure: Failure) -> Explained:
    finding, ranks = explain_update(evidence, failure.step, failure.subject)
    return failure.subject, finding, ranks


def _scale(evidence: Evidence, failure: Failure) -> Explained:
    finding, ranks = explain_scale(evidence, failure.step)
    return "loss scale", finding, ranks


def _written_back(evidence: Evidence, failure: Failure) -> Explained:
    finding, ranks = explain_written_back(evidence, failure.step, failure.subject)
    return failure.subject, finding, ranks


def _replayed(evidence: Evidence, failure: Failure) -> Explained:
    finding, ranks = explain_replayed(evidence, failure.step, failure.subject)
    return failure.subject, finding, ranks


def _initial(evidence: Evidence, failure: Failure) -> Explained:
    """Tell a shard that holds another part of the right values from wrong values."""
    name = failure.subject
    right = initial_parameters(evidence.plan)[name]
    kind = "masters" if failure.detail else "parameters"
    pieces = evidence.observed.pieces(kind, INITIAL, name)
    pieces = [piece for piece in pieces if evidence.observed.fits(piece)]
    wrong = [p for p in pieces if not torch.equal(p.tensor, right[p.region].to(p.tensor.dtype))]
    ranks = tuple(piece.rank for piece in wrong)
    if not wrong:
        return name, Finding(factor="missing", says="no rank holds it"), ranks
    first = wrong[0]
    moved = _moved_from(evidence, first, right)
    if moved is not None:
        return name, moved, ranks
    factor, residual = fit_factor(first.tensor, right[first.region])
    if residual < EXPLAINED:
        known = known_factors(evidence.plan, evidence.oracle[0])
        return name, name_factor(factor, known, residual), ranks
    other = _expert_of(evidence, first)
    if other is not None:
        says = f"holds the first weights of {other}: experts are numbered otherwise"
        return name, Finding(factor="experts permuted", says=says, axis="ep"), ranks
    return name, Finding(factor="none", says="other random numbers than one device has"), ranks


def _expert_of(evidence: Evidence, piece: Piece) -> str | None:
    """Find another expert whose first weights a piece holds."""
    spec = evidence.observed.specs[piece.name]
    if spec.expert is None:
        return None
    prefix = piece.name[: piece.name.index(f".{spec.expert}.")]
    suffix = piece.name.removeprefix(f"{prefix}.{spec.expert}.")
    for name, values in initial_parameters(evidence.plan).items():
        if name.startswith(f"{prefix}.") and name.endswith(f".{suffix}"):
            right = values[piece.region]
            if torch.equal(piece.tensor, right.to(piece.tensor.dtype)):
                return name.removesuffix(f".{suffix}")
    return None


def _moved_from(evidence: Evidence, piece: Piece, right: torch.Tensor) -> Finding | None:
    """Find where along the tensor-parallel dim the values of a piece stand in the right tensor."""
    spec = evidence.observed.specs[piece.name]
    dim = spec.split_dim
    if dim is None or pieces_of(evidence.plan, spec) == 1:
        return None
    region = list(piece.region)
    size = piece.tensor.shape[dim]
    for start in range(spec.shape[dim] - size + 1):
        region[dim] = slice(start, start + size)
        if torch.equal(piece.tensor, right[tuple(region)].to(piece.tensor.dtype)):
            says = f"holds dim {dim} from {start} on instead of from {piece.offset[dim]}"
            return Finding(factor="shards permuted", says=f"{says}: a wrong slice", axis="tp")
    return None


def _dropped(evidence: Evidence, failure: Failure) -> Explained:
    return failure.subject, _what_was_dropped(evidence, failure), ()


def _what_was_dropped(evidence: Evidence, failure: Failure) -> Finding:
    if failure.subject.startswith("samples"):
        factor = "same data" if "read the samples of dp" in failure.detail else "samples"
        return Finding(factor=factor, says=failure.detail, axis="dp")
    if "block" in failure.detail:
        missing = failure.detail.startswith("none")
        return Finding(factor="zero" if missing else "extra", says=failure.detail, axis="pp")
    factor = "doubled" if "more than one" in failure.detail else "one shard missing"
    spec = evidence.observed.specs.get(failure.subject)
    of_expert = spec is not None and spec.expert is not None
    axis = next(iter(telling_groups(evidence.plan, expert=True)))[0] if of_expert else ""
    return Finding(factor=factor, says=failure.detail, axis=axis)


def _tokens(evidence: Evidence, failure: Failure) -> Explained:
    oracle = evidence.oracle[failure.step]
    said = [report.tokens for report in evidence.observed.reports(failure.step)]
    wrong = next(count for count in said if count != oracle.tokens)
    named = name_factor(wrong / oracle.tokens, known_factors(evidence.plan, oracle))
    says = f"{wrong} valid tokens instead of {oracle.tokens}: {named.says}"
    finding = Finding(factor=named.factor, says=says, axis=named.axis, value=named.value)
    return "token count", finding, ()


_EXPLANATIONS: Mapping[str, Callable[[Evidence, Failure], Explained]] = {
    rules.PROVE_INITIAL_WEIGHTS.id: _initial,
    rules.PROVE_NOTHING_DROPPED.id: _dropped,
    rules.PROVE_TOKEN_COUNT.id: _tokens,
    rules.PROVE_ROUTES.id: _routes,
    rules.PROVE_EXPERT_LOADS.id: _loads,
    rules.PROVE_ROUTER_LOSSES.id: _router_losses,
    rules.PROVE_ROUTER_BIASES.id: _router_state,
    rules.PROVE_MICROBATCH_LOSS.id: _microbatch_loss,
    rules.PROVE_LOSS.id: _loss,
    rules.PROVE_GRADIENTS.id: _gradient,
    rules.PROVE_GRADIENT_NORM.id: _norm,
    rules.PROVE_CLIPPED_UPDATE.id: _update,
    rules.PROVE_LOSS_SCALE.id: _scale,
    rules.PROVE_REPLAYED_UPDATE.id: _replayed,
    rules.PROVE_MASTER_WEIGHTS.id: _written_back,
}


def _where(plan: Plan, tensor: str) -> str:
    """Return where a tensor (or a whole block) is in the model and on the mesh."""
    specs = {spec.name: spec for spec in parameters(plan.model)}
    if tensor not in specs:
        inside = [spec for name, spec in specs.items() if name.startswith(tensor + ".")]
        return _place(plan, inside[0]) if inside else ""
    spec = specs[tensor]
    place = _place(plan, spec)
    if spec.expert is not None and plan.mesh.ep > 1:
        place = f"{place}, on ep {_share_of(plan, spec.expert)}"
    if plan.mesh.tp == 1 or (spec.expert is not None and pieces_of(plan, spec) == 1):
        return place
    split = (
        "replicated over tp" if spec.split_dim is None else f"dim {spec.split_dim} split over tp"
    )
    return f"{place}, {split}"


def _share_of(plan: Plan, expert: int) -> int:
    """Return which of the shares an expert is in."""
    assert plan.model.experts is not None, "the model has experts"
    return expert * plan.mesh.ep // plan.model.experts.num_experts


def _place(plan: Plan, spec: ParameterSpec) -> str:
    if spec.layer is not None:
        place = f"block {spec.layer} of {plan.model.layers}"
    else:
        before = spec.name.startswith(("embedding", "positions"))
        place = "before the first block" if before else "after the last block"
    return f"{place}, stage {stage_of(plan, spec)}" if plan.num_stages > 1 else place
