"""Every lint finds its fault in one plan, and nothing in another that differs by the cure."""

from __future__ import annotations

import pytest

from echelon.planner.guides.practices import PRACTICES
from echelon.planner.lint import LINTS, lint, lint_rows
from tests.planner.guides.situations import plan_of

LONG = "batch.sequence_length=131072 model.max_positions=131072 recompute.policy=full"

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
    "fp32-on-tensor-cores": (
        "gpt2 8xh100 mesh.dp_replicate=8 precision.parameters=fp32",
        "gpt2 8xh100 mesh.dp_replicate=8",
    ),
    "fp16-where-bf16-is": (
        "gpt2 8xh100 mesh.dp_replicate=8 precision.parameters=fp16 precision.loss_scaling=dynamic",
        "gpt2 8xh100 mesh.dp_replicate=8",
    ),
    "reduction-in-16-bits": (
        "gpt2 16xh100 mesh.dp_replicate=16 precision.reduction=bf16",
        "gpt2 16xh100 mesh.dp_replicate=16",
    ),
    "narrow-matrices": (
        "gpt2-xl 8xh100 mesh.tp=5",
        "gpt3-175b 8xh100 mesh.tp=8",
    ),
    "few-tokens": (
        "gpt2 8xh100 mesh.cp=8 batch.microbatch_sequences=1",
        "gpt2 8xh100 mesh.cp=8 batch.microbatch_sequences=8",
    ),
    "vocabulary-not-aligned": (
        "gpt2 8xh100 mesh.dp_replicate=8",
        "gpt2 8xh100 mesh.dp_replicate=8 model.vocab=50304",
    ),
    "widths-not-aligned": (
        "gpt2 8xh100 mesh.dp_replicate=8 model.ffn=3000",
        "gpt2 8xh100 mesh.dp_replicate=8",
    ),
    "few-rows-an-expert": (
        "qwen3-30b-a3b 16xh100 mesh.dp_shard=16 zero.stage=1 batch.sequence_length=512",
        "qwen3-30b-a3b 16xh100 mesh.dp_shard=16 mesh.ep=8 zero.stage=1",
    ),
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
    "shards-over-nodes": (
        "llama2-7b 16xh100 mesh.dp_shard=16 zero.stage=3",
        "llama2-7b 16xh100 mesh.dp_shard=8 mesh.dp_replicate=2 zero.stage=3",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_lint_finds_its_fault_and_nothing_where_it_is_cured(name: str) -> None:
    bad, good = CASES[name]
    found = {finding.id: finding for finding in lint(plan_of(bad))}
    assert name in found
    assert any(letter.isdigit() for letter in found[name].message)
    assert found[name].do
    assert name not in {finding.id for finding in lint(plan_of(good))}


def test_every_lint_has_a_case_and_is_named_once() -> None:
    assert sorted(CASES) == sorted(each.id for each in LINTS)
    assert len(LINTS) >= 15


def test_rows_fit_a_terminal_and_name_the_lint() -> None:
    plan = plan_of("llama2-7b 8xh100 mesh.dp_shard=8 zero.stage=3")
    rows = lint_rows(plan)
    assert max(map(len, rows)) <= 80
    heads = [row.split(":")[0].strip() for row in rows if not row.startswith("   ")]
    assert heads == [finding.id for finding in lint(plan)]


def test_a_plan_without_fault_has_no_row() -> None:
    assert lint_rows(plan_of("gpt2 8xh100 mesh.dp_replicate=8 model.vocab=50304")) == []


def test_practices_name_lints_that_there_are_or_say_what_to_do() -> None:
    known = {each.id for each in LINTS}
    for practice in PRACTICES:
        assert set(practice.lints) <= known
        assert bool(practice.lints) != bool(practice.instead)


@pytest.mark.parametrize(
    ("lint_id", "inside", "beyond"),
    [
        (
            "tp-across-nodes",
            "gpt3-175b 64xgb200 mesh.tp=16",
            "gpt3-175b 128xgb200 mesh.tp=48 mesh.pp=2",
        ),
        (
            "experts-across-nodes",
            "qwen3-30b-a3b 128xgb200 mesh.dp_shard=64 mesh.ep=64 zero.stage=1",
            "qwen3-30b-a3b 128xgb200 mesh.dp_shard=128 mesh.ep=128 zero.stage=1",
        ),
        (
            "context-all-to-all-across-nodes",
            "gpt3-175b 72xgb200 mesh.cp=16 context.kind=gathered",
            "gpt3-175b 128xgb200 mesh.cp=128 context.kind=gathered",
        ),
    ],
)
def test_a_rack_that_is_wired_as_a_node_is_one(lint_id: str, inside: str, beyond: str) -> None:
    assert lint_id not in {finding.id for finding in lint(plan_of(inside))}
    (found,) = [finding for finding in lint(plan_of(beyond)) if finding.id == lint_id]
    assert "NVLink 5 domains of 64" in found.message
    assert "InfiniBand" in found.message or lint_id.startswith("context")
