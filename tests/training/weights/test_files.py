"""Files of weights that do not fit: told before any rank starts, by rule, with what would do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from echelon.core.errors import CheckpointError, Problem
from echelon.core.model_shape import ModelShape, RopeKind, RopeScaling
from echelon.training.weights.files import find_weights, read_headers, read_trainer
from tests.parallel.layouts import GPT2, NANO, QWEN
from tests.training.weights.hugging_face import Tensors, gpt2_tensors, llama_tensors
from tests.training.weights.trainers.folders import deepspeed_zero


def refused(path: Path, shape: ModelShape) -> list[Problem]:
    """Return the problems of a file."""
    with pytest.raises(CheckpointError) as caught:
        find_weights(path, shape)
    problems = list(caught.value.problems)
    assert {problem.key for problem in problems} == {"train.weights"}
    return problems


def saved(folder: Path, tensors: Tensors) -> Path:
    """Write a file of weights; return its folder."""
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def nothing(folder: Path) -> Path:
    """Name a folder that is not there."""
    return folder / "missing"


def only_pickles(folder: Path) -> Path:
    """Hold what is not read."""
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


def a_pickle(folder: Path) -> Path:
    """Name what is not read."""
    return only_pickles(folder) / "pytorch_model.bin"


def several(folder: Path) -> Path:
    """Hold two files and no index."""
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, folder / f"{name}.safetensors")
    return folder


def a_checkpoint(folder: Path) -> Path:
    """Look like a checkpoint of a run."""
    (folder / "index.json").write_text("{}")
    (folder / "state.json").write_text("{}")
    return folder


def without_a_part(folder: Path) -> Path:
    """Name a file in the index that is not there."""
    index = {"weight_map": {name: "part.safetensors" for name in llama_tensors(NANO)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nothing, "does not exist"),
        (only_pickles, "has no safetensors file"),
        (a_pickle, "is no safetensors file"),
        (several, "has 2 safetensors files and no index"),
        (a_checkpoint, "is a checkpoint of Echelon"),
        (without_a_part, "names files that are missing: part.safetensors"),
    ],
)
def test_files_that_are_not_there(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    (problem,) = refused(path, NANO)
    assert problem.rule == "weights-file-exists"
    assert message in problem.message
    if make is a_checkpoint:
        assert problem.suggestions == (f"--resume {path}",)


def header(entries: object) -> bytes:
    """Return a header in the format of safetensors."""
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def entry(dtype: str, shape: list[int], *offsets: int) -> bytes:
    """Return the header of a file with one tensor."""
    return header({"norm.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "was cut short (0 bytes)"),
        (b"\x10\0\0", "was cut short (3 bytes)"),
        (bytes(8) + b"x", "its header cannot be read"),
        ((2**60).to_bytes(8, "little") + b"{}", "was cut short (10 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
        (header([]), "its header cannot be read"),
        (header({"x": {"dtype": "F32"}}), "its header cannot be read"),
        (entry("F32", [2], 0, 8), "norm.weight ends at byte"),
        (entry("F32", [3], 0, 8) + bytes(8), "is damaged: norm.weight is F32 [3] in 8 bytes"),
        (entry("F32", [-2], 0, 8) + bytes(8), "is damaged"),
        (entry("F32", [2], -8, 0) + bytes(8), "is damaged"),
    ],
)
def test_files_that_are_damaged(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    (problem,) = refused(tmp_path, NANO)
    assert problem.rule == "weights-file-readable"
    assert str(file) in problem.message
    assert message in problem.message


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is no index"),
        ("[]", "is no index"),
        ('{"weight_map": 3}', "is no index"),
        ('{"weight_map": {"x": ".."}}', "outside of its folder"),
        ("[" * 200_000, "is no index"),
        ('{"weight_map": {"x": "../model.safetensors"}}', "outside of its folder"),
        ('{"weight_map": {"x": "model.safetensors"}}', "holds x, which it does not"),
    ],
)
def test_an_index_that_is_damaged(index: str, message: str, tmp_path: Path) -> None:
    saved(tmp_path, llama_tensors(NANO))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    (problem,) = refused(tmp_path, NANO)
    assert problem.rule == "weights-file-readable"
    assert message in problem.message


def test_names_that_nobody_knows(tmp_path: Path) -> None:
    save_file({"encoder.0.w": torch.ones(1)}, tmp_path / "model.safetensors")
    (problem,) = refused(tmp_path, NANO)
    assert problem.rule == "weights-known"
    assert "encoder.0.w" in problem.message


def test_a_model_with_more_or_fewer_blocks(tmp_path: Path) -> None:
    saved(tmp_path, llama_tensors(NANO))
    (problem,) = refused(tmp_path, replace(NANO, layers=6))
    assert problem.rule == "weights-complete"
    assert "lacks 18 tensors of nano: model.layers.4.input_layernorm.weight" in problem.message
    assert problem.suggestions == ()
    (tmp_path / "config.json").write_text("{}")
    (problem,) = refused(tmp_path, replace(NANO, layers=3))
    assert problem.rule == "weights-known"
    assert "9 tensors that nano has no place for: model.layers.3." in problem.message
    assert problem.suggestions == (f"model.hf_config = {tmp_path / 'config.json'}",)


def test_biases_of_another_model(tmp_path: Path) -> None:
    saved(tmp_path, llama_tensors(QWEN))
    problems = refused(tmp_path, replace(QWEN, qkv_bias=False, qk_norm=False))
    assert [problem.rule for problem in problems] == ["weights-known"]
    assert "self_attn.q_proj.bias" in problems[0].message


def test_another_kind_of_model(tmp_path: Path) -> None:
    saved(tmp_path, gpt2_tensors(GPT2))
    rules = {problem.rule: problem.message for problem in refused(tmp_path, NANO)}
    assert set(rules) == {"weights-complete", "weights-known", "weights-shape"}
    assert "lm_head.weight" in rules["weights-complete"]
    saved(tmp_path, gpt2_tensors(GPT2))
    (complete, *_) = refused(tmp_path, replace(GPT2, gated=True))
    assert "GPT-2 names have none for layers.0.mlp.gate.weight" in complete.message


def test_another_width(tmp_path: Path) -> None:
    saved(tmp_path, llama_tensors(NANO))
    (problem,) = refused(tmp_path, replace(NANO, ffn=32))
    assert problem.rule == "weights-shape"
    assert "model.layers.0.mlp.gate_proj.weight is [24, 16] there, [32, 16] here" in problem.message


def test_quantized_weights(tmp_path: Path) -> None:
    tensors = llama_tensors(NANO)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    saved(tmp_path, tensors)
    (problem,) = refused(tmp_path, NANO)
    assert problem.rule == "weights-dtype"
    assert f"{name} (F8_E4M3)" in problem.message


def test_a_tied_head_may_be_in_the_file_if_it_is_the_embedding(tmp_path: Path) -> None:
    for shape, tensors, name in (
        (QWEN, llama_tensors(QWEN), "model.embed_tokens.weight"),
        (GPT2, gpt2_tensors(GPT2), "transformer.wte.weight"),
    ):
        tensors["lm_head.weight"] = tensors[name].clone()
        weights = find_weights(saved(tmp_path, tensors), shape)
        assert weights.sources["embedding.weight"][1].key == name
        tensors["lm_head.weight"][-1, -1] += 1
        (problem,) = refused(saved(tmp_path, tensors), shape)
        assert problem.rule == "weights-tied-head"
        assert problem.suggestions == ("model.tied = false",)


def test_a_head_that_is_missing(tmp_path: Path) -> None:
    saved(tmp_path, llama_tensors(QWEN))
    (problem,) = refused(tmp_path, replace(QWEN, tied=False))
    assert problem.rule == "weights-complete"
    assert problem.suggestions == ("model.tied = true",)


def test_constants_of_older_files_are_passed_over(tmp_path: Path) -> None:
    tensors = llama_tensors(NANO)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    find_weights(saved(tmp_path, tensors), NANO)
    tensors = gpt2_tensors(GPT2, prefix="")
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    find_weights(saved(tmp_path, tensors), GPT2)


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"rope_scaling": YARN}, "yarn"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ],
)
@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_weights_trained_with_positions_that_are_not_computed_are_refused(
    tmp_path: Path, config: dict[str, object], kind: RopeKind, name: str
) -> None:
    path = saved(tmp_path, llama_tensors(NANO)) / name
    (tmp_path / "config.json").write_text(json.dumps(config))
    (problem,) = refused(path, NANO)
    assert problem.rule == "weights-positions"
    assert f'"{kind}"' in problem.message
    extended = replace(NANO, rope_scaling=RopeScaling(kind=kind, factor=2.0, original_positions=8))
    find_weights(path, extended)
    assert problem.set_by == f"{tmp_path / 'config.json'}: {next(iter(config))}"


@pytest.mark.parametrize(
    "text", ["{}", "[1]", "{", '{"rope_scaling": null}', '{"rope_scaling": {"type": "default"}}']
)
def test_weights_beside_another_config_are_taken(tmp_path: Path, text: str) -> None:
    path = saved(tmp_path, llama_tensors(NANO))
    (path / "config.json").write_text(text)
    assert find_weights(path, NANO).path == path


def test_a_file_and_an_index_say_the_same_tensors(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "whole.safetensors")
    for name, one in tensors.items():
        save_file({name: one}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_headers(tmp_path / "whole.safetensors")
    parts = read_headers(tmp_path)
    for name, one in found.items():
        assert (parts[name].dtype, parts[name].shape) == (one.dtype, one.shape)
        assert one.num_bytes == tensors[name].nbytes
        assert one.lacking == 0
    assert found["b"].dtype == "BF16"


def test_a_pointer_to_nowhere_is_refused_with_what_is_there(tmp_path: Path) -> None:
    tag = deepspeed_zero(tmp_path, llama_tensors(NANO), 1, 2)
    for text in ("global_step9", "../elsewhere", ""):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(CheckpointError, match="points to") as caught:
            find_weights(tmp_path, NANO)
        assert caught.value.rules == ("weights-file-exists",)
        assert str(tag) in str(caught.value)


def test_a_pointer_to_a_folder_of_nobody_is_refused(tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
    with pytest.raises(CheckpointError, match="of no trainer that is known") as caught:
        read_trainer(tmp_path, NANO)
    assert caught.value.rules == ("weights-file-exists",)


def test_shards_without_metadata_are_refused(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no \.metadata") as caught:
        read_trainer(tmp_path, NANO)
    assert caught.value.rules == ("weights-file-exists",)


def test_other_folders_and_files_are_of_no_trainer(tmp_path: Path) -> None:
    assert read_trainer(tmp_path, NANO) is None
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert read_trainer(tmp_path / "model.safetensors", NANO) is None
