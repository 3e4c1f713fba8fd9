"""Older folders of Megatron-core: tensor ranks, stages, padded words, and what is missing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from echelon.core.errors import CheckpointError
from echelon.training.weights.files import find_weights
from tests.parallel.layouts import NANO
from tests.training.weights.hugging_face import Tensors, llama_tensors
from tests.training.weights.rectangles import require_rectangles
from tests.training.weights.test_export import back
from tests.training.weights.trainers.folders import megatron_ranks

SHAPE = replace(NANO, layers=4)


def require_llama(whole: Tensors, tensors: Tensors) -> None:
    """Compare weights by our names with those by transformers'."""
    for layer in range(SHAPE.layers):
        block = f"model.layers.{layer}"
        for ours, theirs in (
            ("attention.q", "self_attn.q_proj"),
            ("attention.k", "self_attn.k_proj"),
            ("attention.v", "self_attn.v_proj"),
            ("attention.o", "self_attn.o_proj"),
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
            ("mlp.gate", "mlp.gate_proj"),
            ("mlp.up", "mlp.up_proj"),
            ("mlp.down", "mlp.down_proj"),
        ):
            one = whole[f"layers.{layer}.{ours}.weight"]
            assert torch.equal(one, tensors[f"{block}.{theirs}.weight"]), (layer, ours)
    assert torch.equal(whole["embedding.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(whole["head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_ranks_and_stages_are_put_together(tp: int, pp: int, tmp_path: Path) -> None:
    """Heads in turns, gate above up in each rank, columns side by side, layers counted on."""
    tensors = llama_tensors(SHAPE)
    megatron_ranks(tmp_path, SHAPE, tensors, tp, pp)
    whole = back(tmp_path, SHAPE)
    require_llama(whole, tensors)
    require_rectangles(tmp_path, SHAPE, whole, Random(tp + pp), 2)
    assert find_weights(tmp_path, SHAPE).step == 12


def test_the_files_of_missing_ranks_are_named(tmp_path: Path) -> None:
    place = megatron_ranks(tmp_path, SHAPE, llama_tensors(SHAPE), 2, 2)
    shutil.rmtree(place / "mp_rank_00_001")
    with pytest.raises(CheckpointError, match="tensor rank 0 of stage 1") as caught:
        find_weights(tmp_path, SHAPE)
    assert caught.value.rules == ("weights-ranks-complete",)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """More words there are padding, fewer are another model."""
    megatron_ranks(tmp_path, SHAPE, llama_tensors(SHAPE), 1, 1)
    with pytest.raises(CheckpointError, match="another shape") as caught:
        find_weights(tmp_path, replace(SHAPE, vocab=SHAPE.vocab + 64))
    assert caught.value.rules == ("weights-shape",)
