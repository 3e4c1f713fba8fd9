"""The latent attention of a Megatron-LM command."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.model_shape import LatentAttention
from tests.config.foreign.imports import Imports, rows_of
from tests.config.foreign.test_megatron import small

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
    assert any(flag in work for work in first.works)


def test_without_it_its_flags_are_told_to_be_without_effect(megatron: Imports) -> None:
    (row,) = rows_of(megatron(small("--kv-lora-rank 512")), "--kv-lora-rank")
    assert row.why == "it is about --multi-latent-attention"
