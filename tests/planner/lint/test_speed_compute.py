"""Every lint of this room finds its fault in one plan, and nothing in another that is cured."""

from __future__ import annotations

import pytest

from tests.planner.lint.cured import assert_found_and_cured

CASES = {
    "assumed-model": (
        'gpt2 8xh100 mesh.dp_replicate=8 model.assumed=["gated"]',
        'gpt2 8xh100 mesh.dp_replicate=8 model.assumed=["gated"] model.assume=true',
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
}


@pytest.mark.system("S49")
@pytest.mark.parametrize("name", CASES)
def test_a_lint_finds_its_fault_and_nothing_where_it_is_cured(name: str) -> None:
    assert_found_and_cured(name, *CASES[name])
