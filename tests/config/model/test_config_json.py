"""Values out of a config.json: taken, missing, or not supported, each with its place."""

from __future__ import annotations

from pathlib import Path

from echelon.config.model.architectures.common import ConfigJsonReader, rope_entry, rope_type


def reader_of(**config: object) -> ConfigJsonReader:
    return ConfigJsonReader(path=Path("m/config.json"), config={"model_type": "llama", **config})


def test_what_is_there_is_taken_with_its_place_else_the_default() -> None:
    reader = reader_of(hidden_size=64, n_layer=None)
    reader.need(hidden="hidden_size")
    reader.take(layers=("n_layer", 12), window=("sliding_window", None))
    assert {key: (one.value, one.source) for key, one in reader.entries.items()} == {
        "model.hidden": (64, "m/config.json: hidden_size"),
        "model.layers": (12, "m/config.json: n_layer"),
    }
    assert reader.problems == []


def test_what_is_missing_is_told_with_what_was_meant() -> None:
    reader = reader_of(hiden_size=64)
    reader.need(hidden="hidden_size")
    (problem,) = reader.problems
    assert problem.rule == "hf-config-missing-key"
    assert "which a llama model needs; did you mean to write hiden_size?" in problem.message


def test_only_what_is_supported_is_let_through_and_absence_is_the_first() -> None:
    reader = reader_of(hidden_act="relu", use_cache=True)
    reader.only(use_cache=(False, True), attention_bias=(False,))
    assert reader.problems == []
    reader.only(hidden_act=("silu", "swish"))
    (problem,) = reader.problems
    assert problem.message == 'hidden_act = "relu" is not supported for llama'
    assert problem.set_by == "m/config.json: hidden_act"
    assert problem.suggestions == ('"silu"', '"swish"')


def test_rotary_positions_stand_under_one_of_two_keys() -> None:
    assert rope_entry({"rope_scaling": None}) == ("rope_scaling", None)
    assert rope_entry({"rope_parameters": {"a": 1}, "rope_scaling": 2})[0] == "rope_parameters"
    assert [rope_type(rope) for rope in (None, {}, {"type": "yarn"}, {"rope_type": "llama3"})] == [
        "default",
        "default",
        "yarn",
        "llama3",
    ]
