"""Quantities with their units are read into bytes, bytes/s, FLOP/s and seconds, or refused."""

from __future__ import annotations

from math import inf

import pytest

from echelon.core.units import EXAMPLES, Dimension, near_quantity, read_quantity


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("24 GB", "bytes", 24e9),
        ("5 us", "seconds", 5e-6),
        ("30us", "seconds", 3e-5),
        ("1e999 GB", "bytes", inf),
        ("24GB", "bytes", 24e9),
        ("80 GiB", "bytes", 80 * 2**30),
        ("1.5 TB", "bytes", 1.5e12),
        ("512 B", "bytes", 512),
        ("24e9", "bytes", 24e9),
        ("24_000_000_000", "bytes", 24e9),
        ("50 GB/s", "bytes/s", 50e9),
        ("400 Gb/s", "bytes/s", 50e9),
        ("400 Gbps", "bytes/s", 50e9),
        ("400 Gbit/s", "bytes/s", 50e9),
        ("3.35 TB/s", "bytes/s", 3.35e12),
        ("989 TFLOP/s", "FLOP/s", 989e12),
        ("989TFLOPS", "FLOP/s", 989e12),
        ("8 us", "seconds", 8e-6),
        ("10 min", "seconds", 600),
        ("7B", "numbers", 7e9),
        ("8.03b", "numbers", 8.03e9),
        ("671 B", "numbers", 671e9),
        ("125M", "numbers", 125e6),
        ("300", "numbers", 300),
    ],
)
def test_a_quantity_is_read(text: str, dimension: Dimension, value: float) -> None:
    assert read_quantity(text, dimension) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("24 gb", "bytes"),
        ("7 GB", "numbers"),
        ("24 Gb", "bytes"),
        ("24 GB/s", "bytes"),
        ("-24 GB", "bytes"),
        ("GB", "bytes"),
        ("", "bytes"),
        ("nan", "bytes"),
        ("50 GB", "bytes/s"),
        ("50 gb/s", "bytes/s"),
        ("1 2 GB", "bytes"),
        ("8 minutes", "seconds"),
    ],
)
def test_what_is_in_no_unit_is_not_guessed(text: str, dimension: Dimension) -> None:
    assert read_quantity(text, dimension) is None


@pytest.mark.parametrize("dimension", EXAMPLES)
def test_the_examples_can_be_read(dimension: Dimension) -> None:
    assert all(read_quantity(one, dimension) for one in EXAMPLES[dimension])


@pytest.mark.parametrize(
    ("text", "dimension", "near"),
    [
        ("80 gb", "bytes", "80 GB"),
        ("80GIB", "bytes", "80 GiB"),
        ("989 tflop/s", "FLOP/s", "989 TFLOP/s"),
        ("8 US", "seconds", "8 us"),
        # Bytes or bits: that is not guessed.
        ("400 gb/s", "bytes/s", None),
        ("80 apples", "bytes", None),
        ("gb", "bytes", None),
        ("", "bytes", None),
    ],
)
def test_a_unit_in_the_wrong_case_is_offered_in_the_right_one(
    text: str, dimension: Dimension, near: str | None
) -> None:
    assert near_quantity(text, dimension) == near
