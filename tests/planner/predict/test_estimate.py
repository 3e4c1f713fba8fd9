"""Terms of an estimate add up, rates follow from them, and bands hold them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.axis import Axis
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.cost.bytes.held import bytes_held_by_pool
from echelon.cost.bytes.nccl import nccl_bytes
from echelon.cost.peak import rank_peak as few_rounds
from echelon.cost.peak.rank_peak import PeakWalk
from echelon.planner.predict.estimate import estimate_plan, peak_bytes_by_place
from echelon.planner.search.ranked import (
    RankedPlan,
    estimate_candidate,
    pick_finalists,
    with_checked_plan,
)
from echelon.planner.search.request import make_request
from echelon.planner.search.search import search
from echelon.planner.search.sweep import SearchSweep
from echelon.planner.view.plan_figures import memory_rows_from_plan
from echelon.schedule.build import SCHEDULES
from tests.handbook.guides.situations import plan_of
from tests.planner.requests import MIXTURE, SMALL, small


def test_rates_follow_from_terms() -> None:
    plan = plan_of("gpt2 8xh100 mesh.dp_replicate=8")
    found = estimate_plan(plan)
    numbers = plan.mathematics
    assert found.tokens == numbers.global_sequences * numbers.sequence_length
    assert found.step_s == pytest.approx(sum(found.seconds.values()))
    assert found.tokens_per_s_per_device == pytest.approx(found.tokens / found.step_s / 8)
    assert 0 < found.mfu < 1
    hour = found.tokens_per_s_per_device * 3600
    assert found.token_price(2.0) == pytest.approx(2.0 / hour * 1e6)


def test_bands_hold_the_numbers() -> None:
    found = estimate_plan(plan_of("gpt2 8xh100 mesh.dp_shard=8 zero.stage=3"))
    low, high = found.step_band
    assert low <= found.step_s <= high
    low, high = found.bytes_band
    assert high - low == pytest.approx(2 * found.bytes["slack"])
    assert (low + high) / 2 == pytest.approx(found.bytes_held)


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


@pytest.mark.quick("settings0-pins0", "settings3-pins3", "settings6-pins6")
@pytest.mark.parametrize(("settings", "pins"), CASES)
def test_a_search_says_what_the_lists_of_its_plans_say(
    settings: tuple[str, ...], pins: tuple[str, ...]
) -> None:
    answer = search(replace(small(settings=settings, pins=pins), top=2))
    assert answer.ranked
    for one in answer.ranked:
        assert one.plan is not None
        _require_the_lists(one, one.plan)


def _require_the_lists(one: RankedPlan, plan: Plan) -> None:
    held = one.estimate.bytes
    state = held["parameters"] + held["gradients"] + held["optimizer"]
    resting = [
        bytes_held_by_pool(plan, plan.mesh.rank({Axis.PP: pp}))["device"]
        for pp in range(plan.mesh.pp)
    ]
    assert state in resting
    lists = [PeakWalk(plan).peak(plan.mesh.rank({Axis.PP: pp})).bytes for pp in range(plan.mesh.pp)]
    drawn = [sum(terms.values()) for _, terms in memory_rows_from_plan(plan)]
    assert max(drawn) == max(lists)
    software = one.estimate.inputs.software
    assert one.estimate.bytes_held == pytest.approx(
        max(drawn) * (1.0 + float(software.slack))
        + float(software.context_bytes)
        + float(nccl_bytes(one.estimate.inputs))
    )
    assert [sum(terms.values()) for terms in peak_bytes_by_place(plan)] == lists


def test_what_holds_more_than_closed_forms_say_is_recomputed_or_dropped() -> None:
    roomy = small(pins=["pp=2", "schedule=zb-v", "tp=1", "zero=0", "cp=1"])
    sweep = SearchSweep(roomy)
    sweep.walk(8)
    first = pick_finalists(roomy, sweep.best.ranked(), top=1).ranked[0]
    device = replace(roomy.cluster.device, memory_bytes=int(first.estimate.bytes_held) - 1_000_000)
    tight = replace(roomy, cluster=replace(roomy.cluster, device=device))
    picked = pick_finalists(tight, sweep.best.ranked(), top=3)
    assert picked.too_large
    assert all(one.estimate.bytes_held <= tight.memory_bytes for one in picked.ranked)
    assert first.candidate not in [one.candidate for one in picked.ranked]


def test_another_trainer_has_its_own_bytes_for_the_same_elements() -> None:
    ours = replace(small(pins=["pp=2", "schedule=1f1b", "zero=1", "tp=1"]), top=1)
    theirs = replace(ours, trainer="megatron", software=replace(ours.software, state_bytes=24.0))
    mine, other = search(ours).best, search(theirs).best
    assert mine is not None
    assert other is not None
    assert other.plan is not None
    per_weight = 12.0 if other.plan.mathematics.precision.has_master else 8.0
    exact = peak_bytes_by_place(other.plan)
    sizes = [terms["optimizer"] * 24.0 / per_weight for terms in exact]
    assert any(other.estimate.bytes["optimizer"] == pytest.approx(size) for size in sizes)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama3-70b"])
def test_closed_forms_know_the_state_that_travels_from_the_host(model: str) -> None:
    request = make_request(model, cluster="8xh100", pins=["offload=host", "pp=1", "zero=1"])
    sweep = SearchSweep(request, offload=True)
    sweep.walk(8)
    choice = sweep.best.ranked()[0].candidate()
    closed = RankedPlan(
        candidate=choice, estimate=estimate_candidate(request, choice), simulated=False
    )

    def passing(one: RankedPlan) -> float:
        return one.estimate.bytes["buffers"] + one.estimate.bytes["gathered"]

    # Two buckets of the state of a block, or of its experts, are several GB.
    assert passing(closed) > 3e9
    assert passing(closed) == pytest.approx(passing(with_checked_plan(request, closed)), rel=0.1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("extra", [0, 1, 3])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_few_rounds_of_a_pipeline_have_the_peak_of_many(
    schedule: str, pp: int, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = SCHEDULES[schedule]
    virtual = next((one for one in (1, 2) if builder.fits_stages(one * pp, pp)), None)
    microbatches = 12 * pp + extra * builder.microbatch_multiple
    if virtual is None or not _may_run(schedule, pp, microbatches):
        pytest.skip("the schedule has no step of so many microbatches")
    settings = [
        f"mesh.pp={pp}",
        "model.layers=8",
        f"pipeline.schedule={schedule}",
        f"pipeline.virtual_stages={virtual}",
        f"batch.global_sequences={microbatches}",
        "batch.microbatch_sequences=1",
    ]
    try:
        plan = load_job("nano", settings).plan
    except ConfigError:
        pytest.skip("the schedule has no step of so many microbatches")
    few = peak_bytes_by_place(plan)
    monkeypatch.setattr(few_rounds, "ROUNDS", microbatches)
    assert few == peak_bytes_by_place(plan)


def _may_run(schedule: str, pp: int, microbatches: int) -> bool:
    builder = SCHEDULES[schedule]
    return (
        microbatches % builder.microbatch_multiple == 0
        and microbatches >= builder.minimum_microbatches(pp)
    )
