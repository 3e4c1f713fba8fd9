"""The arithmetic of a long run can be followed by hand, and stands in the JSON too."""

from __future__ import annotations

import json
import re
from math import exp, expm1

import pytest

import echelon as ec
from echelon.cli.main import main
from echelon.planner.answer.objectives import duration, expected_lines
from echelon.planner.search.ranked import expected_of_request
from echelon.planner.search.search import search
from tests.planner.answer.test_search_json import check
from tests.planner.requests import small

ASKED = ["plan", "llama3-8b", "--cluster", "8xh100", "--pin", "cp=1", "--objective", "expected"]


@pytest.mark.slow
def test_the_page_says_what_a_step_of_a_long_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--detail"]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    line = next(one for one in page.splitlines() if one.startswith("expected"))
    assert "a step with interruptions" in line
    assert page.index("sum (memory)") < page.index("A step of a long run")
    assert "419 times in 54 days on 16,384 devices" in page
    assert "--objective expected --out run.toml" in " ".join(page.split())


def test_each_line_follows_from_those_before() -> None:
    one = expected_of_request(
        request := small(devices=8, objective="expected"), search(request).first.estimate
    )
    text = " ".join(" ".join(expected_lines(one)).split())
    slower = re.search(
        r"exp\((\S+) / (\S+)\) x (\S+) / (\S+) x \(exp\(\((\S+) \+ (\S+)\) / (\S+)\) - 1\) = (\S+)",
        text,
    )
    assert slower is not None
    restart, between, again, interval, work, write, last, told = map(float, slower.groups())
    assert between == again == last
    assert interval == work
    # Numbers of four digits: the interval is short beside the time between interruptions.
    by_hand = exp(restart / between) * between / interval * expm1((interval + write) / between)
    assert by_hand == pytest.approx(told, abs=2e-3)
    whole = re.search(r"expected (\S+) s x (\S+) x (\S+) \+ (\S+) s = (\S+) s,", text)
    assert whole is not None
    step, slowdown, risk, retry, total = map(float, whole.groups())
    assert step * slowdown * risk + retry == pytest.approx(total, rel=1e-3)


@pytest.mark.slow
def test_it_stands_in_the_json_where_it_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    check(told)
    expected = told["recommended"]["expected"]
    first = told["search"]["plans"][0]
    assert told["search"]["objective"] == "expected"
    assert expected["step_s"] > first["step_s"]
    assert main([*ASKED[:-2], "--json"]) == 0
    assert "expected" not in json.loads(capsys.readouterr().out)["recommended"]


@pytest.mark.slow
def test_from_python_it_is_an_objective_as_others_are() -> None:
    found = ec.plan("llama3-8b", cluster="8xh100", pins=["cp=1", "tp=1"], objective="expected")
    assert found.plan.mesh.world_size == 8


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (60.0, "1 min"), (5400.0, "1.5 h"), (172800.0, "2 days")],
)
def test_a_duration_has_the_largest_unit_of_which_there_is_one(seconds: float, text: str) -> None:
    assert duration(seconds) == text
