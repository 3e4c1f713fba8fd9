"""What formulas read of the controls is what they read of the plan of their run file."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.page.explorer.controls import run_text
from tests.page.explorer.random_controls import legal_settings, tables
from web.formulas.inputs import inputs_of_controls


def agree_on_inputs(tmp_path: Path, seed: int, count: int) -> None:
    for controls, model, cluster in legal_settings(seed, count):
        path = tmp_path / "run.toml"
        path.write_text(run_text(controls, model, cluster), encoding="utf-8")
        plan = load_job(path).plan
        assert plan.mesh.world_size == controls.ranks
        assert plan.layout.pipeline.schedule == controls.schedule
        assert inputs_of_controls(tables(), controls, model, cluster) == cost_inputs_from_plan(plan)


def test_what_formulas_read_is_what_they_read_of_the_plan_of_the_run_file(tmp_path: Path) -> None:
    agree_on_inputs(tmp_path, seed=3, count=25)


@pytest.mark.slow
def test_what_formulas_read_is_that_of_many_plans(tmp_path: Path) -> None:
    agree_on_inputs(tmp_path, seed=4, count=300)
