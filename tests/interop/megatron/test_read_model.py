"""The latent attention of a Megatron-LM command."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.model_shape import LatentAttention
from tests.interop.imports import Imports, rows_of
from tests.interop.megatron.commands import small

ROPE = "--position-embedding-type rope"

FLAGS = f"--multi-latent-attention --q-lora-rank 48 --qk-layernorm --rope-type rope {ROPE}"


@pytest.fixture
def megatron(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "megatron")


def test_its_sizes_are_those_of_megatron_where_nothing_is_said(megatron: Imports) -> None:
    found = megatron(small(f"{FLAGS} --kv-channels 16 --v-head-dim 24 --disable-bias-linear"))
    model = found.job.plan.model
    assert model.latent == LatentAttention(
        query_rank=48, kv_rank=32, nope_dim=128, rope_dim=64, value_dim=24
    )
    assert (model.head_dim, model.qk_norm) == (192, False)
    (row,) = rows_of(found, "--kv-channels")
    assert row.setting == ""


@pytest.mark.parametrize("flag", ["--q-lora-rank", "--qk-layernorm", "--rope-type"])
def test_what_megatron_does_otherwise_by_default_must_be_said(megatron: Imports, flag: str) -> None:
    words = [str(word) for word in FLAGS.split()]
    start = words.index(flag)
    stop = start + 1 if flag == "--qk-layernorm" else start + 2
    text = small(" ".join([*words[:start], *words[stop:], "--disable-bias-linear"]))
    first, *_ = megatron.problems(text)
    assert first.rule == "import-not-honoured"
    assert flag in first.message
    assert any(flag in work for work in first.suggestions)


def test_without_it_its_flags_are_told_to_be_without_effect(megatron: Imports) -> None:
    (row,) = rows_of(megatron(small("--kv-lora-rank 512")), "--kv-lora-rank")
    assert row.why == "it is about --multi-latent-attention"


def test_a_command_describes_its_model_with_the_defaults_of_megatron(megatron: Imports) -> None:
    found = megatron(small())
    model, plan = found.job.plan.model, found.job.plan
    assert (model.layers, model.hidden, model.heads, model.kv_heads) == (4, 64, 4, 4)
    assert (model.ffn, model.gated, model.activation) == (256, False, "gelu")
    assert (model.norm, model.positions, model.tied) == ("layernorm", "learned", True)
    assert (model.qkv_bias, model.output_bias, model.mlp_bias) == (True, True, True)
    assert model.vocab == 384
    assert (plan.mathematics.global_sequences, plan.mesh.dp_replicate) == (8, 4)
    optimizer = plan.mathematics.optimizer
    assert (optimizer.beta2, optimizer.weight_decay, optimizer.clip_norm) == (0.999, 0.01, 1.0)
    assert (optimizer.schedule, optimizer.final_ratio, optimizer.warmup_steps) == ("linear", 0, 0)
    assert found.job.train.steps == 100


def test_a_command_of_a_llama(megatron: Imports) -> None:
    more = (
        "--swiglu --ffn-hidden-size 96 --normalization RMSNorm --norm-epsilon 1e-6 "
        "--position-embedding-type rope --rotary-base 500000 --disable-bias-linear --add-qkv-bias "
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
        "--kv-channels 32 --qk-layernorm --init-method-std 0.01 --use-rope-scaling "
        "--padded-vocab-size 320"
    )
    model = megatron(small(more)).job.plan.model
    assert (model.gated, model.activation, model.ffn, model.tied) == (True, "silu", 96, False)
    assert (model.norm, model.norm_eps, model.rope_theta) == ("rmsnorm", 1e-6, 500_000.0)
    assert (model.qkv_bias, model.output_bias, model.mlp_bias) == (True, False, False)
    assert (model.kv_heads, model.head_dim, model.qk_norm, model.vocab) == (2, 32, True, 320)
    assert model.rope_scaling is not None
    assert (model.rope_scaling.factor, model.rope_scaling.original_positions) == (8.0, 8192)
    model = megatron(small("--swiglu --use-rotary-position-embeddings")).job.plan.model
    assert (model.ffn, model.positions) == (128, "rope")


def test_a_vocabulary_is_padded_for_the_tensor_ranks(megatron: Imports) -> None:
    plan = megatron(small("--tensor-model-parallel-size 4")).job.plan
    assert (plan.model.vocab, plan.mesh.dp_replicate) == (512, 1)
    more = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 10"
    assert megatron(small(more)).job.plan.model.vocab == 300
