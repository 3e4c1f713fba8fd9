"""Every lint of this room finds its fault in one plan, and nothing in another that is cured."""

from __future__ import annotations

import pytest

from echelon.planner.lint import memory
from echelon.planner.lint.checks import lint
from echelon.planner.lint.finding import lints_of
from tests.handbook.guides.situations import plan_of
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
    # K8 (S49): fragmentation. 0.9 GB are free, and a vocabulary of 128,256 rows is gathered.
    "no-room-for-gaps": (
        "llama3-8b 8xh100 mesh.dp_shard=8 zero.stage=3",
        "llama3-8b 8xh200 mesh.dp_shard=8 zero.stage=3",
    ),
    "offload-without-need": (
        "gpt2 8xh100 mesh.dp_shard=8 zero.stage=1 zero.optimizer_offload=host",
        "llama2-13b 2xa100-80gb mesh.dp_shard=2 zero.stage=2 zero.optimizer_offload=host",
    ),
}


@pytest.mark.system("S49")
@pytest.mark.system("S49")
@pytest.mark.parametrize("name", CASES)
def test_a_lint_finds_its_fault_and_nothing_where_it_is_cured(name: str) -> None:
    assert_found_and_cured(name, *CASES[name])


TIGHT = "llama2-13b 8xa100-80gb mesh.dp_shard=8 zero.stage=3"
SHORT = f"{TIGHT} batch.sequence_length=2048"


@pytest.mark.parametrize(
    ("sequences", "wanted"),
    [(3, '["norm", "activation"]'), (4, '["norm", "mlp"]'), (8, "recompute.policy = full")],
)
def test_as_few_operators_as_do_are_advised_before_whole_blocks(
    sequences: int, wanted: str
) -> None:
    plan = f"{SHORT} batch.microbatch_sequences={sequences} batch.global_sequences=192"
    (found,) = [one for one in lint(plan_of(plan)) if one.id == "no-recompute-when-full"]
    assert wanted in found.do
    if "operators" in found.do:
        operators = wanted.replace(" ", "")
        cured = f"{plan} recompute.policy=selective recompute.operators={operators}"
        assert found.id not in {one.id for one in lint(plan_of(cured))}


def test_whole_blocks_are_not_made_again_where_operators_do() -> None:
    plan = f"{TIGHT} batch.microbatch_sequences=2 recompute.policy=full"
    (found,) = [one for one in lint(plan_of(plan)) if one.id == "recompute-without-need"]
    assert "recompute.operators" in found.do
    assert " GiB" in found.message


def test_every_lint_has_a_case() -> None:
    assert sorted(CASES) == sorted(each.id for each in lints_of(memory))
