"""The comparisons of a model with experts: where tokens went, loads, losses of routers, biases.

Where tokens go is compared bit for bit in float64. In the plan's own precision the oracle takes
over the ranks' choices; a choice of another expert may ask for no larger error of a score than that
precision has (`prove/near_ties.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from echelon.prove.checks import Check, Evidence
from echelon.prove.near_ties import choice_error, keep_error
from echelon.prove.observed import Observed
from echelon.prove.oracle import OracleStep
from echelon.prove.oracle_routing import RoutedLayer
from echelon.prove.routes_observed import ObservedRoutes, routes_of, says_routes
from echelon.prove.routing_said import RoutingSaid
from echelon.prove.tolerance import FLOAT64_TOLERANCE, unit_roundoff


def routes(evidence: Evidence) -> Iterator[Check]:
    """Compare where each token went with where one device sends it; each must go once."""
    for oracle in evidence.oracle:
        if not says_routes(evidence.observed, oracle.step):
            continue
        for layer, routed in oracle.routed.items():
            said = routes_of(evidence.observed, oracle.step, layer)
            yield Check(
                step=oracle.step,
                subject=_subject(layer),
                error=1.0 if said.problem else 0.0,
                allowed=0.0,
                detail=said.problem,
                position=2 * layer,
            )
            if oracle.told is None:
                yield _same_routes(evidence, oracle.step, layer, routed, said)
            else:
                yield from _near_routes(evidence, oracle.step, layer, routed)


def routes_note(evidence: Evidence) -> str:
    """Say how many tokens went elsewhere because of rounding; nothing where none could."""
    told = [oracle for oracle in evidence.oracle if oracle.told is not None]
    if not told:
        return ""
    layers = [routed for oracle in told for routed in oracle.routed.values()]
    differ = sum(
        choice_error(evidence.plan, one)[1] + keep_error(evidence.plan, one)[1] for one in layers
    )
    count = sum(one.right_BTK[..., 0].numel() for one in layers)
    return f"{differ} of {count} choices differ by rounding"


def _subject(layer: int) -> str:
    return f"layers.{layer}.mlp.router"


def _same_routes(
    evidence: Evidence, step: int, layer: int, routed: RoutedLayer, said: ObservedRoutes
) -> Check:
    differ_BT = (
        _signature(routed.picked_BTK, routed.kept_BTK)
        != _signature(said.layer.chosen_BTK, said.layer.kept_BTK)
    ).any(-1)
    count = int(differ_BT.sum())
    return Check(
        step=step,
        subject=_subject(layer),
        error=count / differ_BT.numel(),
        allowed=0.0,
        detail=_first(evidence, routed, said, differ_BT) if count else "",
        position=2 * layer + 1,
    )


def _signature(chosen_BTK: torch.Tensor, kept_BTK: torch.Tensor) -> torch.Tensor:
    """Return the experts of each token in order of number, with whether they had room."""
    return (2 * chosen_BTK + kept_BTK.long()).sort(-1).values


def _first(
    evidence: Evidence, routed: RoutedLayer, said: ObservedRoutes, differ_BT: torch.Tensor
) -> str:
    row, position = torch.nonzero(differ_BT)[0].tolist()
    went, goes = (
        _experts(one.chosen_BTK[row, position], one.kept_BTK[row, position])
        for one in (said.layer, routed)
    )
    mesh, rank = evidence.plan.mesh, int(said.rank_BT[row, position])
    return (
        f"{int(differ_BT.sum())} of {differ_BT.numel()} tokens go elsewhere: position {position} "
        f"of sequence {row} to {went} instead of {goes}, by rank {rank} ({mesh.label(rank)})"
    )


def _experts(chosen_K: torch.Tensor, kept_K: torch.Tensor) -> str:
    pairs = sorted(zip(chosen_K.tolist(), kept_K.tolist(), strict=True))
    return ", ".join(f"{expert}" if kept else f"{expert} (dropped)" for expert, kept in pairs)


def _near_routes(evidence: Evidence, step: int, layer: int, routed: RoutedLayer) -> Iterator[Check]:
    found = (
        ("scores", "tokens go elsewhere", *choice_error(evidence.plan, routed)),
        ("gates", "assignments are kept and dropped otherwise", *keep_error(evidence.plan, routed)),
    )
    for kind, what, error, count in found:
        allowed = evidence.tolerance.allowed(kind, step, f"layers.{layer}")
        yield Check(
            step=step,
            subject=_subject(layer),
            error=error,
            allowed=allowed,
            detail=f"{count} {what}, with {kind} that are {error:.2g} off" if count else "",
            position=2 * layer + 1,
        )


def loads(evidence: Evidence) -> Iterator[Check]:
    """Compare assignments by expert, drops and imbalance with those of the global batch."""
    for oracle in evidence.oracle:
        layers = oracle.routed
        yield from _all_layers_told(evidence.observed, oracle)
        for rank, said in _said(evidence.observed, oracle.step):
            for layer, load in said.loads.items():
                if layer not in layers:
                    yield _number(oracle.step, f"loads of layers.{layer} of rank {rank}", 1, 0)
                    continue
                wanted = [int(one) for one in layers[layer].counts_E]
                wrong = sum(abs(a - b) for a, b in zip(load.counts, wanted, strict=True))
                yield Check(
                    step=oracle.step,
                    subject=f"loads of layers.{layer} of rank {rank}",
                    error=wrong / max(1, sum(wanted)),
                    allowed=0.0,
                    detail=f"{list(load.counts)} instead of {wanted}" if wrong else "",
                    position=rank,
                )
                name = f"drops of layers.{layer} of rank {rank}"
                yield _number(oracle.step, name, load.dropped, layers[layer].dropped, rank)
            whole, of_all = said.summary, layers.values()
            total = sum(int(one.counts_E.sum()) for one in of_all)
            dropped, worst = sum(one.dropped for one in of_all), max(o.imbalance for o in of_all)
            yield _number(
                oracle.step, f"assignments of rank {rank}", whole.assignments, total, rank
            )
            yield _number(oracle.step, f"drops of rank {rank}", whole.dropped, dropped, rank)
            imbalance = f"imbalance of rank {rank}"
            yield _number(oracle.step, imbalance, whole.imbalance, worst, rank, allowed=1e-12)


def _all_layers_told(observed: Observed, oracle: OracleStep) -> Iterator[Check]:
    """Ask that some rank tells the load of each layer, where any rank tells any."""
    said = [one for _, one in _said(observed, oracle.step)]
    if said:
        told = {layer for one in said for layer in one.loads}
        for layer in oracle.routed:
            name = f"loads of layers.{layer}"
            yield _number(oracle.step, name, float(layer in told), 1.0)


def router_losses(evidence: Evidence) -> Iterator[Check]:
    """Compare the losses of each layer, and their sums, on every rank that says them."""
    for oracle in evidence.oracle:
        for rank, said in _said(evidence.observed, oracle.step):
            for kind in ("aux_loss", "z_loss"):
                wanted = {layer: getattr(one, kind) for layer, one in oracle.routed.items()}
                values = {f"layers.{one}": getattr(load, kind) for one, load in said.loads.items()}
                right = {f"layers.{one}": value for one, value in wanted.items()}
                values[""], right[""] = getattr(said.summary, kind), sum(wanted.values())
                for name, value in values.items():
                    yield _number(
                        oracle.step,
                        f"{kind.replace('_', ' ')} {name and f'of {name} '}of rank {rank}",
                        value,
                        right.get(name, math.nan),
                        rank,
                        allowed=evidence.tolerance.allowed(kind, oracle.step, name),
                    )


def router_state(evidence: Evidence) -> Iterator[Check]:
    """Compare what routers know after each step: biases, how they moved, and shares of loads."""
    balance = evidence.plan.mathematics.balance
    rounding = FLOAT64_TOLERANCE
    for oracle in evidence.oracle:
        if evidence.tolerance.own_precision:
            # A bias is added up in float32 at the least, once a step; a share is one division.
            rounding = FLOAT64_TOLERANCE + (oracle.step + 2) * unit_roundoff("fp32")
        for rank, said in _said(evidence.observed, oracle.step):
            before = _state_before(evidence.observed, oracle.step, rank)
            pairs = (
                ("bias", said.biases, oracle.routing_after.biases),
                ("share", said.shares, oracle.routing_after.shares),
            )
            for kind, held, right in pairs:
                for layer, vector in held.items():
                    yield _vector(
                        oracle.step,
                        f"{kind} of layers.{layer} of rank {rank}",
                        vector,
                        right.get(layer),
                        rank,
                        rounding,
                    )
            if balance.has_bias:
                for layer, vector in said.biases.items():
                    yield _moves(oracle, layer, rank, vector, before.get(layer))


def _state_before(observed: Observed, step: int, rank: int) -> Mapping[int, Sequence[float]]:
    """Return the biases that a rank said after the step before; none at first."""
    if step == 0:
        return {}
    said = observed.reports(step - 1)[rank].routing
    return {} if said is None else said.biases


def _vector(
    step: int,
    subject: str,
    said: Sequence[float],
    right: torch.Tensor | None,
    rank: int,
    allowed: float,
) -> Check:
    error = math.inf
    if right is not None and len(said) == len(right):
        off = (torch.tensor(said, dtype=torch.float64) - right.double()).norm()
        scale = float(right.double().norm())
        error = float(off) / scale if scale else float(off)
    detail = "" if error <= allowed else f"{list(said)} instead of {_numbers(right)}"
    return Check(
        step=step, subject=subject, error=error, allowed=allowed, detail=detail, position=rank
    )


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
    last_E = (
        torch.zeros_like(now_E) if before is None else torch.tensor(before, dtype=torch.float64)
    )
    moved_E = torch.sign(now_E - last_E)
    wrong = torch.nonzero(moved_E != right_E).flatten().tolist()
    return Check(
        step=oracle.step,
        subject=f"move of biases of layers.{layer} of rank {rank}",
        error=len(wrong) / len(now_E),
        allowed=0.0,
        detail=f"those of experts {wrong} moved otherwise" if wrong else "",
        position=rank,
    )


def _numbers(vector: torch.Tensor | None) -> list[float]:
    return [] if vector is None else [float(one) for one in vector]


def _said(observed: Observed, step: int) -> Iterator[tuple[int, RoutingSaid]]:
    for rank, report in enumerate(observed.reports(step)):
        if report.routing is not None:
            yield rank, report.routing


def _number(
    step: int,
    subject: str,
    said: float,
    right: float,
    rank: int = 0,
    *,
    allowed: float = 0.0,
) -> Check:
    off = abs(said - right)
    error = off / abs(right) if right else off
    detail = "" if error <= allowed else f"{said:.10g} instead of {right:.10g}"
    return Check(
        step=step, subject=subject, error=error, allowed=allowed, detail=detail, position=rank
    )
