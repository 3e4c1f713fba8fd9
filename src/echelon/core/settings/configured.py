# SPDX-License-Identifier: Apache-2.0
"""A field of a record that a run file sets: its help, its values, and its default there.

A field says so in its annotation: ``prefetch: Annotated[int, Configured("units gathered ahead")]``.
What follows from the field is not said again: its name, its default, and values that fit its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from echelon.core.settings.value_types import (
    COUNT,
    POSITIVE,
    Choice,
    Flag,
    Setting,
    Text,
    ValueType,
)

OF_FIELD = object()
"""The default of a setting that is that of its field."""
KINDS: dict[object, ValueType] = {bool: Flag(), int: COUNT, float: POSITIVE, str: Text()}
"""Values that fit a field of each type, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Configured:
    """What a run file says of a field, in so far as the field itself leaves it open."""

    about: str
    """What the setting is for: a line."""
    kind: ValueType | None = None
    """Values that fit; None: those that fit the type of the field."""
    default: object = OF_FIELD
    """What stands where nobody sets it; None for nothing."""
    name: str = ""
    """The name of the setting where it is not that of the field."""
    table: str = ""
    """The table of the setting where it is not that of the other fields."""
    after: str = ""
    """The setting of the table that it stands after, where it is not the field before."""
    path: bool = False
    """Whether it is a path, relative to the file that sets it."""


def settings_of(record: type, table: str, *names: str) -> list[Setting]:
    """Return the settings of a table that fields of a record hold: the named ones, else all."""
    hints = get_type_hints(record, include_extras=True)
    found: list[Setting] = []
    for item in fields(cast(Any, record)):
        for one in get_args(hints[item.name]):
            if not isinstance(one, Configured) or one.table not in ("", table):
                continue
            if not names or item.name in names:
                setting = _setting(one, item, table, hints[item.name])
                keys = [other.key for other in found]
                place = keys.index(f"{table}.{one.after}") + 1 if one.after else len(found)
                found.insert(place, setting)
    return found


def _setting(configured: Configured, item: Field[Any], table: str, hint: object) -> Setting:
    default = None if item.default is MISSING else item.default
    return Setting(
        key=f"{table}.{configured.name or item.name}",
        kind=configured.kind or _kind_of(hint),
        default=default if configured.default is OF_FIELD else configured.default,
        about=configured.about,
        path=configured.path,
    )


def _kind_of(hint: Any) -> ValueType:
    """Return the values that fit a type: words of a Literal or a registry, numbers, flags."""
    plain, *extras = get_args(hint)
    for extra in extras:
        if isinstance(extra, Mapping):
            return Choice(options=cast("Mapping[str, object]", extra))
    if get_origin(plain) is Literal:
        return Choice(options=get_args(plain))
    return KINDS[plain]
