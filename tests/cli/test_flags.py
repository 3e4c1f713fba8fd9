"""Files that a command is to write are checked all at once; settings need a run to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.cli.flags import plan_if_named, require_new_files, require_run_file
from echelon.core.errors import ConfigError


def test_new_files_are_taken(tmp_path: Path) -> None:
    require_new_files({"--out": tmp_path / "a.toml", "a.csv": tmp_path / "a.csv"})


def test_all_that_cannot_be_written_are_told_with_free_names(tmp_path: Path) -> None:
    there = tmp_path / "a.svg"
    there.write_text("taken")
    (tmp_path / "a-2.svg").write_text("taken too")
    with pytest.raises(ConfigError) as caught:
        require_new_files({"--out": there, "beside": tmp_path / "absent" / "b.csv"})
    assert caught.value.rules == ("never-overwrite", "cannot-write")
    svg, csv = caught.value.problems
    assert svg.suggestions == (f"--out {tmp_path / 'a-3.svg'}",)
    assert csv.suggestions == ("beside b.csv",)


def test_a_name_of_another_kind_is_refused_with_one_that_fits(tmp_path: Path) -> None:
    require_run_file(tmp_path / "run.toml")
    require_run_file(None)
    with pytest.raises(ConfigError) as caught:
        require_run_file(tmp_path / "run.yaml")
    assert caught.value.problems[0].suggestions == (f"--out {tmp_path / 'run.toml'}",)


def test_settings_without_a_run_are_refused() -> None:
    assert plan_if_named(None, (), "lints nano") is None
    found = plan_if_named("nano", ("train.seed=3",), "lints nano")
    assert found is not None
    assert found.mathematics.seed == 3
    with pytest.raises(ConfigError) as caught:
        plan_if_named(None, ("mesh.tp=2",), "lints nano")
    assert caught.value.problems[0].suggestions == ("echelon explain lints nano --set mesh.tp=2",)
