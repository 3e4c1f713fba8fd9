"""The page of a search warns where the fewest devices have hardly enough memory."""

from __future__ import annotations

from dataclasses import replace

from echelon.cli.plan_search_text import answer_text
from echelon.planner.search import Answer, search
from tests.planner.requests import small


def _with_memory(answer: Answer, count: float) -> Answer:
    cluster = answer.request.cluster
    device = replace(cluster.device, memory_bytes=int(count))
    request = replace(answer.request, cluster=replace(cluster, device=device))
    return replace(answer, request=request)


def test_few_devices_that_are_nearly_full_are_warned_of() -> None:
    answer = search(replace(small(objective="devices"), top=1))
    assert answer.best is not None
    held = answer.best.estimate.bytes_held
    full = answer_text(_with_memory(answer, held + 1))
    assert "warning   near the limit" in full
    assert max(map(len, full.splitlines())) <= 80
    assert "near the limit" not in answer_text(_with_memory(answer, 2 * held))
