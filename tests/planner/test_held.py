"""Finalists hold what the lists of `cost/` say of their Plans, to the byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.activations import RankActivations
from echelon.cost.bytes_held import bytes_held_by_pool
from echelon.cost.terms import HeldTerm
from echelon.cost.transient import held_at_most
from echelon.planner.finalists import pick
from echelon.planner.held import IN_ACTIVATIONS, held_by_place
from echelon.planner.ranked import Ranked, as_plan, estimate_choice
from echelon.planner.request import make_request
from echelon.planner.search import search
from echelon.planner.sweep import Sweep
from echelon.planner.view.of_plan import rows_of
from tests.planner.requests import MIXTURE, SMALL, small

CASES = (
    (SMALL, ("pp=4", "schedule=1f1b", "recompute=none")),
    (SMALL, ("pp=2", "schedule=zb-v", "recompute=full")),
    (SMALL, ("pp=2", "schedule=interleaved-1f1b", "virtual=3", "tp=2", "zero=1")),
    (SMALL, ("pp=2", "schedule=zb-h2", "recompute=full/2")),
    (SMALL, ("pp=2", "schedule=dualpipe-v", "microbatch=1")),
    (SMALL, ("pp=2", "schedule=gpipe", "zero=2")),
    (SMALL, ("pp=1", "zero=3", "cp=2")),
    (MIXTURE, ("pp=2", "ep=2", "schedule=zb-h1")),
    (MIXTURE, ("pp=2", "schedule=zb-v", "ep=2", "tp=1")),
)


@pytest.mark.parametrize(("settings", "pins"), CASES)
def test_a_search_says_what_the_lists_of_its_plans_say(
    settings: tuple[str, ...], pins: tuple[str, ...]
) -> None:
    answer = search(replace(small(settings=settings, pins=pins), top=2))
    assert answer.ranked
    for one in answer.ranked:
        assert one.plan is not None
        _require_the_lists(one, one.plan)


def _require_the_lists(one: Ranked, plan: Plan) -> None:
    held = one.estimate.bytes
    state = held["parameters"] + held["gradients"] + held["optimizer"]
    resting, peaks = [], []
    for pp in range(plan.mesh.pp):
        rank = plan.mesh.rank({Axis.PP: pp})
        resting.append(bytes_held_by_pool(plan, rank)["device"])
        walked = RankActivations(plan, rank).actions()
        peaks.append(max(float(np.max(action.peak)) for action in walked))
    assert state in resting
    assert held["activations"] == peaks[resting.index(state)] or held["activations"] in peaks
    lists = [
        rests + peak + sum(term.bytes for term in held_at_most(plan, pp) if _is_beside(term))
        for pp, (rests, peak) in enumerate(zip(resting, peaks, strict=True))
    ]
    drawn = [sum(terms.values()) for _, terms in rows_of(plan)]
    assert max(drawn) == max(lists)
    software = one.estimate.work.software
    assert one.estimate.bytes_held == pytest.approx(
        max(drawn) * (1.0 + float(software.slack)) + float(software.context_bytes)
    )
    assert [sum(terms.values()) for terms in held_by_place(plan)] == lists


def _is_beside(term: HeldTerm) -> bool:
    return term.pool == "device" and term.name not in IN_ACTIVATIONS


def test_what_holds_more_than_closed_forms_say_is_recomputed_or_dropped() -> None:
    roomy = small(pins=["pp=2", "schedule=zb-v", "tp=1", "zero=0", "cp=1"])
    sweep = Sweep(roomy)
    sweep.walk(8)
    first = pick(roomy, sweep.best.ranked(), top=1).ranked[0]
    device = replace(roomy.cluster.device, memory_bytes=int(first.estimate.bytes_held) - 1_000_000)
    tight = replace(roomy, cluster=replace(roomy.cluster, device=device))
    picked = pick(tight, sweep.best.ranked(), top=3)
    assert picked.too_large
    assert all(one.estimate.bytes_held <= tight.memory_bytes for one in picked.ranked)
    assert first.choice not in [one.choice for one in picked.ranked]


def test_another_trainer_has_its_own_bytes_for_the_same_elements() -> None:
    ours = replace(small(pins=["pp=2", "schedule=1f1b", "zero=1", "tp=1"]), top=1)
    theirs = replace(ours, trainer="megatron", software=replace(ours.software, state_bytes=24.0))
    mine, other = search(ours).best, search(theirs).best
    assert mine is not None
    assert other is not None
    assert other.plan is not None
    per_weight = 12.0 if other.plan.mathematics.precision.has_master else 8.0
    exact = held_by_place(other.plan)
    sizes = [terms["optimizer"] * 24.0 / per_weight for terms in exact]
    assert any(other.estimate.bytes["optimizer"] == pytest.approx(size) for size in sizes)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama3-70b"])
def test_closed_forms_know_the_state_that_travels_from_the_host(model: str) -> None:
    request = make_request(model, cluster="8xh100", pins=["offload=host", "pp=1"])
    sweep = Sweep(request, offload=True)
    sweep.walk(8)
    choice = sweep.best.ranked()[0].choice()
    closed = Ranked(choice=choice, estimate=estimate_choice(request, choice), simulated=False)

    def passing(one: Ranked) -> float:
        return one.estimate.bytes["buffers"] + one.estimate.bytes["gathered"]

    # Two buckets of the state of a block, or of its experts, are several GB.
    assert passing(closed) > 4e9
    assert passing(closed) == pytest.approx(passing(as_plan(request, closed)), rel=0.1)
