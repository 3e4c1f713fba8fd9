"""Frozen dataclasses to JSON and back, and a hash of their content.

The type annotations are the schema: an unknown, missing or ill-typed entry is a ValueError that
names its place. Files of users go through `config/` first; this reads what Echelon itself wrote.
"""

from __future__ import annotations

import hashlib
import json
import types
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


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


def _decode(kind: Any, data: Any, where: str) -> object:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(kind, data, where)
    if origin is Literal:
        # True == 1 == 1.0: what is written must also have the type of the choice.
        if not any(data == arm and type(data) is type(arm) for arm in get_args(kind)):
            raise ValueError(f"{where}: {data!r} is none of {get_args(kind)}")
        return data
    if origin is tuple:
        return _decode_tuple(kind, data, where)
    if is_dataclass(kind):
        return _decode_dataclass(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        if data not in list(kind):
            raise ValueError(f"{where}: {data!r} is none of {[member.value for member in kind]}")
        return kind(data)
    if kind is float and type(data) is int:
        return float(data)
    if isinstance(kind, type) and type(data) is kind:
        return data
    raise ValueError(f"{where}: expected {kind}, found {data!r}")


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
    raise ValueError("; ".join(failures) or f"{where}: unexpected {data!r}")


def _decode_tuple(kind: Any, data: Any, where: str) -> tuple[object, ...]:
    if not isinstance(data, list | tuple):
        raise ValueError(f"{where}: expected a list, found {data!r}")
    items = cast("list[object]", data)
    arms = get_args(kind)
    if len(arms) == 2 and arms[1] is Ellipsis:
        return tuple(_decode(arms[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if len(arms) != len(items):
        raise ValueError(f"{where}: expected {len(arms)} items, found {len(items)}")
    return tuple(
        _decode(arm, item, f"{where}[{i}]")
        for i, (arm, item) in enumerate(zip(arms, items, strict=True))
    )


def _decode_dataclass(kind: Any, data: Any, where: str) -> object:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected a table, found {data!r}")
    entries = cast("dict[str, object]", data)
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}
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
