"""A stretch of rotary frequencies in keys of transformers, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.model.architectures.common import (
    ConfigJsonReader,
    read_rope,
    sharpening,
    stretch_keys,
)
from echelon.core.model_shape import RopeScaling

STRETCHES = (
    RopeScaling(kind="linear", factor=2.0),
    RopeScaling(kind="yarn", factor=4.0, original_positions=16, whole_dims=False),
    RopeScaling(kind="yarn", factor=4.0, original_positions=16, attention_factor=1.25),
    RopeScaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=16
    ),
    RopeScaling(
        kind="longrope",
        factor=2.0,
        original_positions=16,
        short_factors=(1.0, 2.0),
        long_factors=(3.0, 4.0),
    ),
)


def read(rope: dict[str, object], **beside: object) -> ConfigJsonReader:
    """Return a reader that has read how positions turn."""
    config = {"model_type": "llama", "rope_scaling": rope, **beside}
    reader = ConfigJsonReader(path=Path("config.json"), config=config)
    read_rope(reader, 10_000.0)
    return reader


@pytest.mark.parametrize("scaling", STRETCHES, ids=lambda one: one.kind)
def test_what_is_written_is_read_again(scaling: RopeScaling) -> None:
    reader = read(stretch_keys(scaling))
    assert not reader.problems
    found = {key.rpartition(".")[2]: entry.value for key, entry in reader.entries.items()}
    del found["rope_theta"]
    assert found.pop("kind", "llama3") == scaling.kind
    for name, value in found.items():
        wanted = getattr(scaling, name)
        assert value == (list(wanted) if isinstance(wanted, tuple) else wanted)


def test_what_is_left_out_follows_from_the_positions() -> None:
    rope: dict[str, object] = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    beside = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    entries = read(rope, **beside).entries
    assert entries["model.rope_scaling.factor"].value == 4.0
    assert entries["model.rope_scaling.original_positions"].value == 16


def test_two_sharpenings_are_a_ratio() -> None:
    rope: dict[str, object] = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    entries = read(rope, max_position_embeddings=64).entries
    ratio = sharpening(40.0, 1.0) / sharpening(40.0, 0.5)
    assert entries["model.rope_scaling.attention_factor"].value == ratio
    assert sharpening(1.0, 1.0) == 1.0


def test_dynamic_positions_are_plain_ones_and_others_are_refused() -> None:
    assert set(read({"type": "dynamic", "factor": 2.0}).entries) == {"model.rope_theta"}
    (problem,) = read({"type": "proportional"}).problems
    assert problem.rule == "hf-config-value"
