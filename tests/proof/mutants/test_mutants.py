"""Every planted bug is caught, with the right tensor, the right factor and the right axis."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.proof.mutants import (
    constants,
    counts,
    forward,
    fp8_gather,
    look_alikes,
    narrow,
    pipelines,
    reductions,
    scales,
    slices,
)
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.planted import assert_caught


@pytest.mark.one_in(140)
@pytest.mark.parametrize(
    ("mutant", "told"),
    mutants_of(
        constants,
        counts,
        forward,
        fp8_gather,
        look_alikes,
        narrow,
        pipelines,
        reductions,
        scales,
        slices,
    ),
)
def test_a_planted_bug_is_caught_and_named(mutant: str, told: Told, rank_pool: RankPool) -> None:
    assert_caught(mutant, told, rank_pool)


def test_at_least_forty_bugs_are_planted() -> None:
    assert (
        len(mutants_of(constants, counts, forward, narrow, pipelines, reductions, scales, slices))
        >= 40
    )


def test_every_module_of_mutants_is_proven() -> None:
    folder = Path(__file__).parent
    modules = {
        path.stem for path in folder.glob("*.py") if re.search(r"@mutant\(\s*\w", path.read_text())
    }
    proven = "".join(path.read_text() for path in folder.glob("test_*.py"))
    missing = {name for name in modules if not re.search(rf"\b{name}\b", proven)}
    assert not missing, "no test of this folder names them"
