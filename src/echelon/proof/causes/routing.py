# SPDX-License-Identifier: Apache-2.0
"""What wrong routes, loads, losses and biases of routers look like.

Where a token goes elsewhere, something before its router may be wrong: then the losses say what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch

from echelon.core.parameters import ROUTER
from echelon.core.plan import Plan
from echelon.proof.causes.factors import named_factor
from echelon.proof.causes.finding import ROUNDING, ProofFinding
from echelon.proof.causes.forward.losses import explain_microbatch_losses
from echelon.proof.causes.gradients.experts import (
    SCOPE_AXES,
    flat,
    loads_in,
    several_of,
    wrong_shares,
)
from echelon.proof.causes.token_ranks import token_rows
from echelon.proof.claims.checks import Check
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.fits import fit_factor, furthest_value, nearly_equal
from echelon.proof.evidence.mesh import named_groups
from echelon.proof.oracle.oracle import OracleStep, build_decoder, loss_of_tokens

_LAYER = re.compile(r"layers\.(\d+)")
_RANK = re.compile(r"of rank (\d+)$")


def explain_routes(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return the mistake by which tokens went to other experts."""
    finding = explain_microbatch_losses(evidence, failure)
    if finding.factor != "none":
        return finding
    layer = _layer(evidence, failure)
    if finding.description == ROUNDING and evidence.plan.layout.recompute.recomputes(layer):
        says = f"what is recomputed is routed anew, beside right losses: {failure.detail}"
        return ProofFinding("routed anew", says)
    return ProofFinding("routes", failure.detail)


def explain_loads(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return how loads were counted that are not those of the global batch."""
    oracle, layer = evidence.steps[failure.step], _layer(evidence, failure)
    right_E = oracle.routed[layer].counts_E.double()
    reported = {
        rank: torch.tensor(report.routing.loads[layer].counts, dtype=torch.float64)
        for rank, report in enumerate(evidence.run.reports(failure.step))
        if report.routing is not None and layer in report.routing.loads
    }
    factors = (_factor(evidence, failure, counts_E, right_E) for counts_E in reported.values())
    found = chain(_partial(evidence.plan, reported, right_E), filter(None, factors))
    return next(found, ProofFinding("none", failure.detail))


def explain_router_losses(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return which factor is in a loss of routers."""
    oracle = evidence.steps[failure.step]
    kind = "aux_loss" if failure.subject.startswith("aux") else "z_loss"
    reported = [
        getattr(report.routing.summary, kind)
        for report in evidence.run.reports(failure.step)
        if report.routing is not None
    ]
    right = sum(getattr(one, kind) for one in oracle.routed.values())
    wrong = furthest_value(reported, right) / right if right and reported else 1.0
    if nearly_equal(wrong, 1.0):
        return ProofFinding("none", f"{failure.subject}: {failure.detail}")
    if kind == "aux_loss" and (found := _wrong_shares(evidence, oracle, wrong * right)):
        return found
    named = named_factor(evidence, oracle, wrong)
    what = "the auxiliary loss" if kind == "aux_loss" else "the z-loss"
    return replace(named, description=f"{what} of the global batch is {named.description}")


def _wrong_shares(
    evidence: PlanEvidence, oracle: OracleStep, reported: float
) -> ProofFinding | None:
    """Find an auxiliary loss of shares of other tokens."""
    plan = evidence.reference_plan
    model = build_decoder(plan, oracle.before, routing=oracle.routing, rounding=oracle.rounding)
    with torch.no_grad():
        loss_of_tokens(plan, model, oracle)
        for finding, loss in wrong_shares(evidence, oracle, model):
            if nearly_equal(float(loss), reported):
                return finding
    return None


def explain_router_state(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return by which loads the biases of a router moved, or its shares were made."""
    plan, oracle, layer = evidence.plan, evidence.steps[failure.step], _layer(evidence, failure)
    bias = not failure.subject.startswith("share")
    rank = _RANK.search(failure.subject)
    report = evidence.run.reports(failure.step)[int(rank[1]) if rank else 0].routing
    if report is None:
        return ProofFinding("none", failure.detail)
    said_E = torch.tensor((report.biases if bias else report.shares)[layer], dtype=torch.float64)
    before_E = oracle.routing.biases[layer].double() if bias else torch.zeros(())
    if oracle.skipped:
        what = "biases move" if bias else "shares of loads are made"
        return ProofFinding("not skipped", f"{what} in a step that is skipped")
    chosen_NK = flat(oracle.routed[layer].picked_BTK)
    for axis, loads_SE in _loads_by_scope(plan, chosen_NK, len(said_E)):
        for counts_E in loads_SE.double():
            away_E = torch.sign(counts_E.mean() - counts_E)
            made_E = plan.mathematics.balance.bias_rate * away_E
            made_E = before_E + made_E if bias else counts_E / counts_E.sum()
            if torch.allclose(made_E, said_E, atol=1e-9):
                what = "biases move" if bias else "shares are made"
                says = f"{what} by the loads of the tokens of one rank of {axis}, not of all"
                return ProofFinding("local loads", says, axis)
    right = oracle.routing_after.biases if bias else oracle.routing_after.shares
    moved_E, right_E = said_E - before_E, right[layer].double() - before_E
    found = _factor(evidence, failure, moved_E, right_E)
    return found or ProofFinding("none", failure.detail)


def _factor(
    evidence: PlanEvidence, failure: Check, said_E: torch.Tensor, right_E: torch.Tensor
) -> ProofFinding | None:
    factor, residual = fit_factor(said_E, right_E)
    if residual >= 1e-9 or nearly_equal(factor, 1.0):
        return None
    return named_factor(evidence, evidence.steps[failure.step], factor, residual)


def _partial(
    plan: Plan, reported: Mapping[int, torch.Tensor], right_E: torch.Tensor
) -> Iterator[ProofFinding]:
    """Find counts that differ along an axis, or over a stage, and add up to the right ones."""
    stage = ("dp and cp and tp", (tuple(sorted(reported)),))
    for axis, groups in (*named_groups(plan), stage):
        for group in groups:
            counts = [reported[rank] for rank in group if rank in reported]
            if len(counts) < 2 or all(torch.equal(counts[0], one) for one in counts[1:]):
                continue
            if torch.equal(torch.stack(counts).sum(0), right_E):
                says = f"loads differ along {axis} and add up to the right ones: not summed"
                yield ProofFinding("missing sum", says, axis)
                return


def _loads_by_scope(
    plan: Plan, chosen_NK: torch.Tensor, num_experts: int
) -> Iterator[tuple[str, torch.Tensor]]:
    several = several_of(plan, ("data", "context", "tensor"))
    scopes = [several, *([one] for one in several if len(several) > 1)]
    for names in filter(None, scopes):
        axis = " and ".join(SCOPE_AXES[name] for name in names)
        yield axis, loads_in(chosen_NK, token_rows(plan).scope(*names), num_experts)


def _layer(evidence: PlanEvidence, failure: Check) -> int:
    """Return the layer that a failure names, or the first one with a router."""
    found = _LAYER.search(failure.subject)
    return int(found[1]) if found else min(evidence.steps[failure.step].routed)


def router_of(evidence: PlanEvidence, failure: Check) -> str:
    """Return the name of the router that a failure is told under."""
    return f"layers.{_layer(evidence, failure)}.mlp{ROUTER}"
