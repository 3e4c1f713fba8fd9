"""The pages of reasons and fixes: within 80 columns, every number with its band; the JSON too."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from echelon.planner.answer.search_json import explanation_json
from echelon.planner.answer.why_text import explanation_text
from echelon.planner.explain.why import explain_result
from echelon.planner.search.search import search
from tests.planner.requests import small


@pytest.mark.slow
def test_reasons_as_text_and_as_json() -> None:
    pins = ["cp=1", "microbatch=1"]
    told = explain_result(search(replace(small(devices=4, memory_gb=4.0, pins=pins), top=1)))
    text = explanation_text(told)
    assert max(map(len, text.splitlines())) <= 80
    for part in ("Why this plan", "Why not another plan", "What would change the plan"):
        assert part in text
    assert f"({told.why.step.low:.4g} to {told.why.step.high:.4g})" in text
    assert all(f"  {one.change}" in text for one in told.neighbours)
    assert all(one.name in text for one in told.changes)
    found = json.loads(json.dumps(explanation_json(told)))
    assert found["searched"] == "everything"
    assert len(found["neighbours"]) == len(told.neighbours)
    assert len(found["changes"]) == len(told.changes)
    assert found["step_s"]["low"] <= found["step_s"]["value"] <= found["step_s"]["high"]
    refused = [one for one in found["neighbours"] if one["at_its_best"]["verdict"] == "refused"]
    assert all(one["at_its_best"]["problems"] for one in refused)
