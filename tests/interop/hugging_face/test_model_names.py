"""Names of models on the hub are presets, where we have their sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.interop.hugging_face.model_names import model_of, read_model_name
from echelon.interop.import_context import import_context
from echelon.interop.key_reader import KeyReader


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("someone/else", None),
    ],
)
def test_a_name_is_a_preset(name: str, preset: str | None) -> None:
    found = model_of(name)
    assert (None if found is None else found.preset) == preset


def test_a_model_that_is_a_preset_with_changes_has_them() -> None:
    found = model_of("meta-llama/Llama-3.1-8B")
    assert found is not None
    assert (found.name, found.changes["model.max_positions"]) == ("llama3.1-8b", 131072)


def test_a_folder_gives_sizes_and_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    reader = KeyReader(tool="Tool", path="file", given={"base": str(tmp_path)})
    read_model_name(reader, "base", import_context({}, None))
    assert reader.entries["model.hf_config"].value == str(tmp_path / "config.json")
    assert reader.entries["train.weights"].value == str(tmp_path)
    assert reader.refusals == []
