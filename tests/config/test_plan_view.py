"""A Plan seen as settings: the values of the run that gave it, and no origin."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.config.plan_view import plan_settings, view_from_plan
from echelon.config.rules.finders import FINDERS, PLAN_FINDERS
from echelon.config.rules.violations import find_problems
from echelon.core.settings.value_types import toml_text


@pytest.mark.quick("gpt2-sets3", "toy-experts-sets1", "nano-sets0")
@pytest.mark.parametrize(
    ("preset", "sets"),
    [("nano", ["mesh.cp=2", "mesh.pp=2"]), ("toy-experts", []), ("deepseek-v3", []), ("gpt2", [])],
)
def test_the_settings_of_a_plan_are_those_that_gave_it(preset: str, sets: list[str]) -> None:
    job = load_job(preset, sets)
    # What stays "auto" has nothing to decide: there are no experts, or no stage 3.
    written = {row.key: row.value for row in job.sources if row.value != '"auto"'}
    found = plan_settings(job.plan)
    assert {key: toml_text(value) for key, value in found.items() if key in written} == {
        key: value for key, value in written.items() if key in found
    }


def test_the_view_of_a_plan_names_its_cluster_and_breaks_no_rule_of_plans() -> None:
    view = view_from_plan(load_job("nano", ["mesh.cp=2", "mesh.tp=2"]).plan)
    assert view.is_resolved
    assert view.cluster is not None
    assert view.cluster.name == "laptop"
    assert find_problems(view, FINDERS, PLAN_FINDERS) == []
