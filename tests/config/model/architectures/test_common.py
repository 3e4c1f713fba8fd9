"""Keys that most architectures have: functions of the MLP, and which part of a head turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.model.architectures.common import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    ConfigJsonReader,
    read_activation,
    read_rope,
)


def reader_of(**config: object) -> ConfigJsonReader:
    return ConfigJsonReader(path=Path("config.json"), config={"model_type": "llama", **config})


@pytest.mark.parametrize("ours", ACTIVATION_NAMES)
def test_each_function_is_read_as_it_is_written(ours: str) -> None:
    assert ACTIVATIONS[ACTIVATION_NAMES[ours]] == ours  # type: ignore[index]


def test_a_function_that_is_not_computed_is_refused_with_those_that_are() -> None:
    reader = reader_of(hidden_act="relu")
    read_activation(reader, "hidden_act", "silu")
    assert [one.rule for one in reader.problems] == ["hf-config-value"]
    assert '"gelu_new"' in reader.problems[0].suggestions


@pytest.mark.parametrize("inside", [False, True])
def test_the_part_that_turns_stands_beside_or_inside(inside: bool) -> None:
    """transformers 5 keeps it under rope_parameters, before that it was a key."""
    part = {"partial_rotary_factor": 0.75}
    reader = reader_of(**({"rope_parameters": part} if inside else part))
    read_rope(reader, 10_000.0)
    assert reader.entries["model.rotary.fraction"].value == 0.75
    assert reader.problems == []
