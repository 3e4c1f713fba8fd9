# SPDX-License-Identifier: Apache-2.0
"""Live values as JavaScript: what a module of Python has at its top is written out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from math import isinf, isnan
from types import FunctionType
from typing import Any

import numpy as np

from echelon.page.compiled.names import Reached
from echelon.page.compiled.source import NotCompiled

UFUNCS = {"minimum": "min", "maximum": "max"}
"""Functions of NumPy that stand as values, by their names in the page's runtime."""


def constant_text(value: Any, reached: Reached) -> str:
    """Return a live value as an expression of JavaScript."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return json.dumps(str(value))
    if isinstance(value, int | float):
        return _number(float(value) if isinstance(value, float) else value)
    if callable(value):
        return _callable(value, reached)
    if is_dataclass(value):
        return _record(value, reached)
    if isinstance(value, Mapping):
        rows = ((constant_text(k, reached), constant_text(v, reached)) for k, v in value.items())
        return f"$rt.dict([{', '.join(f'[{k}, {v}]' for k, v in rows)}])"
    if isinstance(value, frozenset | set):
        value = sorted(value)
    if isinstance(value, Iterable):
        return f"[{', '.join(constant_text(one, reached) for one in value)}]"
    raise NotCompiled(f"a value of {type(value).__name__} has no counterpart in the page")


def _callable(value: Any, reached: Reached) -> str:
    if isinstance(value, np.ufunc) and value.__name__ in UFUNCS:
        return f"$rt.{UFUNCS[value.__name__]}"
    if isinstance(value, FunctionType):
        return reached.program.given.get(value) or reached.function(value)
    if isinstance(value, type):
        return reached.program.given.get(value) or reached.class_(value)
    raise NotCompiled(f"{getattr(value, '__qualname__', value)} stands as a value")


def _number(value: float) -> str:
    if isnan(value):
        return "NaN"
    if isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and abs(value) > 2**53:
        raise NotCompiled(f"{value} is more than 2 ** 53, which a number of the page can't be")
    return repr(value) if value >= 0 else f"({value!r})"


def _record(value: Any, reached: Reached) -> str:
    kind = type(value)
    name = reached.class_(kind)
    dropped = {item for owner, item in reached.program.dropped if owner == kind.__name__}
    rows = [
        f"{item.name}: {constant_text(getattr(value, item.name), reached)}"
        for item in fields(value)
        if item.name not in dropped
    ]
    return f"new {name}({{ {', '.join(rows)} }})"
