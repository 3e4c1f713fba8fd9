"""train.weights is a path like any other: relative to the file that sets it."""

from __future__ import annotations

from pathlib import Path

from echelon.config.load import load_job


def test_the_path_is_that_of_the_run_file(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('extends = "nano"\n[train]\nweights = "llama"\n')
    assert load_job(str(run), []).train.weights == str(tmp_path / "llama")
    assert load_job(str(run), ["train.weights=none"]).train.weights == "none"
    assert load_job("nano", []).train.weights == "none"
