"""Every question is another world, in which the plan of now is legal."""

from __future__ import annotations

from dataclasses import replace

from echelon.planner.explain.what_if import what_if_requests, with_batch
from echelon.planner.search.search import search
from tests.planner.requests import small


def test_every_question_is_another_world() -> None:
    answer = search(replace(small(devices=16, memory_gb=4.0), top=1))
    assert answer.best is not None
    asked = [*what_if_requests(answer.request, answer.best.candidate)]
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
        assert question.current_plan.devices in (16, 32)
    more = next(question for question in asked if question.name.startswith("devices"))
    assert more.request.cluster.num_devices == 32


def test_a_plan_with_another_batch_is_legal() -> None:
    request = with_batch(small(memory_gb=4.0), 48)
    best = search(replace(request, top=1)).best
    assert best is not None
    assert best.plan is not None
    assert best.plan.mathematics.global_sequences == 48
