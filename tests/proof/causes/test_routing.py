"""Wrong loads, losses and biases of routers are told by what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from echelon.core.experts import Balance
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.routing import (
    explain_loads,
    explain_router_losses,
    explain_router_state,
    explain_routes,
    router_of,
)
from echelon.proof.claims.checks import Check
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from echelon.proof.subject import (
    ReportedLoad,
    ReportedRouting,
    ReportedRoutingSummary,
    StepRecord,
)
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.replicas import replicas

BALANCE = Balance(kind="both", aux_coefficient=0.1, z_coefficient=0.01, bias_rate=0.05)
assert MIXTRAL.experts is not None
BIASED = replace(MIXTRAL, experts=replace(MIXTRAL.experts, router_bias=True))
PLAN = shrink(plan_of(model=BIASED, dp_shard=2, ep=2, balance=BALANCE), precision="fp64")
(ORACLE,) = run_oracle(PLAN, 1)
LAYER = min(ORACLE.routed)

Lie = Callable[[int, ReportedRouting], ReportedRouting]


def said() -> ReportedRouting:
    """Return what a rank says that is right."""
    layers = ORACLE.routed
    return ReportedRouting(
        routes=(),
        loads={
            layer: ReportedLoad(
                counts=one.counts_E.tolist(),
                dropped=one.dropped,
                aux_loss=one.aux_loss,
                z_loss=one.z_loss,
            )
            for layer, one in layers.items()
        },
        summary=ReportedRoutingSummary(
            assignments=sum(int(one.counts_E.sum()) for one in layers.values()),
            dropped=0,
            aux_loss=sum(one.aux_loss for one in layers.values()),
            z_loss=sum(one.z_loss for one in layers.values()),
            imbalance=max(one.imbalance for one in layers.values()),
        ),
        biases={layer: one.tolist() for layer, one in ORACLE.routing_after.biases.items()},
        shares={layer: one.tolist() for layer, one in ORACLE.routing_after.shares.items()},
    )


def saying(lie: Lie) -> PlanEvidence:
    """Return a run whose ranks say something else of their routing."""

    def report(rank: int, step: int, record: StepRecord) -> StepRecord:
        return replace(record, routing=lie(rank, said()))

    return replicas(PLAN, report=report)


def failed(what: str) -> Check:
    return Check(0, f"{what} of layers.{LAYER} of rank 0", 1.0, detail="wrong")


def counting(times: Callable[[int, int], int]) -> PlanEvidence:
    """Return a run whose ranks count the tokens of each expert in this way."""

    def lie(rank: int, right: ReportedRouting) -> ReportedRouting:
        load = right.loads[LAYER]
        counts = [times(rank, count) for count in load.counts]
        return replace(right, loads={**right.loads, LAYER: replace(load, counts=counts)})

    return saying(lie)


def test_loads_that_were_not_summed_add_up_and_others_have_a_factor() -> None:
    finding = explain_loads(counting(lambda rank, count: count - 1 if rank else 1), failed("loads"))
    assert (finding.factor, finding.axis) == ("missing sum", "dp")
    finding = explain_loads(counting(lambda _, count: 2 * count), failed("loads"))
    assert (finding.factor, finding.axis) == ("dp", "dp or microbatches")
    finding = explain_loads(counting(lambda _, count: count**2), failed("loads"))
    assert (finding.factor, finding.description) == ("none", "wrong")


def test_a_factor_in_a_loss_of_routers_is_named() -> None:
    def lie(_: int, right: ReportedRouting) -> ReportedRouting:
        return replace(right, summary=replace(right.summary, z_loss=2 * right.summary.z_loss))

    finding = explain_router_losses(saying(lie), failed("z loss"))
    assert finding.factor == "dp"
    assert finding.description.startswith("the z-loss of the global batch is 2 times")
    assert (
        explain_router_losses(saying(lambda _, right: right), failed("aux loss")).factor == "none"
    )


def test_biases_that_move_too_far_and_by_the_loads_of_one_rank_are_told() -> None:
    def lie(_: int, right: ReportedRouting) -> ReportedRouting:
        return replace(right, biases={i: [2 * b for b in one] for i, one in right.biases.items()})

    assert explain_router_state(saying(lie), failed("bias")).factor == "dp"
    right = ORACLE.routed[LAYER].picked_BTK
    own_E = right.chunk(2)[0].reshape(-1).bincount(minlength=len(said().shares[LAYER])).double()

    def local(_: int, one: ReportedRouting) -> ReportedRouting:
        return replace(one, shares={**one.shares, LAYER: (own_E / own_E.sum()).tolist()})

    finding = explain_router_state(saying(local), failed("share"))
    assert (finding.factor, finding.axis) == ("local loads", "dp")
    assert finding.description.startswith("shares are made by the loads of the tokens of one rank")


def test_routes_beside_right_losses_are_told_as_they_are() -> None:
    evidence, failure = saying(lambda _, right: right), failed("routes")
    assert explain_routes(evidence, failure) == ProofFinding("routes", "wrong")
    assert router_of(evidence, failure) == f"layers.{LAYER}.mlp.router.weight"
