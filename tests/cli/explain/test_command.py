"""Rules are listed by area and explained one by one."""

from __future__ import annotations

import json
import re

import pytest

from echelon.cli.main import main
from echelon.core.rulebook import all_rules, areas


def test_one_rule_is_explained_by_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    rule = all_rules()[0]
    assert main(["explain", rule.id]) == 0
    output = capsys.readouterr()
    assert output.out.split() == rule.page().split()
    head, examples = rule.page().split("\n\nRefused:")
    assert output.out.endswith(f"\n\nRefused:{examples}")
    assert output.out.startswith(head.splitlines()[0])
    assert output.err == ""


def test_without_a_rule_all_are_listed_by_area(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if re.match(r"  \S", line)] == [
        rule.id for rule in all_rules()
    ]
    assert max(map(len, lines)) <= 120
    assert [line for line in lines if line and not line.startswith("  ")] == [
        area.replace("_", " ") for area in areas()
    ]


def test_json_holds_the_rule_and_the_areas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "unknown-flag", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rule"]["id"] == "unknown-flag"
    assert main(["explain", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "unknown-flag" in result["areas"]["command_line"]
