"""The tensors of a folder are every parameter once, in files of the size that was asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import pytest

from echelon.config.load import load_job
from echelon.config.presets import preset_names
from echelon.core.errors import ConfigError
from echelon.core.model_shape import Rotary
from echelon.core.parameters import num_parameters, parameters, router_biases
from echelon.interop.hugging_face.folder import (
    folder_tensors,
    hub_config,
    index_text,
    shape_of_config,
    share_out,
)
from tests.parallel.layouts import GPT2, NANO
from tests.training.weights.test_export import SHAPES

REFUSED = {
    "a soft cap": (
        replace(NANO, soft_cap=30.0),
        'model.soft_cap = 30.0, which would become "none"',
    ),
    "an offset": (replace(NANO, norm_offset=1.0), "model.norm_offset = 1.0, which would become"),
    "a layer norm": (replace(NANO, norm="layernorm"), 'norm = "layernorm", which would become'),
    "no gate": (replace(NANO, gated=False), "model.gated = false, which would become true"),
    "one bias": (replace(NANO, output_bias=True), "model.output_bias = true, which would become"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_is_in_the_folder_once(name: str) -> None:
    shape = SHAPES[name]
    tensors = folder_tensors(shape, hub_config(shape).architecture)
    parts = [part for tensor in tensors for part, _ in tensor.parts]
    specs = (*parameters(shape), *router_biases(shape))
    assert sorted(parts) == sorted(spec.name for spec in specs)
    assert sum(tensor.numel for tensor in tensors) == num_parameters(shape)
    for tensor in tensors:
        sizes = {spec.name: prod(spec.shape) for spec in specs}
        assert sum(sizes[part] for part, _ in tensor.parts) == tensor.numel


def test_files_are_as_large_as_was_asked_for_and_the_index_names_all() -> None:
    shape = SHAPES["llama"]
    tensors = folder_tensors(shape, hub_config(shape).architecture)
    assert list(share_out(tensors, 2, 10**9)) == ["model.safetensors"]
    files = share_out(tensors, 4, 5_000)
    assert next(iter(files)) == f"model-00001-of-{len(files):05d}.safetensors"
    for group in files.values():
        assert sum(one.numel for one in group) * 4 <= 5_000 or len(group) == 1
    index = json.loads(index_text(files, 4))
    assert index["metadata"]["total_size"] == 4 * num_parameters(shape)
    assert index["weight_map"] == {t.key: name for name, group in files.items() for t in group}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_architecture_says_is_refused_with_what_would_differ(name: str) -> None:
    shape, words = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        hub_config(shape)
    assert caught.value.rules == ("weights-have-architecture",)
    assert words in str(caught.value)
    assert caught.value.problems[0].suggestions == ("--to echelon",)


def test_no_row_of_a_vocabulary_is_padding() -> None:
    """A family's own ids are rows that a smaller vocabulary lacks, or that get no gradient."""
    smollm3 = replace(NANO, rotary=Rotary(none_every=2), tied=True)
    olmo2 = replace(NANO, norm_place="after", qk_norm=True, qk_norm_over="width")
    for shape, kind in ((NANO, "llama"), (smollm3, "smollm3"), (olmo2, "olmo2"), (GPT2, "gpt2")):
        found = hub_config(shape)
        assert found.model_type == kind
        tokens = [found.keys[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
        assert tokens == [None, None, None]


def test_a_type_that_is_asked_for_is_taken_or_refused() -> None:
    assert hub_config(NANO).model_type == "llama"
    assert hub_config(NANO, "mistral").model_type == "mistral"
    for asked, words in (
        ("lama", "lama is no model_type that is written"),
        ("mixtral", "mixtral has not the parts of nano: it has no experts"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            hub_config(NANO, asked)
        assert caught.value.rules == ("weights-type-names-shape",)
    with pytest.raises(ConfigError, match=r"nearest is qwen3, but for model\.qk_norm = false"):
        hub_config(NANO, "qwen3")


@pytest.mark.parametrize("name", preset_names("models"))
def test_every_preset_is_said_and_is_the_same_read_back(name: str) -> None:
    """Published models leave as what they are; dropout is no part of what they compute."""
    shape = load_job("nano", [f"model.preset={name}", "batch.sequence_length=16"]).plan.model
    found = hub_config(shape)
    back = shape_of_config(found.keys, shape.name)
    assert back is not None
    if not shape.has_dense_blocks:
        back = replace(back, ffn=shape.ffn)
    assert replace(back, dropout=shape.dropout) == shape
