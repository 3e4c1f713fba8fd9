"""Pins are read from words, and every wrong one is told at once."""

from __future__ import annotations

import pytest

from echelon.core.errors import ConfigError
from echelon.planner.search.pins import read_pins


def test_pins_are_read_by_their_own_names_and_by_those_of_settings() -> None:
    pins = read_pins(
        ["mesh.tp=8", "zero.stage=1,3", "schedule=interleaved", "recompute=full/2", "offload=host"]
    )
    assert pins.values == {
        "tp": (8,),
        "zero": (1, 3),
        "schedule": ("interleaved-1f1b",),
        "recompute": (2,),
        "offload": (1,),
    }
    assert pins.allows("zero", 3)
    assert not pins.allows("zero", 2)
    assert pins.allows("pp", 7)
    assert pins.without("zero").allows("zero", 2)
    assert pins.having("tp", 4).values_of("tp") == (4,)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("recompute=none", (0,)),
        ("recompute=full", (1,)),
        ("sequence-parallel=on", (1,)),
        ("context=ulysses", ("ulysses",)),
        ("reshard=never", (0,)),
        ("zero.secondary=true", (1,)),
        ("zero.gather=int8,parameters", ("int8", "parameters")),
        ("zero.reduce=int4", ("int4",)),
        ("batch.microbatch_sequences=1,2", (1, 2)),
    ],
)
def test_words_become_values(text: str, values: tuple[object, ...]) -> None:
    assert next(iter(read_pins([text]).values.values())) == values


def test_a_block_of_int8_needs_gathers_in_int8() -> None:
    assert read_pins(["gather=int8", "int8_block=64"]).values_of("int8_block") == (64,)
    with pytest.raises(ConfigError) as caught:
        read_pins(["int8_block=64"])
    assert caught.value.rules == ("no-effect",)


def test_every_pin_that_is_none_is_told_with_what_would_be() -> None:
    with pytest.raises(ConfigError) as caught:
        read_pins(["tq=8", "schedule=1f2b", "tp=0", "recompute=half", "zero=4", "tp", "pp=\u00b2"])
    assert caught.value.rules == ("unknown-pin",) * 7
    works = [problem.suggestions for problem in caught.value.problems]
    assert "tp" in works[0]
    assert "zb-v" in works[1]
    assert works[2] == ("tp=8",)
    assert works[3][:2] == ("none", "full (all)")
    assert works[4] == ("0", "1", "2", "3")
