# SPDX-License-Identifier: Apache-2.0
"""The value that holds of a claim, computed; and whether two values agree to the digits given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from echelon.handbook.errata.bubble import BUBBLE
from echelon.handbook.errata.claims import Formula, PublishedClaim
from echelon.handbook.errata.memory import MEMORY
from echelon.handbook.errata.other_claims import OTHERS
from echelon.handbook.errata.volume import VOLUME

COMPUTED: Mapping[str, Formula] = MappingProxyType({**MEMORY, **VOLUME, **BUBBLE, **OTHERS})
"""For each claim that is a number: the function of its inputs that gives what holds."""


def computed_value(claim: PublishedClaim) -> object | None:
    """Return what holds of a claim by our formulas; None where it is told, not computed."""
    function = COMPUTED.get(claim.id)
    return None if function is None else function(SimpleNamespace(**claim.inputs))


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or consists of numbers."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value)
        return all(map(is_number, entries.values()))
    if isinstance(value, list):
        return all(map(is_number, cast("list[Any]", value)))
    return isinstance(value, int | float) and not isinstance(value, bool)


def agrees_to_given_digits(ours: Any, holds: Any) -> bool:
    """Return whether a computed value is the stated one, to the digits to which that is given."""
    if isinstance(holds, Mapping):
        entries = cast("Mapping[str, Any]", holds)
        if not isinstance(ours, Mapping):
            return False
        return set(cast("Mapping[str, Any]", ours)) == set(entries) and all(
            agrees_to_given_digits(ours[k], v) for k, v in entries.items()
        )
    if isinstance(holds, Sequence) and not isinstance(holds, str):
        values = cast("Sequence[Any]", holds)
        if not isinstance(ours, Sequence):
            return False
        found = cast("Sequence[Any]", ours)
        return len(found) == len(values) and all(map(agrees_to_given_digits, found, values))
    if isinstance(holds, str) or not isinstance(ours, int | float):
        return ours == holds
    digits = len(f"{holds!r}".partition(".")[2]) if isinstance(holds, float) else 0
    return abs(ours - holds) <= 0.5001 * 10.0**-digits * (isinstance(holds, float) or 0)
