"""Every lint of this room finds its fault in one plan, and nothing in another that is cured."""

from __future__ import annotations

import pytest

from echelon.planner.lint.pipeline import PIPELINE as LINTS
from tests.planner.lint.cured import assert_found_and_cured

CASES = {
    "microbatches-per-stage": (
        "gpt2 4xh100 mesh.pp=4 batch.global_sequences=8 batch.microbatch_sequences=1",
        "gpt2 4xh100 mesh.pp=4 batch.global_sequences=16 batch.microbatch_sequences=1",
    ),
    "gpipe-holds-all": (
        "gpt2 4xh100 mesh.pp=4 pipeline.schedule=gpipe",
        "gpt2 4xh100 mesh.pp=4 pipeline.schedule=1f1b",
    ),
    "stages-uneven": (
        "gpt2 2xh100 mesh.pp=2 pipeline.stages=[[0,1,2],[3,4,5,6,7,8,9,10,11]]",
        "llama2-7b 2xh100 mesh.pp=2",
    ),
    "empty-stages": (
        "gpt2 4xh100 mesh.pp=4 pipeline.stages=[[0,1,2,3],[],[4,5,6,7],[8,9,10,11]]",
        "gpt2 4xh100 mesh.pp=4",
    ),
}


@pytest.mark.system("S49")
@pytest.mark.parametrize("name", CASES)
def test_a_lint_finds_its_fault_and_nothing_where_it_is_cured(name: str) -> None:
    assert_found_and_cured(name, *CASES[name])


def test_every_lint_has_a_case() -> None:
    assert sorted(CASES) == sorted(each.id for each in LINTS)
