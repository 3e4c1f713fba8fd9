"""Every lint of this room finds its fault in one plan, and nothing in another that is cured."""

from __future__ import annotations

import pytest

from echelon.planner.lint.placement import PLACE as LINTS
from tests.planner.lint.cured import assert_found_and_cured

CASES = {
    "tp-across-nodes": (
        "gpt3-175b 16xh100 mesh.tp=16",
        "gpt3-175b 16xh100 mesh.tp=8 mesh.pp=2",
    ),
    "pp-inside-tp-outside": (
        "gpt2 16xh100 mesh.tp=3 mesh.pp=4",
        "gpt2 16xh100 mesh.tp=2 mesh.pp=6",
    ),
    "context-all-to-all-across-nodes": (
        "gpt3-175b 16xh100 mesh.cp=16 context.kind=gathered",
        "gpt3-175b 16xh100 mesh.cp=16 context.kind=ring",
    ),
    "experts-across-nodes": (
        "qwen3-30b-a3b 16xh100 mesh.dp_shard=16 mesh.ep=16 zero.stage=1",
        "qwen3-30b-a3b 16xh100 mesh.dp_shard=16 mesh.ep=8 zero.stage=1",
    ),
    "part-of-a-node": (
        "gpt2 16xh100 mesh.dp_replicate=12 batch.global_sequences=480",
        "gpt2 16xh100 mesh.dp_replicate=16",
    ),
    "idle-devices": ("gpt2 8xh100 mesh.dp_replicate=4", "gpt2 8xh100 mesh.dp_replicate=8"),
}


@pytest.mark.system("S49")
@pytest.mark.parametrize("name", CASES)
def test_a_lint_finds_its_fault_and_nothing_where_it_is_cured(name: str) -> None:
    assert_found_and_cured(name, *CASES[name])


def test_every_lint_has_a_case() -> None:
    assert sorted(CASES) == sorted(each.id for each in LINTS)
