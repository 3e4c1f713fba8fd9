"""Adapters of PEFT are found where they are those of the run, and refused by a rule otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from echelon.core.choices.lora import LINEARS, Lora
from echelon.core.errors import CheckpointError, Problem
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import is_adapter, parameters
from echelon.interop.hugging_face.adapters import adapter_config, adapter_tensors
from echelon.interop.hugging_face.folder import hub_config
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.weights.adapters import find_adapters
from echelon.training.weights.load import load_weights
from tests.parallel.layouts import GPT2, NANO

LORA = Lora(rank=4, alpha=8.0, targets=("q", "down"))
SHAPE = replace(NANO, lora=LORA)


def folder_of(path: Path, shape: ModelShape, model_type: str = "llama") -> Path:
    """Write adapters of a shape as PEFT does."""
    architecture = hub_config(replace(shape, lora=None), model_type).architecture
    path.mkdir(parents=True)
    tensors = {one.key: torch.randn(one.shape) for one in adapter_tensors(shape, architecture)}
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(adapter_config(shape, architecture))
    return path


def refused(path: Path, shape: ModelShape) -> list[Problem]:
    with pytest.raises(CheckpointError) as caught:
        find_adapters(path, shape)
    return list(caught.value.problems)


def test_each_matrix_is_filled_with_what_the_folder_has(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "tuned", SHAPE)
    found = find_adapters(path, SHAPE)
    specs = [spec for spec in parameters(SHAPE) if is_adapter(spec.name)]
    assert set(found.sources) == {spec.name for spec in specs}
    stored = load_file(path / "adapter_model.safetensors")
    for spec in specs:
        # The lower right part, as a tensor rank or a slice has one.
        offset = tuple(size // 2 for size in spec.shape)
        part = torch.empty([size - start for size, start in zip(spec.shape, offset, strict=True)])
        shard = Shard(
            name=spec.name, global_shape=spec.shape, offset=offset, tensor=part, primary=True
        )
        load_weights(found, {spec.name: [shard]}, SingleRankCommunicator())
        whole = stored[found.sources[spec.name][1].key]
        assert torch.equal(part, whole[tuple(slice(start, None) for start in offset)])


@pytest.mark.parametrize(
    ("lora", "key", "way"),
    [
        (Lora(rank=8, alpha=8.0, targets=("q", "down")), "lora.rank", "lora.rank = 4"),
        (Lora(rank=4, alpha=4.0, targets=("q", "down")), "lora.alpha", "lora.alpha = 8.0"),
        (
            Lora(rank=4, alpha=8.0, targets=("q", "down"), rslora=True),
            "lora.rslora",
            "lora.rslora = false",
        ),
        (
            Lora(rank=4, alpha=8.0, targets=LINEARS),
            "lora.targets",
            'lora.targets = ["q", "down"]',
        ),
    ],
)
def test_other_adapters_are_refused_with_what_fits(
    lora: Lora, key: str, way: str, tmp_path: Path
) -> None:
    path = folder_of(tmp_path / "tuned", SHAPE)
    (problem,) = refused(path, replace(NANO, lora=lora))
    assert (problem.rule, problem.key, problem.suggestions) == ("adapters-fit", key, (way,))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"use_dora": True}, "use_dora = true"),
        ({"bias": "lora_only"}, 'bias = "lora_only"'),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa"'),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"of_a_later_version": {"a": 1}}, "of_a_later_version"),
        ({"peft_type": "LOHA"}, "LOHA"),
    ],
)
def test_what_is_more_than_two_matrices_is_named(
    keys: dict[str, object], told: str, tmp_path: Path
) -> None:
    path = folder_of(tmp_path / "tuned", SHAPE)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, **keys}))
    (problem,) = refused(path, SHAPE)
    assert problem.rule == "adapters-plain"
    assert told in problem.message


def _drop_block(tensors: dict[str, Any]) -> dict[str, Any]:
    return {key: one for key, one in tensors.items() if ".layers.1." not in key}


def _drop_one(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        key: one
        for key, one in tensors.items()
        if not key.endswith("0.mlp.down_proj.lora_A.weight")
    }


def _narrow(tensors: dict[str, Any]) -> dict[str, Any]:
    return {key: one[:, :-1].contiguous() for key, one in tensors.items()}


def _embed(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 2)}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_drop_block, "3 of 4 blocks"),
        (_drop_one, "lacks"),
        (_narrow, "of another model"),
        (_embed, "no place here"),
    ],
)
def test_tensors_that_are_not_the_adapters_are_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], told: str, tmp_path: Path
) -> None:
    path = folder_of(tmp_path / "tuned", SHAPE)
    file = path / "adapter_model.safetensors"
    tensors = change(load_file(file))
    file.unlink()
    save_file(tensors, file)
    problems = refused(path, SHAPE)
    assert {problem.rule for problem in problems} == {"adapters-fit"}
    assert told in problems[0].message, problems


def test_a_module_that_is_several_layers_is_refused(tmp_path: Path) -> None:
    shape = replace(GPT2, lora=Lora(rank=4, alpha=8.0, targets=("q", "k", "v")))
    path = folder_of(tmp_path / "tuned", replace(GPT2, lora=replace(LORA, targets=("up",))), "gpt2")
    file = path / "adapter_model.safetensors"
    key = "base_model.model.transformer.h.0.attn.c_attn.lora_{}.weight"
    file.unlink()
    a_RI, b_OR = torch.zeros(4, GPT2.hidden), torch.zeros(3 * GPT2.hidden, 4)
    save_file({key.format("A"): a_RI, key.format("B"): b_OR}, file)
    (problem,) = refused(path, shape)
    assert problem.rule == "adapters-plain"
    assert "c_attn, which is q, k, v in one" in problem.message


def test_a_folder_without_the_files_says_what_is_there(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path / "nowhere", SHAPE)
    assert problem.rule == "adapters-readable"
    path = folder_of(tmp_path / "tuned", SHAPE)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    (problem,) = refused(path, SHAPE)
    assert problem.rule == "adapters-readable"
    assert "adapter_model.bin" in problem.message
    (path / "adapter_model.bin").rename(path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text("{")
    (problem,) = refused(path, SHAPE)
    assert problem.rule == "adapters-readable"
    (path / "adapter_config.json").write_text(adapter_config(SHAPE, hub_config(NANO).architecture))
    (path / "adapter_model.safetensors").write_bytes(b"torn")
    (problem,) = refused(path, SHAPE)
    assert (problem.rule, problem.key) == ("weights-file-readable", "train.adapters")
