"""The pages of reasons and fixes: within 80 columns, every number with its band; the JSON too."""

from __future__ import annotations

import json
from dataclasses import replace

from echelon.cli.plan_why import explanation_text, fixes_text
from echelon.cli.plan_why_json import explanation_json, fixes_json
from echelon.planner.explain.explanation import explanation_of
from echelon.planner.explain.pin_fixes import cheapest_fix
from echelon.planner.search import search
from tests.planner.requests import small


def test_reasons_as_text_and_as_json() -> None:
    pins = ["cp=1", "microbatch=1"]
    told = explanation_of(search(replace(small(devices=4, memory_gb=4.0, pins=pins), top=1)))
    text = explanation_text(told)
    assert max(map(len, text.splitlines())) <= 80
    for part in ("Why this plan", "Why not another plan", "What would change the plan"):
        assert part in text
    assert f"({told.why.step.low:.4g} to {told.why.step.high:.4g})" in text
    assert all(f"  {one.move}" in text for one in told.neighbours)
    assert all(one.name in text for one in told.changes)
    found = json.loads(json.dumps(explanation_json(told)))
    assert found["searched"] == "everything"
    assert len(found["neighbours"]) == len(told.neighbours)
    assert len(found["changes"]) == len(told.changes)
    assert found["step_s"]["low"] <= found["step_s"]["value"] <= found["step_s"]["high"]
    refused = [one for one in found["neighbours"] if one["at_its_best"]["verdict"] == "refused"]
    assert all(one["at_its_best"]["problems"] for one in refused)


def test_fixes_as_text_and_as_json() -> None:
    fixes = cheapest_fix(small(pins=["tp=1", "zero=0", "pp=1"], memory_gb=3.0))
    text = fixes_text(fixes)
    assert max(map(len, text.splitlines())) <= 80
    assert " + ".join(fixes[0].changes) in text
    assert "--set zero.stage=" in text
    found = json.loads(json.dumps(fixes_json(fixes)))
    assert [one["changes"] for one in found] == [list(fix.changes) for fix in fixes]
    assert "No change" in fixes_text(())
