"""What trainers on top of the Trainer have alike means what TrainingArguments say."""

from __future__ import annotations

import pytest

from echelon.interop.hugging_face.trainer_keys import (
    read_course,
    read_optimizer,
    read_precision,
    read_schedule,
)
from echelon.interop.import_context import import_context
from echelon.interop.key_reader import KeyReader
from echelon.interop.llamafactory.read import KEYS


def settings(**given: object) -> dict[str, object]:
    """Return the settings of a few keys."""
    reader = KeyReader(tool="Tool", path="file", given=given)
    steps = read_course(reader, KEYS, import_context({}, None))
    read_precision(reader, KEYS, sharded=True)
    read_optimizer(reader, KEYS)
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
