"""What changes the answer really does: the same search, made in the changed world, agrees."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest

from echelon.planner.explain.again import Again, near_pins
from echelon.planner.explain.bands import step_of, terms_of
from echelon.planner.explain.differences import differences
from echelon.planner.explain.pool import elsewhere, pool_of
from echelon.planner.explain.sensitivity import sensitivity
from echelon.planner.explain.what_if import WhatIf, what_ifs, with_batch, with_memory
from echelon.planner.explain.why import WORK, why
from echelon.planner.request import Request
from echelon.planner.search import Answer, search
from tests.planner.requests import small


@lru_cache(maxsize=1)
def _answer() -> Answer:
    return search(replace(small(memory_gb=4.0), top=1))


def test_less_memory_changes_the_plan_to_what_a_search_finds() -> None:
    answer = _answer()
    assert answer.best is not None
    choice = answer.best.choice
    tight = with_memory(answer.request, 0.9 * answer.best.estimate.bytes_held)
    (change,) = sensitivity(answer, [WhatIf(name="memory", request=tight, same=choice)])
    found = search(replace(tight, top=1)).best
    assert found is not None
    assert change.best is not None
    assert change.gain_same is None
    assert change.differences
    assert change.best.estimate.bytes_held <= tight.memory_bytes
    assert change.best.estimate.step_s == pytest.approx(found.estimate.step_s, rel=5e-3)
    assert change.gain == pytest.approx(
        answer.best.estimate.step_s / change.best.estimate.step_s - 1
    )


def test_slow_links_change_the_plan_to_what_a_search_finds() -> None:
    answer = _answer()
    assert answer.best is not None
    cluster = answer.request.cluster
    links = tuple(replace(link, bandwidth=link.bandwidth / 200) for link in cluster.links)
    slow = replace(answer.request, cluster=replace(cluster, links=links))
    question = WhatIf(name="links", request=slow, same=answer.best.choice)
    (change,) = sensitivity(answer, [question])
    found = search(replace(slow, top=1)).best
    assert found is not None
    assert change.best is not None
    assert change.gain_same is not None
    assert change.gain_same <= change.gain < 0
    assert change.best.estimate.step_s == pytest.approx(found.estimate.step_s, rel=5e-3)


def test_nothing_fits_is_said() -> None:
    answer = _answer()
    assert answer.best is not None
    none = with_memory(answer.request, 1e6)
    question = WhatIf(name="none", request=none, same=answer.best.choice)
    (change,) = sensitivity(answer, [question])
    assert change.best is None


def test_every_question_is_another_world() -> None:
    answer = search(replace(small(devices=16, memory_gb=4.0), top=1))
    assert answer.best is not None
    asked = [*what_ifs(answer.request, answer.best.choice)]
    names = [question.name for question in asked]
    assert len(set(names)) == len(names)
    for word in ("memory", "inter-node", "intra-node", "latency", "peak", "global batch"):
        assert any(name.startswith(word) for name in names)
    for question in asked:
        changed = question.request
        assert (changed.cluster, changed.mathematics) != (
            answer.request.cluster,
            answer.request.mathematics,
        )
        assert question.same.devices in (16, 32)
    more = next(question for question in asked if question.name.startswith("devices"))
    assert more.request.cluster.num_devices == 32


def test_a_plan_with_another_batch_is_legal() -> None:
    request = with_batch(small(memory_gb=4.0), 48)
    best = search(replace(request, top=1)).best
    assert best is not None
    assert best.plan is not None
    assert best.plan.mathematics.global_sequences == 48


def test_why_adds_up() -> None:
    answer = _answer()
    told = why(answer)
    assert answer.best is not None
    step = told.step.value
    every = {term.name: term.amount for term in terms_of(answer.best.estimate)}
    assert sum(amount.value for amount in every.values()) == pytest.approx(step)
    assert told.work_s == pytest.approx(sum(every[name].value for name in WORK))
    assert sum(term.amount.value for term in told.exposed) == pytest.approx(step - told.work_s)
    assert told.mfu.low <= told.mfu.value <= told.mfu.high
    assert told.ideal_s < told.work_s < step
    low, high = (
        sum(getattr(amount, side) for amount in every.values()) for side in ("low", "high")
    )
    assert low <= step_of(answer.best.estimate).low * (1 + 1e-9)
    assert high >= step_of(answer.best.estimate).high * (1 - 1e-9)


def test_memory_binds_where_it_is_short_and_not_where_there_is_plenty() -> None:
    roomy = search(replace(small(memory_gb=80.0), top=1))
    assert not [one for one in why(roomy).binding if one.kind == "memory"]
    tight = search(replace(small(memory_gb=3.0), top=1))
    assert tight.best is not None
    (bound,) = [one for one in why(tight).binding if one.kind == "memory"]
    assert bound.gain is not None
    assert roomy.best is not None
    gain = tight.best.estimate.step_s / roomy.best.estimate.step_s - 1
    assert bound.gain == pytest.approx(gain, rel=0.05)


def test_near_is_around_the_plan_and_keeps_pins() -> None:
    answer = _answer()
    assert answer.best is not None
    choice = answer.best.choice
    pins = near_pins(answer.request.pins.having("pp", 2), choice)
    assert pins.of("pp") == (2,)
    assert choice.mesh.tp in (pins.of("tp") or ())
    large = Again(replace(answer, seen=10**9), answer.request)
    found = large.search(among=[choice])
    assert found.near
    assert found.best is not None
    assert found.best.estimate.step_s <= 1.001 * answer.best.estimate.step_s
    assert found.seen < answer.seen


def test_a_large_space_is_searched_far_from_the_plan_too() -> None:
    """On a slow network a pipeline wins; on a fast one data ranks alone may."""
    slow = _linked(small(memory_gb=40.0, pins=["cp=1", "microbatch=1,2"]), 0.1)
    answer = search(replace(slow, top=1))
    assert answer.best is not None
    large = replace(answer, seen=10**9)
    now = Again(large, slow)
    pool = pool_of(large, now)
    assert len({one.choice.mesh.pp for one in pool}) > 1
    assert all(one.ratio == 1.0 for one in pool if one.choice.mesh.pp == 1)
    assert answer.best.choice in [one.choice for one in pool]
    for times in (1.0, 10.0):
        quick = _linked(slow, times)
        question = WhatIf(name="links", request=quick, same=answer.best.choice)
        (change,) = sensitivity(large, [question])
        found = search(replace(quick, top=1)).best
        assert found is not None
        assert change.best is not None
        assert change.near
        assert change.best.estimate.step_s == pytest.approx(found.estimate.step_s, rel=5e-3)


def test_plans_of_a_pool_follow_batch_and_devices() -> None:
    request = replace(small(memory_gb=4.0, pins=["cp=1", "tp=1,2", "pp=1,2"]), top=1)
    answer = replace(search(request), seen=10**9)
    assert answer.best is not None
    pool = pool_of(answer, Again(answer, answer.request))
    for question in what_ifs(answer.request, answer.best.choice):
        if not question.name.startswith(("global batch", "devices")):
            continue
        again = Again(answer, question.request)
        found = [*elsewhere(pool, answer, again, question, math.inf)]
        assert found
        total = question.request.mathematics.global_sequences
        for one in found:
            choice = one.choice
            assert choice.devices == question.request.cluster.num_devices
            assert total == choice.mesh.dp * choice.microbatch * choice.microbatches
            assert not again.problems(choice)
        assert not [*elsewhere(pool, answer, again, question, 0.0)]


def _linked(request: Request, times: float) -> Request:
    """Return the request with links so many times as fast."""
    cluster = request.cluster
    links = tuple(replace(link, bandwidth=times * link.bandwidth) for link in cluster.links)
    return replace(request, cluster=replace(cluster, links=links))


def test_differences_name_both_sides() -> None:
    answer = _answer()
    assert answer.best is not None
    choice = answer.best.choice
    other = replace(choice, zero=3, microbatch=2 * choice.microbatch)
    found = {one.name: (one.old, one.new) for one in differences(choice, other)}
    assert found == {
        "ZeRO": (str(choice.zero), "3"),
        "microbatch": (str(choice.microbatch), str(2 * choice.microbatch)),
    }
    assert differences(choice, choice) == ()
