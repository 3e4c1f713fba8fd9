# SPDX-License-Identifier: Apache-2.0
"""How a tool writes a plan: the keys that it becomes, their form, and what it has no word for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRefusal:
    """Say of a setting why a tool cannot honour it, and which settings instead might do."""

    setting: str
    value: object
    why: str
    suggestions: tuple[Mapping[str, object], ...] = ()


def refusals(*rows: tuple[object, str, object, str, Iterable[object]]) -> Iterator[ExportRefusal]:
    """Yield a refusal for the first row of each setting whose condition holds.

    A row is a condition, a setting, its value, why it is refused, and other values that might do.
    """
    found: set[str] = set()
    for holds, setting, value, why, others in rows:
        if holds and setting not in found:
            found.add(setting)
            suggestions = tuple({setting: other} for other in others)
            yield ExportRefusal(setting=setting, value=value, why=why, suggestions=suggestions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolWriter:
    """Describe how a plan is written in the words of a tool."""

    keys: Callable[[Plan, Mapping[str, object]], Mapping[str, object]]
    """The keys of a plan, and of the settings of the rest of its run."""
    render: Callable[[Mapping[str, object], Sequence[str], Mapping[str, object]], str]
    """The text of keys, below lines for the head of the file, with the settings to record."""
    unsupported: Callable[[Plan], Iterator[ExportRefusal]]
    """What the keys could say and the tool would refuse."""
    advice: Callable[[Plan], Iterator[str]]
    """Lines for the head of the file: how it is started, and what the user adds."""
    says_model: bool = False
    """Whether the keys say the whole model: then no preset is recorded beside them."""
