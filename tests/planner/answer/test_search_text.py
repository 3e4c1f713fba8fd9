"""The page of a search: what it tells in 80 columns, and when it warns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.cli.main import main
from echelon.planner.answer.search_text import answer_text
from echelon.planner.search.search import SearchResult, search
from tests.planner.requests import small


def _with_memory(answer: SearchResult, count: float) -> SearchResult:
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


def test_the_page_fits_80_columns_and_tells_all(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--cluster",
        "8xh100",
        "--detail",
        "--objective",
        "front",
        "--price",
        "2",
        "--pin",
        "tp=1,2,4",
    ]
    assert main(["plan", "llama3-8b", *flags]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert max(map(len, output.out.splitlines())) <= 80
    for part in (
        "llama3-8b: 8.03B parameters, 32 blocks",
        "8xh100: 8 x H100 SXM 80 GB",
        "assumed ",
        "pinned    tp=1,2,4",
        "trainer   echelon",
        "step s  tok/s",
        "legal plans in",
        "plan-fits-memory",
        "for a million tokens",
        "No other plan has less",
        "sum (step)",
    ):
        assert part in output.out
