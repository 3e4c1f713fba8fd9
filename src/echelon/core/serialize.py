# SPDX-License-Identifier: Apache-2.0
"""Frozen dataclasses to JSON and back, and a hash of their content.

The type annotations are the schema: an unknown, missing or ill-typed entry is a ValueError that
names its place. Files of users go through `config/` first; this reads what Echelon itself wrote.
Whatever its file is, JSON is parsed here: a text that is none is a ValueError, however it is wrong.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from echelon.core.choices.registry import Registry

T = TypeVar("T")

DEEPEST = 64
"""Objects and lists inside of one another: no file that is read here comes near."""

_TOO_DEEP = f"its brackets are nested more than {DEEPEST} deep"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def decode_json(
    text: str | bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return the value of a JSON text, its objects made by `pairs`; ValueError where it is none.

    A text whose brackets are nested deeper than any file's is none: whatever reads it would end in
    a RecursionError.
    """
    try:
        data = json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    level: list[Any] = [data]
    for _ in range(DEEPEST):
        level = [item for value in level for item in _items(value)]
        if not level:
            return data
    raise ValueError(_TOO_DEEP)


def to_json(value: object) -> Any:
    """Return `value` as dicts, lists, strings, numbers, booleans and None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple | list):
        return [to_json(item) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value)
        return {str(key): to_json(item) for key, item in entries.items()}
    return value


def from_json(kind: type[T], data: Any, *, where: str = "") -> T:
    """Return `data` (as `to_json` gave it) as a `kind`; ValueError names what does not fit."""
    return cast(T, _decode(kind, data, where or kind.__name__))


def content_hash(value: object) -> str:
    """Return 16 hex digits that depend on the content of `value` and on nothing else."""
    text = json.dumps(to_json(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()


def _decode(kind: Any, data: Any, where: str) -> object:
    if decode := _DECODERS.get(get_origin(kind)):
        return decode(kind, data, where)
    if kind is object:
        return data
    if is_dataclass(kind):
        return _decode_dataclass(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        if data not in list(kind):
            raise ValueError(
                f"{where}: {_SHORT.repr(data)} is none of {[member.value for member in kind]}"
            )
        return kind(data)
    if kind is float and type(data) is int:
        return float(data)
    if isinstance(kind, type) and type(data) is kind:
        return data
    raise ValueError(f"{where}: expected {kind}, found {_SHORT.repr(data)}")


def _decode_literal(kind: Any, data: Any, where: str) -> object:
    # True == 1 == 1.0: what is written must also have the type of the choice.
    if not any(data == arm and type(data) is type(arm) for arm in get_args(kind)):
        raise ValueError(f"{where}: {_SHORT.repr(data)} is none of {get_args(kind)}")
    return data


def _decode_annotated(kind: Any, data: Any, where: str) -> object:
    plain, *extras = get_args(kind)
    names = next((cast("Registry[Any]", one) for one in extras if isinstance(one, Registry)), None)
    if names is None:
        return _decode(plain, data, where)
    if not isinstance(data, str) or data not in names:
        raise ValueError(f"{where}: {data!r} is none of {tuple(names)}")
    return data


def _decode_mapping(kind: Any, data: Any, where: str) -> object:
    arm = get_args(kind)[1]
    return {key: _decode(arm, item, f"{where}.{key}") for key, item in _table(data, where).items()}


def _decode_union(kind: Any, data: Any, where: str) -> object:
    arms = get_args(kind)
    if data is None and type(None) in arms:
        return None
    failures: list[str] = []
    for arm in arms:
        if arm is type(None):
            continue
        try:
            return _decode(arm, data, where)
        except ValueError as error:
            failures.append(str(error))
    raise ValueError("; ".join(failures) or f"{where}: unexpected {_SHORT.repr(data)}")


def _decode_tuple(kind: Any, data: Any, where: str) -> tuple[object, ...]:
    if not isinstance(data, list | tuple):
        raise ValueError(f"{where}: expected a list, found {_SHORT.repr(data)}")
    items = cast("list[object]", data)
    arms = get_args(kind)
    if len(arms) == 2 and arms[1] is Ellipsis:
        arms = arms[:1] * len(items)
    if len(arms) != len(items):
        raise ValueError(f"{where}: expected {len(arms)} items, found {len(items)}")
    return tuple(
        _decode(arm, item, f"{where}[{i}]")
        for i, (arm, item) in enumerate(zip(arms, items, strict=True))
    )


def _table(data: Any, where: str) -> dict[str, object]:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected a table, found {_SHORT.repr(data)}")
    return cast("dict[str, object]", data)


def _decode_dataclass(kind: Any, data: Any, where: str) -> object:
    entries = _table(data, where)
    hints, known = _schema(kind)
    unknown = sorted(set(entries) - set(known))
    if unknown:
        raise ValueError(f"{where}: unknown entries {unknown}")
    values: dict[str, object] = {}
    for name, field in known.items():
        if name in entries:
            values[name] = _decode(hints[name], entries[name], f"{where}.{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}: {name} is missing")
    return kind(**values)


@cache
def _schema(kind: Any) -> tuple[dict[str, Any], dict[str, Field[Any]]]:
    """Return the types and the fields of a dataclass, by name: read once, as that takes long."""
    return get_type_hints(kind, include_extras=True), {f.name: f for f in fields(kind)}


_DECODERS: Mapping[Any, Callable[[Any, Any, str], object]] = {
    Union: _decode_union,
    types.UnionType: _decode_union,
    Literal: _decode_literal,
    Annotated: _decode_annotated,
    Mapping: _decode_mapping,
    tuple: _decode_tuple,
}
