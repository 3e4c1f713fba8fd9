"""The bad example of a rule breaks it and the fixed one does not, as far as they are run files."""

from __future__ import annotations

from inspect import cleandoc
from pathlib import Path

import pytest

from echelon.core.rulebook import all_rules, areas
from echelon.core.rules import Rule
from tests.config.problems import problems_of

NOT_RUN_FILES = {
    "no-such-file",
    "set-syntax",
    "extends-cycle",
    "world-size-is-product",
    "links-join-cluster",
    "rows-fit-plan",
    "schedule-file-fits-run",
    "tied-ends-mirrored",
    "unit-times-fit-run",
    "unit-times-readable",
    "unit-times-written-once",
}
AREAS = ("config", "mesh", "pipeline", "batch", "model", "zero", "precision")
WITHOUT_BASE = {"missing-setting", "toml-syntax"}
RULES = [
    rule
    for area in AREAS
    for rule in areas()[area]
    if rule.id not in NOT_RUN_FILES and not rule.id.startswith("hf-config")
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_examples_of_a_rule(rule: Rule, tmp_path: Path) -> None:
    base = "" if rule.id in WITHOUT_BASE else 'extends = "nano"\n'
    run = tmp_path / "run.toml"
    (tmp_path / "config.json").write_text("{}")
    run.write_text(base + cleandoc(rule.bad) + "\n")
    assert rule.id in problems_of(run)
    run.write_text(base + cleandoc(rule.fixed) + "\n")
    assert rule.id not in problems_of(run)


def test_rule_ids_are_unique_and_every_rule_is_explained() -> None:
    rules = all_rules()
    assert len({rule.id for rule in rules}) == len(rules)
    assert len(rules) > 40
    for rule in rules:
        assert rule.id == rule.id.lower()
        assert min(len(rule.why.strip()), len(rule.bad), len(rule.fixed)) > 3, rule.id
        assert rule.id in rule.page()


def test_areas_come_with_their_rules() -> None:
    assert set(AREAS) <= set(areas())
    assert all(areas().values())
