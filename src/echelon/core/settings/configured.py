# SPDX-License-Identifier: Apache-2.0
"""A field of a record that a run file sets: its help, its values, and its default there.

The annotation has it: ``prefetch: Annotated[int, Configured("units gathered ahead")]``. The name,
the default and the values that fit follow from the field, unless the annotation gives others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from types import NoneType
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
"""Marks a setting with the default of its field."""
KINDS: dict[object, ValueType] = {bool: Flag(), int: COUNT, float: POSITIVE, str: Text()}
"""Values that fit a field of each type, unless its annotation gives others."""


@dataclass(frozen=True, slots=True)
class Configured:
    """A field of a record as a setting: everything that does not follow from the field itself."""

    about: str
    """Purpose of the setting, in a line."""
    kind: ValueType | None = None
    """Values that fit; None: those that fit the type of the field."""
    default: object = OF_FIELD
    """Value where nobody sets one; None for none."""
    name: str = ""
    """Name of the setting, if other than the name of the field."""
    table: str = ""
    """Table of the setting, if other than the table of the record."""
    after: str = ""
    """Setting of the table before this one, if other than the field before."""
    path: bool = False
    """True for a path, relative to the file that sets it."""


def settings_of(record: type, table: str, *names: str) -> list[Setting]:
    """Settings of a table that fields of a record hold: the named fields, else all."""
    hints = get_type_hints(record, include_extras=True)
    settings: list[Setting] = []
    for item in fields(cast(Any, record)):
        for extra in get_args(hints[item.name]):
            if not isinstance(extra, Configured) or extra.table not in ("", table):
                continue
            if not names or item.name in names:
                keys = [setting.key for setting in settings]
                place = keys.index(f"{table}.{extra.after}") + 1 if extra.after else len(keys)
                settings.insert(place, _setting(extra, item, table, hints[item.name]))
    return settings


@cache
def configured_fields(record: type) -> tuple[tuple[str, str, object], ...]:
    """Fields that a run file sets, each with the name of its setting and its type.

    They are those with an annotation; of a record without any, all fields.
    """
    hints = get_type_hints(record, include_extras=True)
    found: list[tuple[str, str, object]] = []
    for item in fields(cast(Any, record)):
        plain, *extras = get_args(hints[item.name]) or (None,)
        found += [
            (item.name, extra.name or item.name, plain)
            for extra in extras
            if isinstance(extra, Configured)
        ]
    return tuple(found) or tuple((item.name, item.name, None) for item in fields(cast(Any, record)))


def value_of_field(hint: object, value: object) -> object:
    """A setting as its field holds it: a word such as "none" is None, or no entries."""
    if isinstance(value, str) and NoneType in get_args(hint):
        return None
    if get_origin(hint) is not tuple:
        return value
    entries = () if isinstance(value, str) else cast("Sequence[object]", value)
    return tuple(float(cast(int, one)) if float in get_args(hint) else one for one in entries)


def value_of_setting(setting: Setting | None, value: object) -> object:
    """A field as its setting has it: the reverse of `value_of_field`."""
    if value is None or value == ():
        return next(iter(getattr(setting and setting.kind, "words", ())), value)
    return list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value


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
    """Values that fit a type: words of a Literal or a registry, numbers, flags."""
    plain, *extras = get_args(hint)
    for extra in extras:
        if isinstance(extra, Mapping):
            return Choice(options=cast("Mapping[str, object]", extra))
    if get_origin(plain) is Literal:
        return Choice(options=get_args(plain))
    return KINDS[plain]
