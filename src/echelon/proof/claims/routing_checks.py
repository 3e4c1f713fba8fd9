# SPDX-License-Identifier: Apache-2.0
"""The comparisons of a model with experts: where tokens went, loads, losses of routers, biases.

Where tokens go is compared bit for bit in float64, but for ties. There, and everywhere in the
plan's own precision, the oracle takes over the ranks' choices; a choice of another expert may ask
for no larger error of a score than the precision has (`proof/claims/choice_errors.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from echelon.proof.claims.checks import Check, exact_check
from echelon.proof.claims.choice_errors import choice_error, drop_error, signature
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.claims.tolerance import unit_roundoff
from echelon.proof.evidence.evidence import FLOAT64_TOLERANCE
from echelon.proof.observed import ObservedRoutes, ObservedRun, reports_routes, routes_of
from echelon.proof.oracle.oracle import OracleStep
from echelon.proof.oracle.routing import RoutedLayer
from echelon.proof.subject import ReportedRouting


def routes(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare where each token went with where one device sends it; each must go once."""
    for oracle in evidence.steps:
        if not reports_routes(evidence.run, oracle.step):
            continue
        for layer, routed in oracle.routed.items():
            observed = routes_of(evidence.run, oracle.step, layer)
            yield exact_check(oracle.step, _subject(layer), observed.problem, 2 * layer)
            if layer not in (oracle.forced_routing or {}):
                yield _same_routes(evidence, oracle.step, layer, routed, observed)
            else:
                yield from _near_routes(evidence, oracle.step, layer, routed)


def routes_note(evidence: PlanEvidence, _: Sequence[Check]) -> str:
    """Say how many tokens went elsewhere because of rounding; nothing where none could."""
    layers = [
        routed
        for oracle in evidence.steps
        for layer, routed in oracle.routed.items()
        if layer in (oracle.forced_routing or {})
    ]
    if not layers:
        return ""
    differ = sum(
        choice_error(evidence.plan, one)[1] + drop_error(evidence.plan, one)[1] for one in layers
    )
    count = sum(one.right_BTK[..., 0].numel() for one in layers)
    return f"{differ} of {count} choices differ by rounding"


def _subject(layer: int) -> str:
    return f"layers.{layer}.mlp.router"


def _same_routes(
    evidence: PlanEvidence, step: int, layer: int, routed: RoutedLayer, observed: ObservedRoutes
) -> Check:
    differ_BT = (
        signature(routed.picked_BTK, routed.kept_BTK)
        != signature(observed.chosen_BTK, observed.kept_BTK)
    ).any(-1)
    count = int(differ_BT.sum())
    detail = _first(evidence, routed, observed, differ_BT) if count else ""
    error = count / differ_BT.numel()
    return Check(step, _subject(layer), error, detail=detail, position=2 * layer + 1)


def _first(
    evidence: PlanEvidence, routed: RoutedLayer, observed: ObservedRoutes, differ_BT: torch.Tensor
) -> str:
    row, position = torch.nonzero(differ_BT)[0].tolist()
    went, goes = (
        _experts(one.chosen_BTK[row, position], one.kept_BTK[row, position])
        for one in (observed, routed)
    )
    mesh, rank = evidence.plan.mesh, int(observed.rank_BT[row, position])
    return (
        f"{int(differ_BT.sum())} of {differ_BT.numel()} tokens go elsewhere: position {position} "
        f"of sequence {row} to {went} instead of {goes}, by rank {rank} ({mesh.label(rank)})"
    )


def _experts(chosen_K: torch.Tensor, kept_K: torch.Tensor) -> str:
    pairs = sorted(zip(chosen_K.tolist(), kept_K.tolist(), strict=True))
    return ", ".join(f"{expert}" if kept else f"{expert} (dropped)" for expert, kept in pairs)


def _near_routes(
    evidence: PlanEvidence, step: int, layer: int, routed: RoutedLayer
) -> Iterator[Check]:
    found = (
        ("scores", "tokens go elsewhere", *choice_error(evidence.plan, routed)),
        ("gates", "assignments are kept and dropped otherwise", *drop_error(evidence.plan, routed)),
    )
    for kind, what, error, count in found:
        allowed = evidence.tolerance.allowed(kind, step, f"layers.{layer}")
        detail = f"{count} {what}, with {kind} that are {error:.2g} off" if count else ""
        place = 2 * layer + 1
        yield Check(step, _subject(layer), error, allowed=allowed, detail=detail, position=place)


