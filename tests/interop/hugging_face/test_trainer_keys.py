"""What trainers on top of the Trainer have alike means what TrainingArguments say."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.interop.hugging_face.trainer_keys import (
    model_of,
    read_adamw,
    read_autocast,
    read_course,
    read_model_name,
    read_schedule,
)
from echelon.interop.import_context import import_context
from echelon.interop.key_reader import KeyReader
from echelon.interop.llamafactory.read import KEYS


def settings(**given: object) -> dict[str, object]:
    """Return the settings of a few keys."""
    reader = KeyReader(tool="Tool", path="file", given=given)
    steps = read_course(reader, KEYS, import_context({}, None))
    read_autocast(reader, KEYS, sharded=True)
    read_adamw(reader, KEYS)
    read_schedule(reader, KEYS, steps)
    assert reader.problems == []
    return {key: entry.value for key, entry in reader.entries.items()}


def test_what_is_not_said_is_the_default_of_training_arguments() -> None:
    found = settings()
    assert (found["optimizer.learning_rate"], found["optimizer.schedule"]) == (5e-5, "linear")
    assert (found["optimizer.beta2"], found["optimizer.clip_norm"]) == (0.999, 1.0)
    assert (found["train.seed"], found["precision.parameters"]) == (42, "fp32")


@pytest.mark.parametrize(
    ("given", "rise"),
    [
        ({"max_steps": 100, "warmup_ratio": 0.05}, 5),
        ({"max_steps": 30, "warmup_ratio": 0.1}, 3),
        ({"max_steps": 100, "warmup_steps": 7, "warmup_ratio": 0.5}, 7),
        ({"max_steps": 100, "warmup_steps": 0.1}, 10),
        ({"max_steps": 100}, 0),
    ],
)
def test_the_rise_is_steps_or_a_part_of_the_run(given: dict[str, object], rise: int) -> None:
    assert settings(**given)["optimizer.warmup_steps"] == rise


def test_precision_is_autocast_or_half_throughout() -> None:
    found = settings(bf16="auto")
    assert (found["precision.parameters"], found["precision.reduction"]) == ("bf16", "bf16")
    assert found["precision.gradients"] == "fp32"
    assert settings(pure_bf16=True)["precision.master"] == "bf16"
    assert settings(fp16=True)["precision.loss_scaling"] == "dynamic"


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
