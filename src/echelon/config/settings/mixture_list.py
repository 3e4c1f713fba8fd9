# SPDX-License-Identifier: Apache-2.0
"""What `data.mixture` takes: tables of a source, its weight, and the step until which it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import cast

from echelon.config.settings.value_types import InvalidValue
from echelon.core.choices.data_mixture import MixturePart
from echelon.core.rulebook.config import WRONG_TYPE
from echelon.core.rulebook.data import MIXTURE_PARTS

NO_MIXTURE = "none"
_KEYS = ("path", "weight", "until_step")
_EXAMPLE = '[{ path = "web", weight = 0.9 }, { path = "code", weight = 0.1 }]'


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureList:
    """Tables with a path, a weight above 0 and until_step, or "none"."""

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit; whether phases fit together is judged later."""
        if value == NO_MIXTURE:
            return None
        if not isinstance(value, list) or not value:
            message = f"is no list of tables; it takes {self.describe()}"
            return InvalidValue(rule=WRONG_TYPE, message=message, suggestions=(_EXAMPLE,))
        for number, part in enumerate(cast("list[object]", value), start=1):
            if why := _misfit(part):
                message = f"table {number} {why}"
                return InvalidValue(rule=MIXTURE_PARTS, message=message, suggestions=(_EXAMPLE,))
        return None

    def describe(self) -> str:
        """Return what fits."""
        return 'tables with path, weight and until_step, or "none"'


def mixture_parts(value: object) -> tuple[MixturePart, ...]:
    """Return the parts that a checked value says; none of "none"."""
    if value == NO_MIXTURE:
        return ()
    return tuple(
        MixturePart(
            path=str(part["path"]),
            weight=float(cast("float", part["weight"])),
            until_step=cast("int | None", part.get("until_step")),
        )
        for part in cast("Sequence[Mapping[str, object]]", value)
    )


def _misfit(part: object) -> str:
    """Return why a table does not fit; nothing where it does."""
    if not isinstance(part, dict):
        return "is no table"
    table = cast("dict[str, object]", part)
    if unknown := [key for key in table if key not in _KEYS]:
        return f"has {unknown[0]}, which is not known; it takes {', '.join(_KEYS)}"
    path, weight, until = table.get("path"), table.get("weight"), table.get("until_step")
    if not isinstance(path, str) or not path.strip():
        return "has no path"
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return "has no weight, a number above 0"
    if not isfinite(weight) or not 0 < weight < 1e300:
        return f"has weight = {weight}, which is not above 0"
    if until is not None and (isinstance(until, bool) or not isinstance(until, int) or until < 1):
        return f"has until_step = {until}, which is no whole number from 1"
    return ""
