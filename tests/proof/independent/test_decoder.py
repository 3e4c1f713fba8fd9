"""The independent decoder gives the logits of transformers, family by family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from echelon.core.model_shape import ModelShape, RopeScaling
from echelon.proof.independent.decoder import token_losses
from echelon.proof.independent.sequence import EMBEDDING_UNIT
from tests.models.test_hugging_face_models import saved_weights
from tests.parallel.layouts import GPT2, NANO
from tests.proof.independent.running import random_weights, sequence_run
from tests.training.weights.transformers_models import SHAPES as MIXTURES
from tests.training.weights.transformers_models import Original, original

TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 30]
LLAMA = replace(
    NANO,
    name="llama",
    rope_theta=100.0,
    rope_scaling=RopeScaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8
    ),
)
SHAPES = {
    shape.name: shape
    for shape in (
        LLAMA,
        replace(NANO, name="mistral", window=4),
        replace(NANO, name="qwen3", qk_norm=True, tied=True),
        GPT2,
        *MIXTURES.values(),
    )
}


def settings_of(shape: ModelShape) -> dict[str, Any]:
    """Return the configuration that Llama, Mistral and Qwen have in common."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }


def dense(shape: ModelShape) -> Any:
    """Return the dense model of transformers that has this shape."""
    settings = settings_of(shape)
    if shape.name == "mistral":
        return MistralForCausalLM(MistralConfig(**settings, sliding_window=shape.window))
    if shape.name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**settings))
    if shape.name == "gpt2":
        sizes: dict[str, Any] = {
            "n_embd": shape.hidden,
            "n_layer": shape.layers,
            "n_head": shape.heads,
        }
        sizes |= {"n_inner": shape.ffn, "n_positions": shape.max_positions}
        return GPT2LMHeadModel(GPT2Config(vocab_size=shape.vocab, **sizes))
    scaling = {"rope_type": "llama3", "rope_theta": shape.rope_theta, "factor": 8.0}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8}
    return LlamaForCausalLM(LlamaConfig(**{**settings, "rope_parameters": scaling}))


def theirs(shape: ModelShape) -> Original:
    """Return the model of transformers that has this shape, with random weights."""
    if shape.experts is not None:
        return original(shape)
    model = dense(shape).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(drawn + (parameter.dim() == 1))
    return Original(model=model, tensors=model.state_dict())


@pytest.mark.parametrize("name", SHAPES)
def test_losses_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    model = theirs(shape)
    model.save(tmp_path, fused=False)
    values, biases = saved_weights(tmp_path, shape)
    weights = {key: value.double() for key, value in values.items()}
    biases = {layer: bias.double() for layer, bias in biases.items()}
    run = sequence_run(shape, weights, TOKENS[:-1], unit=EMBEDDING_UNIT, biases=biases)
    ours = token_losses(run, TOKENS[1:])
    with torch.no_grad():
        logits = model.model(torch.tensor([TOKENS[:-1]])).logits[0]
    right = torch.nn.functional.cross_entropy(logits, torch.tensor(TOKENS[1:]), reduction="none")
    assert logits.std() > 0.5
    torch.testing.assert_close(ours.float(), right, rtol=2e-5, atol=2e-5)


def test_a_label_that_is_ignored_counts_nothing() -> None:
    weights = {name: w.requires_grad_() for name, w in random_weights(NANO).items()}
    run = sequence_run(NANO, weights, [1, 2, 3], unit=EMBEDDING_UNIT)
    losses = token_losses(run, [2, -100, 4])
    assert losses[1] == 0.0
    assert (losses[[0, 2]] > 0).all()
    units = list(dict.fromkeys(unit for unit, _, _ in run.parts))
    assert units == ["embedding", *(f"layers.{i}" for i in range(NANO.layers)), "head"]
