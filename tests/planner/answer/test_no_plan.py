"""A search in which nothing fits: its page within its columns, and its object."""

from __future__ import annotations

import json
import re

import pytest

from echelon.cli.main import main
from echelon.core.units import binary_bytes
from echelon.planner.answer.why_text import fixes_text, leanest_json, no_plan_text
from echelon.planner.explain.no_plan import LeanestPlan, leanest_plan
from echelon.planner.search.search import search
from tests.planner.requests import small


@pytest.fixture(scope="module")
def leanest() -> LeanestPlan:
    request = small(pins=["tp=1", "zero=0", "pp=1"], memory_gb=2.5)
    answer = search(request)
    assert answer.best is None
    found = leanest_plan(answer)
    assert found is not None
    return found


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_page_has_the_numbers_and_every_change(leanest: LeanestPlan, columns: int) -> None:
    text = no_plan_text(leanest, columns=columns)
    assert max(map(len, text.splitlines())) <= columns
    words = " ".join(text.split())
    over = binary_bytes(leanest.over_bytes)
    assert f"{over} too little" in words
    assert f"{leanest.terms[0][0]}, {binary_bytes(leanest.terms[0][1])}" in words
    assert all(name in text for name, count in leanest.terms if count > 0.01 * leanest.over_bytes)
    assert leanest.fixes
    assert all(binary_bytes(fix.estimate.bytes_held) in words for fix in leanest.fixes)


def test_no_change_is_told_as_none(leanest: LeanestPlan) -> None:
    assert "No change" in fixes_text((), leanest.request.cluster.device)


def test_the_object_has_the_same_numbers(leanest: LeanestPlan) -> None:
    told = json.loads(json.dumps(leanest_json(leanest)))
    assert told["over_bytes"] == told["plan"]["held_bytes"] - told["memory_bytes"] > 0
    assert told["largest_term"] == max(told["plan"]["bytes"], key=told["plan"]["bytes"].get)
    assert [fix["type"] for fix in told["fixes"]] == [fix.flags for fix in leanest.fixes]
    assert all(fix["held_bytes"] < told["plan"]["held_bytes"] for fix in told["fixes"])


def test_the_command_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "qwen3-4b", "--cluster", "1xrtx4090", "--pin", "offload=none"]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert re.search(r"^fits +no: none of [\d,]+ legal plans$", printed.out, re.M)
    assert "What fits" in printed.out
    assert "error[plan-fits-memory]: none of " in printed.err
    assert main([*command, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["error"] is True
    assert told["problems"][0]["works"] == [fix["type"] for fix in told["leanest"]["fixes"]]
