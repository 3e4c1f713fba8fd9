"""An answer: plans that are Plans, timed event by event, under every objective."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from echelon.cost.seconds.from_plan import layout_numbers_from_plan
from echelon.cost.seconds.stages import balanced_stages, simulated_step_s
from echelon.cost.seconds.unit_times import durations_from_stages
from echelon.planner.predict.estimate import estimate_by_events, estimate_plan, with_exact_bytes
from echelon.planner.search import ranked as ranking
from echelon.planner.search import search as searching
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.ranked import (
    candidate_unit_times,
    cost_inputs_from_candidate,
    pipeline_order,
)
from echelon.planner.search.request import make_request
from echelon.planner.search.search import (
    anything_fits,
    clusters_of_devices,
    least_devices,
    pareto_front,
    planned,
    search,
    smallest_that_fits,
    without_host,
    world_sizes,
)
from echelon.planner.search.sweep import SearchSweep
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.simulate import simulate
from tests.planner.requests import MIXTURE, small
from tests.planner.search.smallest_walk import cases, compare


def test_the_answer_is_plans_that_take_what_it_says() -> None:
    request = small(memory_gb=4.0)
    answer = search(request)
    assert answer.best is not None
    assert len(answer.ranked) == request.top
    steps = [one.estimate.step_s for one in answer.ranked]
    assert steps == pytest.approx(sorted(steps), rel=1e-3)
    for one in answer.ranked:
        assert one.plan is not None
        assert layout_numbers_from_plan(one.plan) == one.candidate.numbers()
        assert one.simulated == (one.candidate.mesh.pp > 1)
        found = with_exact_bytes(one.plan, estimate_by_events(one.plan, request.software))
        assert found.seconds == estimate_plan(one.plan).seconds == one.estimate.seconds
        assert found.bytes == estimate_plan(one.plan).bytes == one.estimate.bytes
        assert found.bytes_held <= request.memory_bytes
        if one.stages:
            assert one.plan.layout.pipeline.stages == one.stages
        assert one.estimate.mfu == pytest.approx(
            one.estimate.model_flops / one.estimate.step_s / (8 * one.estimate.peak_flops)
        )
        low, high = one.estimate.step_band
        assert low <= one.estimate.step_s <= high
        assert one.estimate.bytes_band[0] <= one.estimate.bytes_held
        assert one.estimate.bytes_held <= one.estimate.bytes_band[1]


def test_experts_are_searched_too() -> None:
    answer = search(replace(small(settings=MIXTURE, memory_gb=6.0), top=2))
    assert answer.best is not None
    assert all(one.plan is not None and one.plan.model.experts for one in answer.ranked)


def test_pins_are_kept() -> None:
    pins = ["tp=2", "schedule=1f1b", "zero=1", "microbatch=1", "recompute=full", "pp=2"]
    answer = search(small(pins=pins))
    assert answer.best is not None
    for one in (*answer.ranked, *answer.other_finalists):
        choice = one.candidate
        assert (choice.mesh.tp, choice.mesh.pp, choice.zero, choice.microbatch) == (
            2,
            2,
            1,
            1,
        )
        assert (choice.schedule, choice.recompute) == ("1f1b", 1)


def test_objectives() -> None:
    request = small(memory_gb=4.0)
    assert world_sizes(request) == (8,)
    few = replace(request, objective="devices")
    assert world_sizes(few) == (1, 2, 4, 8)
    fewest = search(few).best
    assert fewest is not None
    before = world_sizes(few)[: world_sizes(few).index(fewest.candidate.devices)]
    for world in before:
        sweep = SearchSweep(few, keep=1)
        sweep.walk(world)
        assert not sweep.best.found
    much = search(replace(request, objective="throughput")).best
    short = search(request).best
    assert much is not None
    assert short is not None
    assert much.estimate.tokens_per_s_per_device >= short.estimate.tokens_per_s_per_device
    assert short.estimate.step_s <= much.estimate.step_s
    assert much.estimate.token_price(3.6) == pytest.approx(
        1e3 / much.estimate.tokens_per_s_per_device
    )


def test_optimizer_state_goes_to_the_host_only_where_nothing_else_fits() -> None:
    roomy = search(small(memory_gb=4.0))
    assert not roomy.offload
    tight = small(memory_gb=80.0, devices=1)
    needed = SearchSweep(tight)
    needed.walk(1)
    offloaded = SearchSweep(tight, offload=True)
    offloaded.walk(1)
    between = (needed.least_bytes + offloaded.least_bytes) / 2e9
    answer = search(small(memory_gb=between, devices=1))
    assert answer.offload
    assert answer.best is not None
    assert answer.best.plan is not None
    assert answer.best.plan.layout.zero.optimizer_offload == "host"


def test_an_interrupted_search_answers_with_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    look = SearchSweep._look
    calls: list[int] = []

    def once(self: SearchSweep, *arguments: object) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        look(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SearchSweep, "_look", once)
    answer = search(small())
    assert answer.interrupted
    assert answer.best is not None
    assert answer.best.plan is not None
    assert answer.num_legal > answer.num_computed > 0


def test_a_long_search_has_an_answer_from_its_first_second(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = SearchSweep.walk
    walked: list[object] = []

    def once(self: SearchSweep, world: int) -> None:
        walked.append(self.request.pins.values_of("schedule"))
        if len(walked) > 1:
            raise KeyboardInterrupt
        walk(self, world)

    monkeypatch.setattr(SearchSweep, "walk", once)
    monkeypatch.setattr(searching, "MANY", 8)
    answer = search(small(settings=MIXTURE))
    assert walked == [("1f1b",), None]
    assert answer.interrupted
    assert answer.best is not None
    assert answer.best.candidate.schedule == "1f1b"


def test_an_interrupt_after_the_walk_leaves_the_best_by_closed_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(ranking, "with_simulated_terms", never)
    answer = search(small(pins=["pp=2"]))
    assert answer.interrupted
    assert len(answer.ranked) == 1
    assert answer.ranked[0].plan is not None
    assert not answer.ranked[0].simulated


def test_a_front_has_no_plan_that_another_one_beats() -> None:
    request = small(memory_gb=4.0)
    front = pareto_front(request)
    costs = [(one.estimate.step_s, one.estimate.bytes_held, one.candidate.devices) for one in front]
    assert len(costs) >= 2
    assert not any(
        one != other and all(a <= b for a, b in zip(one, other, strict=True))
        for one in costs
        for other in costs
    )
    fastest = search(replace(request, top=1)).best
    assert fastest is not None
    assert min(costs)[0] <= fastest.estimate.step_s * 1.05


def _choice(schedule: str, virtual: int, microbatches: int) -> CandidatePlan:
    request = small(pins=[f"schedule={schedule}", "pp=3", "tp=1", "cp=1", f"virtual={virtual}"])
    sweep = SearchSweep(request)
    sweep.walk(3)
    choice = sweep.best.ranked()[0].candidate()
    return replace(choice, microbatches=microbatches)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-v", 2)]
)
def test_many_microbatches_are_a_few_and_the_same_again(schedule: str, virtual: int) -> None:
    request = small()
    many = _choice(schedule, virtual, 48)
    times = candidate_unit_times(request, many, cost_inputs_from_candidate(request, many))
    order = pipeline_order(many)
    stages = balanced_stages(order, times, request.model.layers)
    assert sorted(block for stage in stages for block in stage) == [*range(6)]
    plan = request.job(many.settings(has_experts=False)).plan
    layout = replace(plan.layout, pipeline=replace(plan.layout.pipeline, stages=stages))
    numbers = replace(plan.mathematics, global_sequences=48 * many.microbatch * many.mesh.dp)
    whole = simulate(
        schedule_from_plan(replace(plan, layout=layout, mathematics=numbers)),
        durations_from_stages(stages, times),
    )
    assert simulated_step_s(order, times, stages) == pytest.approx(whole.makespan_s, rel=0.01)


def test_there_are_forty_cases() -> None:
    assert len(cases()) == len(set(cases())) == 40


@pytest.mark.quick("('llama2-7b', 'rtx4090', 16)")
@pytest.mark.parametrize("case", cases()[4::17], ids=str)
def test_no_smaller_cluster_plans(case: tuple[str, str, int]) -> None:
    compared = compare(case)
    assert compared.found == compared.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=str)
def test_no_smaller_cluster_plans_in_any_of_forty_cases(case: tuple[str, str, int]) -> None:
    compared = compare(case)
    assert compared.found == compared.exhaustive


def test_clusters_are_parts_of_a_node_and_then_whole_nodes() -> None:
    names = [one.name for one in islice(clusters_of_devices("8xh100+hdr", 6), 5)]
    assert names == ["6xh100+hdr", "7xh100+hdr", "8xh100+hdr", "16xh100+hdr", "24xh100+hdr"]


@pytest.mark.parametrize("model", ["llama3-8b", "llama2-70b", "mixtral-8x7b"])
def test_nothing_fits_on_fewer_devices_than_the_weights_need(model: str) -> None:
    request = make_request(model, cluster="8xrtx4090")
    least = least_devices(request)
    assert least > 0
    for cluster in clusters_of_devices("1xrtx4090"):
        if cluster.num_devices >= least:
            break
        assert not anything_fits(make_request(model, cluster=cluster.name))


def test_fewer_devices_may_do_what_more_cannot() -> None:
    """Five pipeline ranks have the whole vocabulary on one of them, two times two have half."""
    requests = [make_request("llama3-8b", cluster=f"{count}xrtx4090") for count in (4, 5)]
    assert [search(replace(one, top=1)).best is not None for one in requests] == [True, False]
    found = smallest_that_fits(requests[1])
    assert found is not None
    assert (found.name, found.num_devices, found.offload) == ("4xrtx4090", 4, True)


def test_optimizer_state_stays_on_devices_where_that_is_asked_for() -> None:
    request = make_request("llama3-8b", cluster="1xa100-40gb")
    found = smallest_that_fits(without_host(request))
    assert found is not None
    assert (found.name, found.offload) == ("4xa100-40gb", False)
    assert smallest_that_fits(without_host(request), most=3) is None


def test_what_fits_only_just_is_left_out_where_room_is_asked_for() -> None:
    request = make_request("llama3-8b", cluster="1xh100")
    plan = planned(request)
    assert plan is not None
    assert plan.plan is not None
    assert plan.estimate.bytes_held <= request.memory_bytes
    assert planned(request, room=0.5) is None


def test_devices_that_are_never_enough_end_the_search() -> None:
    request = make_request("llama3-8b", cluster="8xcpu", pins=["cp=1", "tp=1", "pp=1"])
    assert smallest_that_fits(request) is None
