"""What rounds is there where pins say so, with the bytes that the formulas of a plan read."""

from __future__ import annotations

from echelon.core.plan import Precision
from echelon.planner.search.pins import Pins
from echelon.planner.search.rounding import EXACT, Rounding, rounding_options


def test_nothing_is_rounded_where_nobody_says_so() -> None:
    assert rounding_options(Pins(), Precision()) == (EXACT,)
    assert EXACT.settings() == {}


def test_every_pinned_value_goes_with_every_other() -> None:
    pins = Pins().having("gather", "parameters", "int8").having("reduce", "int4")
    plain, rounded = rounding_options(pins, Precision(parameters="bf16"))
    # A scale of 4 bytes for 128 numbers, of half a byte in sums.
    assert plain == Rounding(reduce="int4", summed_bytes=0.5 + 4 / 128)
    assert rounded.settings() == {
        "zero.gather": "int8",
        "zero.int8_block": 128,
        "zero.reduce": "int4",
    }
    assert (rounded.gathered_bytes, rounded.gathers_ends) == (1 + 4 / 128, 1.0)
