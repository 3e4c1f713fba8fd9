"""What islands that may be lost need: each rule, its arithmetic, and the values that work."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.files.show import resolved_toml
from echelon.config.load import load_job
from tests.config.problems import SMALL, SPARSE, problems_of, write

ISLANDS = ["mesh.dp_replicate=2", "local_sgd.every=50"]
ELASTIC = [*ISLANDS, "local_sgd.min_islands=1"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


def test_a_run_starts_with_as_many_islands_as_it_needs(small: Path) -> None:
    assert not problems_of(small, ELASTIC)
    problem = problems_of(small, [*ISLANDS, "local_sgd.min_islands=3"])["local-sgd-min-islands"]
    assert "local_sgd.min_islands = 3, and there are 2 islands" in problem.message
    assert problem.suggestions[-1] == "local_sgd.min_islands = 1"


@pytest.mark.parametrize(
    ("sets", "works"),
    [
        (["local_sgd.delay=5", "train.steps=1005"], 'local_sgd.min_islands = "all"'),
        (["local_sgd.gradients=int8"], 'local_sgd.gradients = "fp32"'),
    ],
)
def test_meetings_are_held_at_once(small: Path, sets: list[str], works: str) -> None:
    found = problems_of(small, [*ELASTIC, *sets])
    assert works in found["lost-islands-meet-at-once"].suggestions


def test_groups_that_are_made_anew_are_of_gloo(small: Path) -> None:
    found = problems_of(small, [*ELASTIC, "cluster.preset=8xh100"])
    assert 'local_sgd.min_islands = "all"' in found["lost-islands-need-gloo"].suggestions


def test_experts_have_state_of_each_island(tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, SPARSE), ELASTIC)
    assert list(found) == ["lost-islands-hold-dense-models"]


def test_nobody_validates_or_saves_between_meetings(small: Path) -> None:
    found = problems_of(small, [*ELASTIC, "train.validate_every=50", "checkpoint.every=75"])
    assert set(found) == {"lost-islands-leave-no-validation", "lost-islands-save-at-meetings"}
    problem = found["lost-islands-save-at-meetings"]
    assert "75 % 50 = 25" in problem.message
    assert problem.suggestions[:2] == ("checkpoint.every = 50", "checkpoint.every = 100")
    assert not problems_of(small, [*ELASTIC, "checkpoint.every=100"])


@pytest.mark.parametrize(
    "sets",
    [
        ["local_sgd.min_islands=1"],
        [*ISLANDS, "local_sgd.restarts=2"],
        [*ELASTIC, "train.desync_after_s=60"],
    ],
)
def test_settings_of_losses_that_end_the_run_have_no_effect(small: Path, sets: list[str]) -> None:
    assert "no-effect" in problems_of(small, sets)


def test_all_islands_are_their_number(small: Path, tmp_path: Path) -> None:
    job = load_job(small, [*ISLANDS, "local_sgd.min_islands=2"])
    assert not job.plan.mathematics.local_sgd.is_elastic
    job = load_job(small, [*ELASTIC, "local_sgd.restarts=3"])
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.content_hash() == job.content_hash()
    local = again.plan.mathematics.local_sgd
    assert (local.min_islands, local.restarts, local.is_elastic) == (1, 3, True)
