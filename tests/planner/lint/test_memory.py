"""Every lint of this room finds its fault in one plan, and nothing in another that is cured."""

from __future__ import annotations

import pytest

from echelon.planner.lint.memory import MEMORY as LINTS
from tests.planner.lint.cured import assert_found_and_cured

LONG = "batch.sequence_length=131072 model.max_positions=131072 recompute.policy=full"

CASES = {
    "does-not-fit": (
        "llama2-7b 8xa100-80gb mesh.dp_replicate=8",
        "llama2-7b 8xa100-80gb mesh.dp_shard=8 zero.stage=1",
    ),
    "no-recompute-when-full": (
        "llama2-13b 8xa100-80gb mesh.dp_shard=8 zero.stage=3 batch.microbatch_sequences=4",
        "llama2-13b 8xa100-80gb mesh.dp_shard=8 zero.stage=3 batch.microbatch_sequences=4 "
        "recompute.policy=full",
    ),
    "recompute-without-need": (
        "gpt2 8xh100 mesh.dp_replicate=8 recompute.policy=full",
        "gpt2 8xh100 mesh.dp_replicate=8",
    ),
    "zero-3-without-need": (
        "gpt2 8xh100 mesh.dp_shard=8 zero.stage=3",
        "llama2-13b 8xa100-80gb mesh.dp_shard=8 zero.stage=3",
    ),
    "optimizer-held-by-all": (
        "llama3-8b 8xh200 mesh.dp_replicate=8",
        "llama3-8b 8xh200 mesh.dp_shard=8 zero.stage=1",
    ),
    "axes-without-need": (
        "gpt2 8xh100 mesh.tp=2 mesh.dp_replicate=4",
        "gpt2 8xh100 mesh.dp_replicate=8",
    ),
    "cp-without-need": (
        "gpt2 8xh100 mesh.cp=8",
        f"llama3-8b 8xh100 mesh.cp=8 zero.stage=3 {LONG}",
    ),
    "offload-without-need": (
        "gpt2 8xh100 mesh.dp_shard=8 zero.stage=1 zero.optimizer_offload=host",
        "llama2-13b 2xa100-80gb mesh.dp_shard=2 zero.stage=2 zero.optimizer_offload=host",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_lint_finds_its_fault_and_nothing_where_it_is_cured(name: str) -> None:
    assert_found_and_cured(name, *CASES[name])


def test_every_lint_has_a_case() -> None:
    assert sorted(CASES) == sorted(each.id for each in LINTS)
