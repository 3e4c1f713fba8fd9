"""Positions that turn: their scaling has a middle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from tests.config.problems import problems_of


def test_rotary_scaling_has_a_middle() -> None:
    found = problems_of("llama3.1-405b", ["model.rope_scaling.low_frequency_factor=4"])
    assert list(found) == ["rope-scaling-order"]


def test_longrope_has_a_divisor_for_each_frequency() -> None:
    stretch = [
        *('model.rope_scaling.kind="longrope"', "model.rope_scaling.factor=2"),
        "model.rope_scaling.original_positions=64",
        *("model.rope_scaling.short_factors=[1.0]", "model.rope_scaling.long_factors=[1.0, 2.0]"),
    ]
    found = problems_of("nano", stretch)
    assert list(found) == ["rope-scaling-factors"]


def test_a_kind_of_stretch_needs_its_own_fields_and_no_others() -> None:
    yarn = ['model.rope_scaling.kind="yarn"', "model.rope_scaling.factor=2"]
    assert "yarn needs it" in problems_of("nano", yarn)["missing-setting"].message
    both = [*yarn, "model.rope_scaling.original_positions=64"]
    low = problems_of("nano", [*both, "model.rope_scaling.low_frequency_factor=1"])
    assert list(low) == ["no-effect"]
    turns = problems_of("nano", [*both, "model.rope_scaling.slow_turns=40"])
    assert list(turns) == ["rope-scaling-order"]


def test_kinds_of_blocks_need_a_window_and_sinks_heads() -> None:
    kinds = 'model.layer_kinds=["local", "global"]'
    assert list(problems_of("nano", [kinds])) == ["no-effect"]
    assert not problems_of("nano", [kinds, "model.window=8"])
    base = problems_of("nano", ["model.local_rope_theta=100", "model.window=8"])
    assert list(base) == ["no-effect"]
    assert "no-effect" in problems_of("deepseek-v3", ["model.sinks=true"])


def test_longrope_has_a_divisor_for_each_pair_that_turns(tmp_path: Path) -> None:
    """Of heads of 8 dims, 6 turn: three divisors, as Phi-4-mini has 48 for 96 of 128."""
    keys: dict[str, object] = {
        "model_type": "phi3",
        "vocab_size": 261,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "original_max_position_embeddings": 8,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(keys))
    shape = load_job("nano", [f"model.hf_config={path}", "batch.sequence_length=16"]).plan.model
    assert shape.rope_scaling is not None
    assert (shape.head_dim, shape.rope_scaling.long_factors) == (8, (2.0,) * 3)


@pytest.mark.parametrize(
    ("preset", "length", "facts"),
    [
        ("llama3-8b", 131072, ("more rotary positions change no weight", "model.rope_scaling")),
        ("gpt2", 4096, ("learned positions grows by 3,072", "2.36M parameters")),
    ],
)
def test_a_longer_sequence_may_have_more_positions(
    preset: str, length: int, facts: tuple[str, ...]
) -> None:
    longer = [
        f"batch.sequence_length={length}",
        "batch.global_sequences=8",
        "cluster.preset=8xh100",
    ]
    with pytest.raises(ConfigError) as caught:
        load_job(preset, longer)
    (problem,) = caught.value.problems
    assert problem.rule == "sequence-fits-positions"
    assert f"--set model.max_positions={length}" in problem.suggestions
    assert all(fact in problem.message for fact in facts)
    mended = load_job(preset, [*longer, f"model.max_positions={length}"])
    assert mended.plan.mathematics.sequence_length == length
