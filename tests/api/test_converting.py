"""Configurations of other tools become runs, and plans become files."""

from __future__ import annotations

from pathlib import Path

import pytest

import echelon as ec
from echelon.api.converting import read_plan
from echelon.interop.export import ExportedRun


def test_a_configuration_of_another_tool_is_a_run(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}')
    run = ec.import_run(config, ranks=2, settings=["train.steps=50"])
    assert run.plan.layout.zero.stage == 1
    assert {row.key: row.setting for row in run.rows}["gradient_clipping"] == "optimizer.clip_norm"
    run.write(tmp_path / "run.toml")
    loaded = ec.plan(tmp_path / "run.toml")
    assert loaded.same_mathematics(run.plan)
    config.write_text('{"zero_optimisation": {"stage": 1}}')
    with pytest.raises(ec.EchelonError, match="import-unknown-key"):
        _ = ec.import_run(config).plan


def test_files_that_name_others_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    found = ExportedRun(tool="torchtitan", text="a", beside={"b.txt": "b"}, notes=())
    with pytest.raises(ec.EchelonError, match="export-needs-out"):
        found.require_alone()
    (tmp_path / "b.txt").write_text("there")
    with pytest.raises(ec.EchelonError, match="never-overwrite"):
        found.write(tmp_path / "a.txt")
    assert not (tmp_path / "a.txt").exists()
    (tmp_path / "b.txt").unlink()
    assert set(found.write(tmp_path / "a.txt")) == {tmp_path / "a.txt", tmp_path / "b.txt"}
    assert (tmp_path / "b.txt").read_text() == "b"


def test_a_plan_has_the_job_of_the_run_file_beside_it_where_that_gives_it(tmp_path: Path) -> None:
    plan = ec.plan("nano", settings=["mesh.tp=2"])
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert read_plan(tmp_path) == (plan, None)
    text = 'extends = "nano"\n[mesh]\ntp = {}\n[train]\nrun_name = "nano"\n'
    (tmp_path / "run.toml").write_text(text.format(4))
    assert read_plan(tmp_path) == (plan, None)
    (tmp_path / "run.toml").write_text(text.format(2))
    found, job = read_plan(tmp_path / "plan.json")
    assert job is not None
    assert found == job.plan == plan
    # With settings on top it is the run file that counts.
    assert read_plan(tmp_path, settings=["mesh.pp=2"])[0].mesh.pp == 2
    with pytest.raises(ec.EchelonError, match="plan-source"):
        read_plan(tmp_path / "none.json")
