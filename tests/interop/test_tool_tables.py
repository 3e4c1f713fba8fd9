"""keys.toml of every tool: rules that can be followed, and reasons for settings that there are."""

from __future__ import annotations

import pytest

from echelon.config.settings.schema import SETTINGS, tables
from echelon.interop.key_reader import KINDS
from echelon.interop.tool_tables import KeyRule, tool_tables
from echelon.interop.tools import TOOLS


@pytest.mark.parametrize("tool", TOOLS)
def test_a_rule_has_a_reason_and_at_most_one_condition(tool: str) -> None:
    for group, rules in tool_tables(tool).keys.items():
        for key, rule in rules.items():
            conditions = (
                bool(rule.takes or rule.to),
                rule.only is not None,
                bool(rule.switch),
                rule.refused,
            )
            assert rule.why, (group, key)
            assert sum(conditions) <= 1, (group, key)
            assert rule.takes == "" or rule.takes in KINDS
            assert bool(rule.to) == bool(rule.to and (rule.takes or rule.words)), (group, key)
            assert rule.to == "" or rule.to in SETTINGS
            assert rule.setting == "" or rule.setting in SETTINGS


@pytest.mark.parametrize("tool", TOOLS)
def test_reasons_are_about_settings_or_tables_of_them(tool: str) -> None:
    found = tool_tables(tool)
    known = {*SETTINGS, *tables(), *(name.partition(".")[0] for name in tables())}
    for reasons in (found.elsewhere, found.speed, found.reasons):
        assert reasons.keys() <= known
        assert all(reasons.values())
    assert not found.elsewhere.keys() & found.speed.keys()


def test_forms_of_rules() -> None:
    rules = tool_tables("megatron").keys["rest"]
    assert rules["--master-port"] == KeyRule(why="torchrun says it")
    assert rules["--rotary-percent"] == KeyRule(why="all of a head is turned", only=[1, 1.0])
    assert rules["--finetune"].refused
    assert tool_tables("deepspeed").keys["tables"]["amp"].switch == "enabled"
    assert tool_tables("deepspeed").sections[0] == "zero_optimization"
