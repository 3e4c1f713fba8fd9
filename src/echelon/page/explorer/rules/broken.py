# SPDX-License-Identifier: Apache-2.0
"""A rule that is broken: its id, and the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echelon.core.rulebook.config import NO_EFFECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Say which rule the controls break, and the arithmetic."""

    rule: str
    message: str


def without_effect(idle: bool, why: str) -> Iterator[Broken]:
    """Yield that a control has no effect, if that is so."""
    if idle:
        yield Broken(rule=NO_EFFECT.id, message=why)


def rest_text(number: int, by: int) -> str:
    """Return what is left of a division, as messages have it."""
    return f"{number} % {by} = {number % by}"
