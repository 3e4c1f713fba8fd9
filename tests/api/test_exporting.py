"""`ec.export_weights`: a run that trained on any layout leaves, is read by transformers, and comes
back bit for bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import echelon as ec
from echelon.core.errors import ConfigError
from echelon.telemetry.run_directory import run_of
from echelon.training.checkpoint.folder import find_checkpoint
from tests.training.small_runs import trained_run, whole_state


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ec.TrainResult:
    return trained_run(tmp_path_factory.mktemp("trained"))


def test_a_run_leaves_with_its_tokenizer_and_writes_the_same_text(
    run: ec.TrainResult, tmp_path: Path
) -> None:
    found = ec.export_weights(run, tmp_path / "out", dtype="fp32")
    assert found.model_type == "llama"
    assert found.num_bytes == (tmp_path / "out/model.safetensors").stat().st_size // 8 * 8 - (
        _header_bytes(tmp_path / "out/model.safetensors")
    )
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = ec.generate(run, "line 1", max_tokens=8, temperature=0)
    ids = tokenizer("line 1", return_tensors="pt", add_special_tokens=False).input_ids
    theirs = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert tuple(theirs.tolist()) == ours.tokens[0]
    state = whole_state(find_checkpoint(run.run).path)
    for name, tensor in (("norm.weight", model.model.norm.weight),):
        assert torch.equal(state[f"parameters/{name}"], tensor)


def _header_bytes(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_the_template_of_chats_leaves_beside_the_tokenizer(
    run: ec.TrainResult, tmp_path: Path
) -> None:
    assert not list(ec.export_weights(run, tmp_path / "text").folder.glob("*.jinja"))
    shutil.copytree(run.data, tmp_path / "chats")
    (tmp_path / "chats/chat_template.jinja").write_text("{{ messages[0].content }}")
    found = ec.export_weights(replace(run, data=tmp_path / "chats"), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(found.folder)
    told = tokenizer.apply_chat_template([{"role": "user", "content": "line"}], tokenize=False)
    assert told == "line"


def test_what_left_comes_back_bit_for_bit(run: ec.TrainResult, tmp_path: Path) -> None:
    """A run that starts from the folder, and takes no step of any size, has the same bits."""
    ec.export_weights(run, tmp_path / "out", dtype="fp32", file_bytes=20_000)
    job = [f"train.weights={tmp_path / 'out'}", "optimizer.learning_rate=1e-30"]
    job += [f"model.hf_config={tmp_path / 'out'}"]
    (tmp_path / "again").mkdir()
    again = trained_run(tmp_path / "again", job)
    before, after = (whole_state(find_checkpoint(one.run).path) for one in (run, again))
    names = [name for name in before if name.startswith("parameters/")]
    assert names
    for name in names:
        assert torch.equal(before[name], after[name]), name


def test_a_model_without_an_architecture_leaves_and_comes_back(tmp_path: Path) -> None:
    """In our names: the tokenizer, the shape, and the same bits in a run that begins from them."""
    shape = ["model.sinks=true", "model.soft_cap=20.0", "model.norm_place=after"]
    run = trained_run(tmp_path, shape)
    with pytest.raises(ConfigError, match="--to echelon") as caught:
        ec.export_weights(run, tmp_path / "out")
    assert caught.value.rules == ("weights-have-architecture",)
    found = ec.export_weights(run, tmp_path / "out", to="echelon", dtype="fp32", file_bytes=20_000)
    assert (found.model_type, found.tokenizer) == ("echelon", "bytes, 257 ids")
    assert {*found.files, "model.safetensors.index.json", "tokenizer.json", "config.json"} <= {
        file.name for file in found.folder.iterdir()
    }
    assert AutoTokenizer.from_pretrained(found.folder)("line").input_ids
    (tmp_path / "again").mkdir()
    job = [f"train.weights={found.folder}", f"model.hf_config={found.folder}"]
    again = trained_run(tmp_path / "again", [*job, "optimizer.learning_rate=1e-30"])
    assert run_of(again.run).plan().model == run_of(run.run).plan().model
    before, after = (whole_state(find_checkpoint(one.run).path) for one in (run, again))
    names = [name for name in before if name.startswith("parameters/")]
    assert names
    for name in names:
        assert torch.equal(before[name], after[name]), name


def test_by_default_it_has_the_dtype_of_the_run_and_one_is_never_written_over(
    run: ec.TrainResult, tmp_path: Path
) -> None:
    found = ec.export_weights(run.run, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["torch_dtype"] == {"bf16": "bfloat16", "fp32": "float32"}[found.dtype]
    with pytest.raises(ConfigError) as caught:
        ec.export_weights(run.run, tmp_path / "out")
    assert caught.value.rules == ("never-overwrite",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_numbers_that_cannot_be_meant_are_refused(run: ec.TrainResult, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--threads is 0, and at least 1"):
        ec.export_weights(run, tmp_path / "out", threads=0)
    with pytest.raises(ConfigError, match="no model_type that is written"):
        ec.export_weights(run, tmp_path / "out", model_type="bert")
    assert list(tmp_path.iterdir()) == []


def test_weights_leave_without_a_tokenizer_where_the_data_is_gone(tmp_path: Path) -> None:
    gone = trained_run(tmp_path)
    (tmp_path / "words.txt").unlink()
    shutil.rmtree(gone.data)
    found = ec.export_weights(gone.run, tmp_path / "out")
    assert found.tokenizer.startswith("none, for the run's data is not there: ")
    assert not (tmp_path / "out/tokenizer.json").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None