def loads(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare assignments by expert, drops and imbalance with those of the global batch."""
    for oracle in evidence.steps:
        yield from _every_layer_reported(evidence.run, oracle)
        for rank, reported in _reported_routing(evidence.run, oracle.step):
            yield from _loads(oracle, rank, reported)


def _loads(oracle: OracleStep, rank: int, reported: ReportedRouting) -> Iterator[Check]:
    layers = oracle.routed
    for layer, load in reported.loads.items():
        name, subject = f"layers.{layer} of rank {rank}", f"loads of layers.{layer} of rank {rank}"
        if layer not in layers:
            yield _number(oracle.step, subject, 1, 0)
            continue
        wanted = [int(one) for one in layers[layer].counts_E]
        wrong = sum(abs(a - b) for a, b in zip(load.counts, wanted, strict=True))
        detail = f"{list(load.counts)} instead of {wanted}" if wrong else ""
        error = wrong / max(1, sum(wanted))
        yield Check(oracle.step, subject, error, detail=detail, position=rank)
        yield _number(oracle.step, f"drops of {name}", load.dropped, layers[layer].dropped, rank)
    whole, of_all = reported.summary, layers.values()
    for what, told, right, allowed in (
        ("assignments", whole.assignments, sum(int(one.counts_E.sum()) for one in of_all), 0.0),
        ("drops", whole.dropped, sum(one.dropped for one in of_all), 0.0),
        ("imbalance", whole.imbalance, max(one.imbalance for one in of_all), 1e-12),
    ):
        yield _number(oracle.step, f"{what} of rank {rank}", told, right, rank, allowed=allowed)


def _every_layer_reported(observed: ObservedRun, oracle: OracleStep) -> Iterator[Check]:
    """Ask that some rank tells the load of each layer, where any rank tells any."""
    reported = [one for _, one in _reported_routing(observed, oracle.step)]
    told = {layer for one in reported for layer in one.loads}
    for layer in oracle.routed if reported else ():
        yield _number(oracle.step, f"loads of layers.{layer}", float(layer in told), 1.0)


def router_losses(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the losses of each layer, and their sums, on every rank that says them."""
    for oracle in evidence.steps:
        for rank, reported in _reported_routing(evidence.run, oracle.step):
            for kind in ("aux_loss", "z_loss"):
                right = {f"layers.{i}": getattr(one, kind) for i, one in oracle.routed.items()}
                told = {f"layers.{i}": getattr(one, kind) for i, one in reported.loads.items()}
                right[""], told[""] = sum(right.values()), getattr(reported.summary, kind)
                for name, value in told.items():
                    subject = f"{kind.replace('_', ' ')} {name and f'of {name} '}of rank {rank}"
                    wanted = right.get(name, math.nan)
                    allowed = evidence.tolerance.allowed(kind, oracle.step, name)
                    yield _number(oracle.step, subject, value, wanted, rank, allowed=allowed)


def router_state(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare what routers know after each step: biases, how they moved, and shares of loads."""
    observed, rounding = evidence.run, FLOAT64_TOLERANCE
    for oracle in evidence.steps:
        step, after = oracle.step, oracle.routing_after
        if evidence.tolerance.own_precision:
            # A bias is added up in float32 at the least, once a step; a share is one division.
            rounding = FLOAT64_TOLERANCE + (step + 2) * unit_roundoff("fp32")
        last = dict(_reported_routing(observed, step - 1)) if step else {}
        for rank, reported in _reported_routing(observed, step):
            for kind, held, right in (
                ("bias", reported.biases, after.biases),
                ("share", reported.shares, after.shares),
            ):
                for layer, vector in held.items():
                    subject = f"{kind} of layers.{layer} of rank {rank}"
                    yield _vector(step, subject, vector, right.get(layer), rank, rounding)
            if evidence.plan.mathematics.balance.has_bias:
                before = last[rank].biases if rank in last else {}
                for layer, vector in reported.biases.items():
                    yield _moves(oracle, layer, rank, vector, before.get(layer))


def _vector(
    step: int,
    subject: str,
    observed: Sequence[float],
    right: torch.Tensor | None,
    rank: int,
    allowed: float,
) -> Check:
    error = math.inf
    if right is not None and len(observed) == len(right):
        off = (torch.tensor(observed, dtype=torch.float64) - right.double()).norm()
        scale = float(right.double().norm())
        error = float(off) / scale if scale else float(off)
    numbers = [] if right is None else right.tolist()
    detail = "" if error <= allowed else f"{list(observed)} instead of {numbers}"
    return Check(step, subject, error, allowed=allowed, detail=detail, position=rank)


def _moves(
    oracle: OracleStep,
    layer: int,
    rank: int,
    after: Sequence[float],
    before: Sequence[float] | None,
) -> Check:
    """Compare which biases rose, fell and stayed."""
    right_E = torch.sign(oracle.routing_after.biases[layer] - oracle.routing.biases[layer])
    now_E = torch.tensor(after, dtype=torch.float64)
    last_E = torch.tensor(before or [0.0] * len(after), dtype=torch.float64)
    wrong = torch.nonzero(torch.sign(now_E - last_E) != right_E).flatten().tolist()
    subject = f"move of biases of layers.{layer} of rank {rank}"
    detail = f"those of experts {wrong} moved otherwise" if wrong else ""
    return Check(oracle.step, subject, len(wrong) / len(now_E), detail=detail, position=rank)


def _reported_routing(observed: ObservedRun, step: int) -> Iterator[tuple[int, ReportedRouting]]:
    for rank, report in enumerate(observed.reports(step)):
        if report.routing is not None:
            yield rank, report.routing


def _number(
    step: int, subject: str, observed: float, right: float, rank: int = 0, *, allowed: float = 0.0
) -> Check:
    off = abs(observed - right)
    error = off / abs(right) if right else off
    detail = "" if error <= allowed else f"{observed:.10g} instead of {right:.10g}"
    return Check(step, subject, error, allowed=allowed, detail=detail, position=rank)
