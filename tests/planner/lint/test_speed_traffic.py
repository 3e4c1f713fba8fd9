"""Every lint of this room finds its fault in one plan, and nothing in another that is cured."""

from __future__ import annotations

import pytest

from echelon.planner.lint import speed
from echelon.planner.lint.checks import lint
from echelon.planner.lint.finding import lints_of
from tests.handbook.guides.situations import plan_of
from tests.planner.lint.cured import assert_found_and_cured
from tests.planner.lint.test_speed_compute import CASES as CASES_OF_COMPUTE

MANY_NODES = (
    "llama3-8b 128xh100 mesh.dp_shard=128 zero.stage=3 precision.parameters=bf16 "
    "batch.global_sequences=256 batch.microbatch_sequences=1 batch.sequence_length=2048"
)

CASES = {
    "zero-3-many-microbatches": (
        "llama2-7b 8xh100 mesh.dp_shard=8 zero.stage=3",
        "llama2-7b 8xh100 mesh.dp_shard=8 zero.stage=3 batch.global_sequences=8",
    ),
    "gradients-reduced-each-microbatch": (
        "llama2-7b 8xh100 mesh.dp_shard=8 zero.stage=2 zero.accumulate=slices",
        "llama2-7b 8xh100 mesh.dp_shard=8 zero.stage=2 zero.accumulate=whole",
    ),
    "bucket-too-small": (
        "gpt2 8xh100 mesh.dp_replicate=8 zero.bucket_bytes=1000000",
        "gpt2 8xh100 mesh.dp_replicate=8 zero.bucket_bytes=100000000",
    ),
    "no-prefetch": (
        "llama2-7b 8xh100 mesh.dp_shard=8 zero.stage=3 zero.prefetch=0",
        "llama2-7b 8xh100 mesh.dp_shard=8 zero.stage=3 zero.prefetch=1",
    ),
    "no-sequence-parallel": (
        "llama2-7b 8xh100 mesh.tp=8 mesh.sequence_parallel=false",
        "llama2-7b 8xh100 mesh.tp=8 mesh.sequence_parallel=true",
    ),
    "products-wait-for-rows": (
        "llama3-8b 8xh100 mesh.tp=4 mesh.dp_replicate=2 mesh.sequence_parallel=true",
        "llama3-8b 8xh100 mesh.tp=4 mesh.dp_replicate=2 mesh.sequence_parallel=true "
        "mesh.tp_overlap=auto",
    ),
    "shards-over-nodes": (
        "llama2-7b 16xh100 mesh.dp_shard=16 zero.stage=3",
        "llama2-7b 16xh100 mesh.dp_shard=8 mesh.dp_replicate=2 zero.stage=3",
    ),
    "gathers-cross-nodes": (MANY_NODES, f"{MANY_NODES} zero.secondary=true"),
    "exact-over-slow-links": (
        MANY_NODES,
        f"{MANY_NODES} zero.secondary=true zero.gather=int8 zero.reduce=int8",
    ),
}


@pytest.mark.system("S49")
@pytest.mark.parametrize("name", CASES)
def test_a_lint_finds_its_fault_and_nothing_where_it_is_cured(name: str) -> None:
    assert_found_and_cured(name, *CASES[name])


def test_every_lint_has_a_case() -> None:
    cases = {**CASES_OF_COMPUTE, **CASES}
    assert sorted(cases) == sorted(each.id for each in lints_of(speed))


@pytest.mark.parametrize(
    "settings",
    [
        # The host cannot start the kernels of so many small chunks in time.
        "llama3-8b 8xh100 mesh.tp=8 mesh.sequence_parallel=true",
        # Ranks of one machine take the time of messages from their products.
        "nano 2xcpu mesh.tp=2 mesh.sequence_parallel=true",
        "llama3-8b 8xh100 mesh.dp_replicate=8",
    ],
)
def test_chunks_are_proposed_only_where_the_estimate_says_so(settings: str) -> None:
    found = [one.id for one in lint(plan_of(settings))]
    assert "products-wait-for-rows" not in found


def test_rounding_is_priced_and_left_to_the_reader() -> None:
    (found,) = [one for one in lint(plan_of(MANY_NODES)) if one.id == "exact-over-slow-links"]
    assert "% less with zero.gather" in found.message
    assert "numbers change" in found.do


def test_nothing_is_said_of_nodes_where_there_is_one() -> None:
    one_node = "llama3-8b 8xh100 mesh.dp_shard=8 zero.stage=3 precision.parameters=bf16"
    found = {one.id for one in lint(plan_of(one_node))}
    assert not found & {"gathers-cross-nodes", "exact-over-slow-links"}
