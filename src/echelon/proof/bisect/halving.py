# SPDX-License-Identifier: Apache-2.0
"""The numbers that a bisection tries instead of a given one."""

from __future__ import annotations


def halves(number: int, *, least: int = 1) -> list[int]:
    """Return the smaller numbers that halving goes through, the smallest first."""
    found: list[int] = []
    while number // 2 >= least:
        number //= 2
        found.append(number)
    return found[::-1]
