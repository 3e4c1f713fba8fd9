"""Numbers for people: powers of 1024 for what is held, of 1000 for what is sent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import echelon
from echelon.core.units import (
    binary_bytes,
    binary_unit,
    decimal_bytes,
    duration,
    gib,
    short_count,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (80 * 2**30, "80.00 GiB"),
        (2**30 - 1, "1.00 GiB"),
        (-(2**20), "-1.00 MiB"),
        (5 * 2**60, "5120.00 PiB"),
    ],
)
def test_bytes_held(count: float, text: str) -> None:
    assert binary_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (2**28, "0.25"), (2**30, "1.0"), (80 * 2**30, "80.0"), (2000 * 2**30, "2,000.0")],
)
def test_gib_without_the_unit(count: float, text: str) -> None:
    assert gib(count) == text


def test_the_unit_of_a_column_suits_its_largest_number() -> None:
    assert binary_unit(0) == (1, "B")
    assert binary_unit(2**30 - 1) == (2**20, "MiB")
    assert binary_unit(2**30) == (2**30, "GiB")


def test_no_page_tells_memory_in_decimal_units() -> None:
    """What guides claim is quoted in their unit; links are rated in GB/s, files and sums in GB."""
    root = Path(echelon.__file__).parent
    quoted = ("core/units.py", "handbook/errata/", "page/lessons/", "cli/explain/units.py")
    by_hand = re.compile(r"(?:e9|1e6|GB)[^{}]*\}?\"? ?[GM]B\b(?!/s)")
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py")
        if not path.relative_to(root).as_posix().startswith(quoted)
        for line in path.read_text(encoding="utf-8").splitlines()
        if by_hand.search(line) and "{" in line
    ]
    assert found == []


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (5_368_709_120, "5.37 GB"), (9e12, "9.00 TB")],
)
def test_bytes_sent(count: float, text: str) -> None:
    assert decimal_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (412_300, "412.30k"), (8.03e9, "8.03B"), (999_999, "1.00M")],
)
def test_counts(count: float, text: str) -> None:
    assert short_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00s"),
        (2.314, "2.31s"),
        (59.994, "59.99s"),
        (59.996, "1m00s"),
        (245, "4m05s"),
        (3599.4, "59m59s"),
        (3599.6, "1h00m"),
        (11_520, "3h12m"),
        (7_199, "2h00m"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
