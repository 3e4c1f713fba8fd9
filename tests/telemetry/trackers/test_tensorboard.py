"""TensorBoard: what is read back by its own package is what the run wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.telemetry.trackers.metrics import FIRST, add_lines, make_run
from tests.telemetry.trackers.readers import read_tensorboard
from tests.telemetry.trackers.real import (
    mirror,
    require_nothing_twice,
    require_resumed_mirror,
)


def test_a_run_that_was_resumed_is_mirrored_as_it_went_on(tmp_path: Path) -> None:
    require_resumed_mirror(tmp_path, "tensorboard")


@pytest.mark.slow
def test_a_mirror_that_was_killed_before_it_noted_writes_nothing_twice(tmp_path: Path) -> None:
    require_nothing_twice(tmp_path, "tensorboard")


def test_settings_are_there_and_no_variable_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    run = make_run(tmp_path).path
    add_lines(run, FIRST)
    mirror(run, "tensorboard")
    _, texts = read_tensorboard(run)
    (config,) = [text for name, _, text in texts if name == "config"]
    assert '| extends | "nano" |' in config
    assert "| mesh.pp | 1 |" in config
    assert "| parameters | " in config
    for path in run.rglob("*"):
        if path.is_file():
            assert b"a" * 40 not in path.read_bytes(), path
