"""Files that a command is to write are checked all at once; settings need a run to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.cli.flags import plan_if_named, require_new_files, require_suffix
from echelon.core.errors import ConfigError


def test_new_files_are_taken(tmp_path: Path) -> None:
    require_new_files({"--svg": tmp_path / "a.svg", "--csv": tmp_path / "a.csv", "--out": None})


def test_all_that_cannot_be_written_are_told_with_free_names(tmp_path: Path) -> None:
    there = tmp_path / "a.svg"
    there.write_text("taken")
    (tmp_path / "a-2.svg").write_text("taken too")
    with pytest.raises(ConfigError) as caught:
        require_new_files({"--svg": there, "--csv": there})
    same, svg, csv = caught.value.problems
    assert (same.rule, svg.rule, csv.rule) == ("bad-argument", "never-overwrite", "never-overwrite")
    assert same.suggestions == (f"--csv {tmp_path / 'a.csv'}",)
    assert svg.suggestions == (f"--svg {tmp_path / 'a-3.svg'}",)


def test_a_name_of_another_kind_is_refused_with_one_that_fits(tmp_path: Path) -> None:
    require_suffix("--out", tmp_path / "run.toml", (".toml", ".json"))
    require_suffix("--out", None, (".toml",))
    with pytest.raises(ConfigError) as caught:
        require_suffix("--out", tmp_path / "run.yaml", (".toml",))
    assert caught.value.problems[0].suggestions == (f"--out {tmp_path / 'run.toml'}",)


def test_settings_without_a_run_are_refused() -> None:
    assert plan_if_named(None, (), "lints nano") is None
    found = plan_if_named("nano", ("train.seed=3",), "lints nano")
    assert found is not None
    assert found.mathematics.seed == 3
    with pytest.raises(ConfigError) as caught:
        plan_if_named(None, ("mesh.tp=2",), "lints nano")
    assert caught.value.problems[0].suggestions == ("echelon explain lints nano --set mesh.tp=2",)
