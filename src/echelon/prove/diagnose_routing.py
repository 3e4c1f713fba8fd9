"""What wrong routes, loads, losses and biases of routers look like.

Where a token goes elsewhere, something before its router may be wrong: then the losses say what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from echelon.core.parameters import ROUTER
from echelon.core.plan import Plan
from echelon.prove.checks import Evidence
from echelon.prove.claims import Failure
from echelon.prove.diagnose_losses import explain_microbatch_losses
from echelon.prove.diagnosis import ROUNDING, Finding
from echelon.prove.expert_rows import token_rows
from echelon.prove.factors import close, fit_factor, furthest, known_factors, name_factor
from echelon.prove.oracle import OracleStep, build_decoder
from echelon.prove.places import telling_groups
from echelon.prove.whole_loss import loss_of_tokens
from echelon.prove.wrong_shares import flat, loads_in, wrong_shares

_LAYER = re.compile(r"layers\.(\d+)")
_RANK = re.compile(r"of rank (\d+)$")
_SCOPES = {"data": "dp", "context": "cp", "tensor": "tp"}


def explain_routes(evidence: Evidence, failure: Failure) -> tuple[str, Finding]:
    """Return the mistake by which tokens went to other experts, and the tensor it is told under."""
    tensor, finding = explain_microbatch_losses(evidence, failure.step)
    if finding.factor != "none":
        return tensor or failure.subject, finding
    layer = _layer(failure, evidence.oracle[failure.step])
    if finding.says == ROUNDING and evidence.plan.layout.recompute.recomputes(layer):
        says = f"what is recomputed is routed anew, beside right losses: {failure.detail}"
        return failure.subject, Finding(factor="routed anew", says=says)
    return failure.subject, Finding(factor="routes", says=failure.detail)


def explain_loads(evidence: Evidence, failure: Failure) -> tuple[str, Finding]:
    """Return how loads were counted that are not those of the global batch."""
    plan, oracle = evidence.plan, evidence.oracle[failure.step]
    layer = _layer(failure, oracle)
    right_E = oracle.routed[layer].counts_E.double()
    said = {
        rank: torch.tensor(report.routing.loads[layer].counts, dtype=torch.float64)
        for rank, report in enumerate(evidence.observed.reports(failure.step))
        if report.routing is not None and layer in report.routing.loads
    }
    name = _router(layer)
    for found in _partial(plan, said, right_E):
        return name, found
    for counts_E in said.values():
        factor, residual = fit_factor(counts_E, right_E)
        if residual < 1e-9 and not close(factor, 1.0):
            return name, name_factor(factor, known_factors(plan, oracle), residual)
    return name, Finding(factor="none", says=failure.detail)


def explain_router_losses(evidence: Evidence, failure: Failure) -> tuple[str, Finding]:
    """Return which factor is in a loss of routers."""
    oracle = evidence.oracle[failure.step]
    kind = "aux_loss" if failure.subject.startswith("aux") else "z_loss"
    said = [
        getattr(report.routing.summary, kind)
        for report in evidence.observed.reports(failure.step)
        if report.routing is not None
    ]
    right = sum(getattr(one, kind) for one in oracle.routed.values())
    name = _router(_layer(failure, oracle))
    wrong = furthest(said, right) / right if right and said else 1.0
    if close(wrong, 1.0):
        return name, Finding(factor="none", says=f"{failure.subject}: {failure.detail}")
    if kind == "aux_loss":
        for found in _wrong_shares(evidence, oracle, wrong * right):
            return name, found
    named = name_factor(wrong, known_factors(evidence.plan, oracle))
    what = "the auxiliary loss" if kind == "aux_loss" else "the z-loss"
    says = f"{what} of the global batch is {named.says}"
    return name, Finding(factor=named.factor, says=says, axis=named.axis, value=wrong)


def _wrong_shares(evidence: Evidence, oracle: OracleStep, said: float) -> Iterator[Finding]:
    """Find an auxiliary loss of shares of other tokens."""
    plan = evidence.reference_plan
    model = build_decoder(plan, oracle.before, routing=oracle.routing)
    with torch.no_grad():
        loss_of_tokens(plan, model, oracle)
        for finding, loss in wrong_shares(evidence, oracle, model):
            if close(float(loss), said):
                yield finding


def explain_router_state(evidence: Evidence, failure: Failure) -> tuple[str, Finding]:
    """Return by which loads the biases of a router moved, or its shares were made."""
    plan, oracle = evidence.plan, evidence.oracle[failure.step]
    layer, routed = _layer(failure, oracle), oracle.routed
    kind = "share" if failure.subject.startswith("share") else "bias"
    rank_match = _RANK.search(failure.subject)
    rank = 0 if rank_match is None else int(rank_match[1])
    report = evidence.observed.reports(failure.step)[rank].routing
    name = _router(layer)
    if report is None:
        return name, Finding(factor="none", says=failure.detail)
    held = report.shares if kind == "share" else report.biases
    said_E = torch.tensor(held[layer], dtype=torch.float64)
    chosen_NK = flat(routed[layer].picked_BTK)
    for axis, loads_SE in _loads_by_scope(plan, chosen_NK, len(said_E)):
        for counts_E in loads_SE:
            if torch.allclose(_after(plan, oracle, layer, kind, counts_E), said_E, atol=1e-9):
                what = "biases move" if kind == "bias" else "shares are made"
                says = f"{what} by the loads of the tokens of one rank of {axis}, not of all"
                return name, Finding(factor="local loads", says=says, axis=axis)
    before_E = oracle.routing.biases[layer].double() if kind == "bias" else torch.zeros(())
    right = oracle.routing_after.biases if kind == "bias" else oracle.routing_after.shares
    factor, residual = fit_factor(said_E - before_E, right[layer].double() - before_E)
    if residual < 1e-9 and not close(factor, 1.0):
        return name, name_factor(factor, known_factors(plan, oracle), residual)
    return name, Finding(factor="none", says=failure.detail)


def _partial(
    plan: Plan, said: Mapping[int, torch.Tensor], right_E: torch.Tensor
) -> Iterator[Finding]:
    """Find counts that differ along an axis, or over a stage, and add up to the right ones."""
    stage = ("dp and cp and tp", (tuple(sorted(said)),))
    for axis, groups in (*telling_groups(plan), stage):
        for group in groups:
            counts = [said[rank] for rank in group if rank in said]
            if len(counts) < 2 or all(torch.equal(counts[0], one) for one in counts[1:]):
                continue
            if torch.equal(torch.stack(counts).sum(0), right_E):
                says = f"loads differ along {axis} and add up to the right ones: not summed"
                yield Finding(factor="missing sum", says=says, axis=axis)
                return


def _loads_by_scope(
    plan: Plan, chosen_NK: torch.Tensor, num_experts: int
) -> Iterator[tuple[str, torch.Tensor]]:
    rows, mesh = token_rows(plan), plan.mesh
    degrees = {"data": mesh.dp, "context": mesh.cp, "tensor": mesh.tp}
    several = [name for name, degree in degrees.items() if degree > 1]
    scopes: list[Sequence[str]] = [several, *([one] for one in several if len(several) > 1)]
    for names in scopes:
        if names:
            axis = " and ".join(_SCOPES[name] for name in names)
            yield axis, loads_in(chosen_NK, rows.scope(*names), num_experts)


def _after(
    plan: Plan, oracle: OracleStep, layer: int, kind: str, counts_E: torch.Tensor
) -> torch.Tensor:
    counts_E = counts_E.double()
    if kind == "share":
        return counts_E / counts_E.sum()
    away_E = torch.sign(counts_E.mean() - counts_E)
    return oracle.routing.biases[layer].double() + plan.mathematics.balance.bias_rate * away_E


def _layer(failure: Failure, oracle: OracleStep) -> int:
    """Return the layer that a failure names, or the first one with a router."""
    found = _LAYER.search(failure.subject)
    return int(found[1]) if found is not None else min(oracle.routed)


def _router(layer: int) -> str:
    return f"layers.{layer}.mlp{ROUTER}"
