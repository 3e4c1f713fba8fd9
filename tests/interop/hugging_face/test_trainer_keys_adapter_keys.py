"""What trainers say of adapters becomes [lora], or is refused by its key."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.interop.hugging_face.trainer_keys import AdapterKeys, read_adapters
from echelon.interop.key_reader import KeyReader

KEYS = AdapterKeys(rank="r", alpha="a", targets="t", dropout="d", rslora="s", every="e")


def read(keys: AdapterKeys = KEYS, **given: object) -> KeyReader:
    """Return what was read of a few keys."""
    reader = KeyReader(tool="Tool", path="file", given=given)
    read_adapters(reader, keys)
    return reader


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ({"t": "all"}, "all-linear"),
        ({"t": "v_proj, q_proj"}, ["q", "v"]),
        ({"t": ["down_proj", "k_proj", "gate_proj"]}, ["k", "gate", "down"]),
        ({"t": "kv_b_proj,o_proj,q_a_proj"}, ["q_down", "kv_up", "o"]),
        ({"t": ["q_b_proj", "kv_a_proj_with_mqa"]}, ["kv_down", "q_up"]),
        ({"e": True, "t": None}, "all-linear"),
        ({"e": False, "t": ["o_proj"]}, ["o"]),
        ({}, "all-linear"),
    ],
)
def test_layers_have_our_names(given: dict[str, object], targets: object) -> None:
    reader = read(r=8, a=4, **given)  # pyright: ignore[reportArgumentType]
    assert reader.problems == []
    told = {key: entry.value for key, entry in reader.entries.items()}
    assert told == {"lora.rank": 8, "lora.alpha": 4.0, "lora.targets": targets}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"a": 1}, "r"),
        ({"r": 1}, "a"),
        ({"r": 1, "a": 1, "t": "lm_head"}, "t"),
        ({"r": 1, "a": 1, "t": ["x_proj"]}, "t"),
        ({"r": 1, "a": 1, "t": [["q_proj"]]}, "t"),
        ({"r": 1, "a": 1, "d": 0.05}, "d"),
    ],
)
def test_what_is_missing_or_not_built_is_refused(given: dict[str, object], key: str) -> None:
    (refusal,) = read(**given).refusals  # pyright: ignore[reportArgumentType]
    assert refusal.keys == (key,)


def test_defaults_are_those_of_the_tool() -> None:
    keys = AdapterKeys(rank="r", alpha="a", targets="t", dropout="d", rslora="s", default_rank=8)
    told = {key: entry.value for key, entry in read(keys, s=True).entries.items()}
    assert told == {
        "lora.rank": 8,
        "lora.alpha": 16.0,
        "lora.targets": "all-linear",
        "lora.rslora": True,
    }


def test_a_folder_of_adapters_is_what_they_begin_as() -> None:
    keys = replace(KEYS, folder="f")
    for given in ("tuned", ["tuned"]):
        assert read(keys, r=1, a=1, f=given).entries["train.adapters"].value == "tuned"
    (refusal,) = read(keys, r=1, a=1, f="one,two").refusals
    assert refusal.keys == ("f",)


def test_without_adapters_their_keys_mean_nothing() -> None:
    reader = KeyReader(tool="Tool", path="file", given={"r": 8, "e": True})
    KEYS.skip(reader, "there are none")
    assert {row.key for row in reader.rows} == {"r", "e"}
    assert reader.entries == {}
