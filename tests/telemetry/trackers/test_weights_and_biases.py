"""Weights & Biases, offline: what is read back by its own package is what the run wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.telemetry.trackers.real import (
    require_first_mirror,
    require_nothing_twice,
    require_resumed_mirror,
)


@pytest.mark.slow
def test_what_it_has_is_what_the_run_wrote(tmp_path: Path) -> None:
    require_first_mirror(tmp_path, "wandb")


@pytest.mark.slow
def test_a_run_that_was_resumed_is_mirrored_as_it_went_on(tmp_path: Path) -> None:
    require_resumed_mirror(tmp_path, "wandb")


@pytest.mark.slow
def test_a_mirror_that_was_killed_before_it_noted_writes_nothing_twice(tmp_path: Path) -> None:
    require_nothing_twice(tmp_path, "wandb")
