"""What ranks say of their experts is judged: where tokens go, loads, losses of routers, biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from echelon.core.experts import Balance
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.proof.oracle.batches import global_batch
from echelon.proof.run import prove
from echelon.proof.verdict import Proof
from echelon.training.recorders import RecordedRouting
from echelon.training.subject import EngineReport, EngineSubject
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of

BALANCE = Balance(kind="both", aux_coefficient=0.1, z_coefficient=0.01, bias_rate=0.05)
PLAN = plan_of(model=DEEPSEEK, dp_shard=2, ep=2, balance=BALANCE)
DROPPING = replace(BALANCE, capacity_factor=1.0, drop="score")

Lie = Callable[[RecordedRouting], RecordedRouting]


class Liar(EngineSubject):
    """Train rightly, and say something else of the routing on rank 1."""

    def __init__(self, plan: Plan, place: RankContext, lie: Lie) -> None:
        """Build the engine."""
        super().__init__(plan, place)
        self.lie, self.rank = lie, place.rank

    def step(self, batch: Any, step: int) -> EngineReport:
        """Take one step."""
        report = super().step(batch, step)
        if self.rank == 0 or report.routing is None:
            return report
        return replace(report, routing=self.lie(report.routing))


def of_another_expert(place: RankContext, plan: Plan) -> Liar:
    """Say that the first token went to the expert beside its own."""

    def lie(said: RecordedRouting) -> RecordedRouting:
        first = said.routes[0]
        other = next(e for e in range(8) if e not in first.chosen[0])
        chosen = ((other, *first.chosen[0][1:]), *first.chosen[1:])
        return replace(said, routes=(replace(first, chosen=chosen), *said.routes[1:]))

    return Liar(plan, place, lie)


def of_fewer_tokens(place: RankContext, plan: Plan) -> Liar:
    """Leave out what was routed in a microbatch."""
    return Liar(plan, place, lambda said: replace(said, routes=said.routes[1:]))


def of_tokens_twice(place: RankContext, plan: Plan) -> Liar:
    """Say what was routed in a microbatch two times."""
    return Liar(plan, place, lambda said: replace(said, routes=(*said.routes, said.routes[0])))


def of_doubled_loads(place: RankContext, plan: Plan) -> Liar:
    """Count every assignment twice."""

    def lie(said: RecordedRouting) -> RecordedRouting:
        loads = {
            layer: replace(load, counts=tuple(2 * count for count in load.counts))
            for layer, load in said.loads.items()
        }
        return replace(said, loads=loads)

    return Liar(plan, place, lie)


def of_imbalance(place: RankContext, plan: Plan) -> Liar:
    """Take the mean load of the layers for the worst."""

    def lie(said: RecordedRouting) -> RecordedRouting:
        return replace(said, summary=replace(said.summary, imbalance=1.0))

    return Liar(plan, place, lie)


def of_a_loss_by_degree(place: RankContext, plan: Plan) -> Liar:
    """Divide the auxiliary loss by the number of ranks."""

    def lie(said: RecordedRouting) -> RecordedRouting:
        return replace(said, summary=replace(said.summary, aux_loss=said.summary.aux_loss / 2))

    return Liar(plan, place, lie)


def of_a_z_loss_of_one_layer(place: RankContext, plan: Plan) -> Liar:
    """Leave the z-loss of each layer out."""

    def lie(said: RecordedRouting) -> RecordedRouting:
        loads = {layer: replace(load, z_loss=0.0) for layer, load in said.loads.items()}
        return replace(said, loads=loads)

    return Liar(plan, place, lie)


def of_biases_that_rise(place: RankContext, plan: Plan) -> Liar:
    """Move biases with the load, not against it."""

    def lie(said: RecordedRouting) -> RecordedRouting:
        biases = {layer: tuple(-one for one in held) for layer, held in said.biases.items()}
        return replace(said, biases=biases)

    return Liar(plan, place, lie)


def of_stale_shares(place: RankContext, plan: Plan) -> Liar:
    """Keep the shares of before the first step."""

    def lie(said: RecordedRouting) -> RecordedRouting:
        return replace(said, shares={layer: (1 / 8,) * 8 for layer in said.shares})

    return Liar(plan, place, lie)


def prove_liar(pool: RankPool, name: str) -> Proof:
    """Return the proof of a liar, in float64."""
    return prove(PLAN, run_ranks=pool.run, subject=f"{__name__}:{name}", own_precision=False)


@pytest.mark.quick(
    "of_stale_shares-prove-router-biases-[0.125, 0.125",
    "of_another_expert-prove-routes-1 of 32 tokens go elsewhere: position 0 of",
)
@pytest.mark.parametrize(
    ("name", "rule", "told"),
    [
        ("of_another_expert", "prove-routes", "1 of 32 tokens go elsewhere: position 0 of"),
        ("of_fewer_tokens", "prove-routes", "8 of 32 tokens are routed by no rank"),
        ("of_tokens_twice", "prove-routes", "8 of 32 tokens are routed more than once"),
        ("of_doubled_loads", "prove-expert-loads", "instead of ["),
        ("of_imbalance", "prove-expert-loads", "1 instead of "),
        ("of_a_loss_by_degree", "prove-router-losses", "instead of 0.1"),
        ("of_a_z_loss_of_one_layer", "prove-router-losses", "0 instead of 0.0"),
        ("of_biases_that_rise", "prove-router-biases", "instead of ["),
        ("of_stale_shares", "prove-router-biases", "[0.125, 0.125"),
    ],
)
def test_what_is_said_wrong_of_experts_is_told(
    rank_pool: RankPool, name: str, rule: str, told: str
) -> None:
    proof = prove_liar(rank_pool, name)
    wrong = {claim.rule.id: claim for claim in proof.passes[0].claims if not claim.holds}
    assert list(wrong) == [rule]
    first = wrong[rule].failures[0]
    assert first.step == 0
    assert told in first.detail


def test_all_that_is_said_of_experts_is_compared(rank_pool: RankPool) -> None:
    proof = prove(PLAN, run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    compared = {claim.rule.id: claim.compared for claim in proof.passes[0].claims}
    # One layer with experts, three steps, two ranks: one check of who routed, one of where to.
    assert compared["prove-routes"] == 5 * 2
    assert compared["prove-expert-loads"] == 5 * (1 + 2 * 5)
    assert compared["prove-router-losses"] == 5 * 2 * 2 * 2
    assert compared["prove-router-biases"] == 5 * 2 * 3


def test_a_dense_model_has_nothing_said_of_experts(rank_pool: RankPool) -> None:
    proof = prove(plan_of(dp_shard=2), run_ranks=rank_pool.run, own_precision=False)
    rules = {claim.rule.id for claim in proof.passes[0].claims}
    assert not rules & {
        *("prove-routes", "prove-expert-loads", "prove-router-losses", "prove-router-biases")
    }


def test_tokens_that_would_tie_are_told_apart() -> None:
    plan = plan_of(model=MIXTRAL, documents="separate", sequence_length=32, balance=DROPPING)
    plain = plan_of(model=MIXTRAL, documents="separate", sequence_length=32, balance=BALANCE)
    neighbours = 0
    for step in range(20):
        batch, other = global_batch(plan, step), global_batch(plain, step)
        assert batch.documents == other.documents
        assert batch.documents is not None
        for row, starts in zip(batch.inputs_BT, batch.documents, strict=True):
            assert bool((row[1:] != row[:-1]).all())
            assert len({int(row[start]) for start in starts}) == len(starts)
        neighbours += int((other.inputs_BT[:, 1:] == other.inputs_BT[:, :-1]).sum())
    assert neighbours
