"""The bad example of a rule breaks it and the fixed one does not, as far as they are run files."""

from __future__ import annotations

from inspect import cleandoc
from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.config.rules.finders import plan_problems
from echelon.core.errors import ConfigError, InfeasiblePlan
from echelon.core.rulebook import all_rules, areas
from echelon.core.rulebook.pipeline import SCHEDULE_SEARCH_HAS_MEMORY
from echelon.core.rules import Rule
from echelon.schedule.check import check_schedule
from echelon.schedule.files import read_schedule_file
from tests.config.problems import problems_of

NOT_RUN_FILES = {
    "no-such-file",
    "assumed-model-needs-yes",
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
SCHEDULE_FILES = {
    "schedule-covers-once",
    "schedule-keeps-order",
    "schedule-cannot-deadlock",
    "schedule-file-readable",
    "schedule-action-known",
    "schedule-rows-are-ranks",
    "schedule-within-memory",
}
"""Rules whose examples are files with a schedule."""
PARTS_OF_FILES = {"schedule-places-stages"}
PLANNED_ONLY = {"not-built-yet"}
"""Rules of what can be planned, but not run: a run file loads."""
NOT_RUN_FILES |= SCHEDULE_FILES | PARTS_OF_FILES | PLANNED_ONLY
NOTHING_ELSE = (
    "pipeline",
    "schedule",
    "schedule_search",
    "batch",
    "zero",
    "precision",
    "context",
    "experts",
    "expert_parallel",
    "latent",
    "blocks",
)
"""Areas whose fixed examples are whole runs with the base; elsewhere they are of other models."""
AREAS = (*NOTHING_ELSE, "config", "mesh", "model")
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
    run.write_text(base + rule.bad + "\n")
    assert rule.id in problems_of(run)
    run.write_text(base + rule.fixed + "\n")
    assert rule.id not in problems_of(run)
    if any(rule in areas()[area] for area in NOTHING_ELSE):
        assert problems_of(run) == {}


def test_the_rule_of_a_search_is_broken_where_every_check_has_passed(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('extends = "nano"\n' + SCHEDULE_SEARCH_HAS_MEMORY.bad + "\n")
    with pytest.raises(InfeasiblePlan) as caught:
        load_job(run)
    assert caught.value.rules == ("schedule-search-has-memory",)


@pytest.mark.parametrize("rule", sorted(PLANNED_ONLY))
def test_examples_of_what_can_only_be_planned(rule: str, tmp_path: Path) -> None:
    example = next(one for one in all_rules() if one.id == rule)
    run = tmp_path / "run.toml"
    for text, found in ((example.bad, [rule]), (example.fixed, [])):
        run.write_text('extends = "nano"\n' + text + "\n")
        assert [problem.rule for problem in plan_problems(load_job(run).plan)] == found


@pytest.mark.parametrize("rule", sorted(SCHEDULE_FILES))
def test_examples_of_a_schedule_file(rule: str, tmp_path: Path) -> None:
    example = next(one for one in all_rules() if one.id == rule)
    limits = (1,) if rule == "schedule-within-memory" else None
    with pytest.raises(ConfigError) as caught:
        _read(example.bad, tmp_path, limits)
    assert set(caught.value.rules) == {rule}
    _read(example.fixed, tmp_path, limits)


def _read(example: str, folder: Path, limits: tuple[int, ...] | None) -> None:
    path = folder / "mine.csv"
    path.write_text(cleandoc(example) + "\n")
    found = read_schedule_file(path)
    check_schedule(found.schedule, most_in_flight=limits, cells=found.cells)


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
