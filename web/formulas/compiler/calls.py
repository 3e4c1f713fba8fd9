# SPDX-License-Identifier: Apache-2.0
"""Calls: of Python's own functions, of NumPy's on one number, of methods, of what is compiled."""

from __future__ import annotations

import ast
import inspect
import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from dataclasses import replace as dataclass_replace
from enum import Enum
from itertools import accumulate
from math import gcd, lcm, log2, prod
from types import FunctionType, MethodType
from typing import Any, cast

import numpy as np

from web.formulas.compiler.expressions import (
    UNKNOWN,
    Scope,
    expression,
    is_hashable,
    live_text,
    local_name,
    truth,
)
from web.formulas.compiler.names import constant_text, refuse

FUNCTIONS: Mapping[Any, str] = {
    abs: "Math.abs",
    Counter: "$rt.counter",
    deque: "$rt.list",
    divmod: "$rt.divmod",
    dict: "$rt.dict",
    enumerate: "$rt.enumerate",
    float: "$rt.float",
    frozenset: "$rt.set",
    gcd: "$rt.gcd",
    int: "$rt.int",
    iter: "$rt.iterator",
    json.dumps: "$rt.dumps",
    lcm: "$rt.lcm",
    len: "$rt.len",
    list: "$rt.list",
    log2: "Math.log2",
    max: "$rt.largest",
    min: "$rt.least",
    prod: "$rt.prod",
    range: "$rt.range",
    reversed: "$rt.reversed",
    round: "$rt.round",
    set: "$rt.set",
    str: "$rt.str",
    sum: "$rt.sum",
    tuple: "$rt.list",
    zip: "$rt.zip",
    any: "$rt.any",
    all: "$rt.all",
    np.abs: "Math.abs",
    np.ceil: "Math.ceil",
    np.clip: "$rt.clip",
    np.floor: "Math.floor",
    np.isin: "$rt.isin",
    np.log: "Math.log",
    np.log2: "Math.log2",
    np.maximum: "$rt.max",
    np.minimum: "$rt.min",
    np.sqrt: "Math.sqrt",
    np.where: "$rt.where",
}
"""Functions of Python and NumPy, by what they are in the page's runtime."""
IGNORED_NAMES: Mapping[Any, frozenset[str]] = {
    np.asarray: frozenset({"dtype"}),
    zip: frozenset({"strict"}),
}
"""Arguments by name that change nothing there."""
METHODS: Mapping[str, str] = {
    "items": "items",
    "values": "values",
    "keys": "keys",
    "get": "get",
    "pop": "pop",
    "append": "append",
    "index": "index",
    "count": "count",
    "startswith": "startswith",
    "endswith": "endswith",
    "join": "joined",
    "add": "include",
    "setdefault": "setdefault",
    "extend": "extend",
    "insert": "insert",
    "remove": "remove",
    "popleft": "popleft",
    "upper": "upper",
    "isupper": "isupper",
    "ljust": "ljust",
}
"""Methods of Python's own types."""


def call(scope: Scope, node: ast.Call) -> str:
    """Return a call as an expression."""
    target = scope.live(node.func)
    if isinstance(node.func, ast.Name) and node.func.id in scope.functions:
        given = scope.functions[node.func.id]
        names = [arg.arg for arg in (*given.args, *given.kwonlyargs)]
        return f"{local_name(node.func.id)}({', '.join(_placed(scope, node, names))})"
    if target is not UNKNOWN and is_hashable(target):
        if target in scope.reached.program.given:
            return f"{scope.reached.program.given[target]}({_plain(scope, node)})"
        special = _SPECIAL.get(target)
        if special is not None:
            return special(scope, node)
        if target in FUNCTIONS:
            return f"{FUNCTIONS[target]}({_plain(scope, node, IGNORED_NAMES.get(target))})"
        return _compiled(scope, node, target)
    if isinstance(node.func, ast.Attribute):
        return _method(scope, node, node.func)
    if node.keywords and not node.args:
        # A class that is a value: of functions nobody knows the names of arguments.
        return f"$rt.made({expression(scope, node.func)}, {{ {', '.join(_named(scope, node))} }})"
    # A function that is a value: a local variable, or what a record holds.
    return f"{expression(scope, node.func)}({_plain(scope, node)})"


def _compiled(scope: Scope, node: ast.Call, target: Any) -> str:
    program, reached = scope.reached.program, scope.reached
    if target in program.evaluated:
        if node.args or node.keywords:
            refuse(scope.path, node, f"{target.__name__} is evaluated now, but has arguments")
        text = constant_text(target(), reached)
        return reached.constant(text, target.__name__, text)
    if target in program.tabulated:
        table = {value: target(value) for value in program.tabulated[target]}
        text = constant_text(table, reached)
        name = reached.constant(text, target.__name__, text)
        return f"$rt.item({name}, {_plain(scope, node)})"
    if isinstance(target, MethodType) and is_dataclass(target.__self__):
        return _of_record(scope, node, target)
    if isinstance(target, type) and issubclass(target, Enum):
        members = constant_text([one.value for one in target], reached)
        return f"$rt.member({members}, {_plain(scope, node)})"
    if not isinstance(target, FunctionType) and hasattr(target, "cache_info"):
        # What a function remembers makes it no other one.
        target = inspect.unwrap(target)
    if isinstance(target, FunctionType):
        return f"{reached.function(target)}({', '.join(_by_signature(scope, node, target))})"
    if isinstance(target, type) and is_dataclass(target):
        return f"new {reached.class_(target)}({_record(scope, node, target)})"
    if isinstance(target, type) and target.__init__ is Exception.__init__:
        return f"new {reached.class_(target)}()"
    if isinstance(target, type) and target.__module__.startswith("echelon."):
        found = _by_signature(scope, node, target)
        return f"new {reached.class_(target)}({', '.join(found)})"
    refuse(scope.path, node, f"{getattr(target, '__qualname__', target)} is not known")


def _of_record(scope: Scope, node: ast.Call, target: MethodType) -> str:
    """Return the call of a method of a record that is there now."""
    if isinstance(target.__self__, type):
        refuse(scope.path, node, f"{target.__qualname__} of a class")
    scope.reached.attributes.add(target.__name__)
    owner = live_text(scope, node, type(target.__self__).__name__, target.__self__)
    return f"{owner}.{target.__name__}({', '.join(_by_signature(scope, node, target))})"


def _plain(scope: Scope, node: ast.Call, ignored: frozenset[str] | None = None) -> str:
    """Return the arguments of a call without names."""
    for word in node.keywords:
        if word.arg not in (ignored or ()):
            refuse(scope.path, node, f"the argument {word.arg} by name")
    return ", ".join(_argument(scope, one) for one in node.args)


def _argument(scope: Scope, node: ast.expr) -> str:
    if isinstance(node, ast.Starred):
        return f"...$rt.iter({expression(scope, node.value)})"
    return expression(scope, node)


def _by_signature(scope: Scope, node: ast.Call, target: Callable[..., Any]) -> list[str]:
    """Return the arguments of a call in the order of what is called."""
    found = inspect.signature(target).parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in found):
        return _any_number(scope, node, found)
    return _placed(scope, node, [one.name for one in found])


def _any_number(
    scope: Scope, node: ast.Call, parameters: Collection[inspect.Parameter]
) -> list[str]:
    """Return the arguments of a function that takes any number: those by name come before them."""
    first = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
    named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    given = {word.arg: expression(scope, word.value) for word in node.keywords}
    if not given.keys() <= set(named):
        refuse(scope.path, node, "arguments by name beside any number of them")
    if named and any(isinstance(one, ast.Starred) for one in node.args[:first]):
        refuse(scope.path, node, "a tuple of arguments before those by name")
    values = [_argument(scope, one) for one in node.args]
    return [
        *values[:first],
        *(given.get(name, "undefined") for name in named),
        *values[first:],
    ]


def _placed(scope: Scope, node: ast.Call, names: list[str]) -> list[str]:
    if any(isinstance(one, ast.Starred) for one in node.args):
        return _spread(scope, node, names)
    values: dict[str, str] = {
        name: expression(scope, one) for name, one in zip(names, node.args, strict=False)
    }
    for word in node.keywords:
        if word.arg is None or word.arg not in names:
            refuse(scope.path, node, f"the argument {word.arg or '**'}")
        values[word.arg] = expression(scope, word.value)
    last = max((names.index(name) for name in values), default=-1)
    return [values.get(name, "undefined") for name in names[: last + 1]]


def _spread(scope: Scope, node: ast.Call, names: list[str]) -> list[str]:
    """Return arguments of which several are in one tuple: as many as those by name leave."""
    given = {word.arg: word.value for word in node.keywords}
    after = [one for one in names if one in given]
    if len(after) != len(given) or (after and names[-len(after) :] != after):
        refuse(scope.path, node, "arguments by name that are not the last ones")
    stars = [one for one in node.args if isinstance(one, ast.Starred)]
    if len(stars) > 1:
        refuse(scope.path, node, "several tuples of arguments")
    count = len(names) - len(after) - (len(node.args) - 1)
    rows: list[str] = []
    for one in node.args:
        text = _argument(scope, one)
        if isinstance(one, ast.Starred) and after:
            text = f"...$rt.unpack({expression(scope, one.value)}, {count})"
        rows.append(text)
    return [*rows, *(expression(scope, given[one]) for one in after)]


def _record(scope: Scope, node: ast.Call, kind: type) -> str:
    """Return the fields that a record is made of."""
    names = [item.name for item in fields(kind)]
    rows = _named(scope, node, kind.__name__)
    given = {word.arg for word in node.keywords}
    for name, one in zip(names, node.args, strict=False):
        rows.insert(0, f"{name}: {expression(scope, one)}")
        given.add(name)
    required = {
        item.name
        for item in fields(kind)
        if item.default is MISSING and item.default_factory is MISSING
    }
    if None not in given and not required <= given:
        refuse(scope.path, node, f"{kind.__name__} without {sorted(required - given)}")
    return f"{{ {', '.join(rows)} }}"


def _named(scope: Scope, node: ast.Call, kind: str = "") -> list[str]:
    rows: list[str] = []
    for word in node.keywords:
        if (kind, word.arg) in scope.reached.program.dropped:
            continue
        text = expression(scope, word.value)
        rows.append(f"...$rt.members({text})" if word.arg is None else f"{word.arg}: {text}")
    return rows


def _method(scope: Scope, node: ast.Call, func: ast.Attribute) -> str:
    owner = expression(scope, func.value)
    if func.attr == "astype":
        if len(node.args) != 1 or scope.live(node.args[0]) is not np.int64:
            refuse(scope.path, node, "astype of another dtype than int64")
        return f"$rt.int({owner})"
    if func.attr in ("any", "all") and not node.args:
        return f"$rt.truth({owner})"
    if func.attr == "sort" and not node.args:
        return f"$rt.sort({owner}, {_ordered(scope, node)})"
    if func.attr in METHODS:
        return f"$rt.{METHODS[func.attr]}({', '.join([owner, _plain(scope, node)])})"
    scope.reached.attributes.add(func.attr)
    found = _signature_of_method(scope, node, func)
    if found is None:
        return f"{owner}.{func.attr}({_plain(scope, node)})"
    return f"{owner}.{func.attr}({', '.join(_placed(scope, node, found))})"


def _signature_of_method(scope: Scope, node: ast.Call, func: ast.Attribute) -> list[str] | None:
    """Return the arguments of a method that a call names some of: all that have it agree."""
    if not node.keywords:
        return None
    known = {
        tuple(inspect.signature(getattr(kind, func.attr)).parameters)[1:]
        for kind in scope.reached.classes
        if inspect.isfunction(getattr(kind, func.attr, None))
    }
    if len(known) != 1:
        refuse(scope.path, node, f"{len(known)} methods are called {func.attr}")
    return list(known.pop())


def _of_value(scope: Scope, node: ast.Call) -> str:
    """Return the value of what makes an array of it."""
    _plain(scope, node, IGNORED_NAMES.get(np.asarray))
    return expression(scope, node.args[0])


def _truth(scope: Scope, node: ast.Call) -> str:
    _plain(scope, node)
    return truth(scope, node.args[0])


def _ndim(scope: Scope, node: ast.Call) -> str:
    _plain(scope, node)
    return "0"


def _getattr(scope: Scope, node: ast.Call) -> str:
    _plain(scope, node)
    return f"$rt.attribute({expression(scope, node.args[0])}, {expression(scope, node.args[1])})"


def _isinstance(scope: Scope, node: ast.Call) -> str:
    kind = scope.live(node.args[1])
    if kind is np.ndarray:
        return "false"
    if kind not in (int, str):
        refuse(scope.path, node, "isinstance of another kind than int, str and arrays")
    return f"$rt.is_{kind.__name__}({expression(scope, node.args[0])})"


def _map(scope: Scope, node: ast.Call) -> str:
    one, source = node.args
    name = ast.Name(id="one_of_them", ctx=ast.Load())
    inside = scope.inner({"one_of_them"})
    applied = ast.copy_location(ast.Call(func=one, args=[name], keywords=[]), node)
    return f"$rt.iter({expression(scope, source)}).map((one_of_them) => {call(inside, applied)})"


def _fields(scope: Scope, node: ast.Call) -> str:
    return f"$rt.fields({expression(scope, node.args[0])})"


def _replace(scope: Scope, node: ast.Call) -> str:
    changes = ", ".join(_named(scope, node))
    return f"$rt.replace({expression(scope, node.args[0])}, {{ {changes} }})"


def _fromkeys(scope: Scope, node: ast.Call) -> str:
    return f"$rt.fromkeys({_plain(scope, node)})"


def _function_of(scope: Scope, node: ast.expr) -> str:
    """Return a function as a value, also one of Python's own."""
    live = scope.live(node)
    if live is not UNKNOWN and is_hashable(live) and live in FUNCTIONS:
        return FUNCTIONS[live]
    return expression(scope, node)


def _ordered(scope: Scope, node: ast.Call) -> str:
    """Return what is compared, and whether the largest comes first."""
    given = {word.arg: word.value for word in node.keywords}
    if not {*given} <= {"key", "reverse"}:
        refuse(scope.path, node, f"an order with {sorted(map(str, given))}")
    key = _function_of(scope, given["key"]) if "key" in given else "null"
    reverse = truth(scope, given["reverse"]) if "reverse" in given else "false"
    return f"{key}, {reverse}"


def _sorted(scope: Scope, node: ast.Call) -> str:
    return f"$rt.sorted({expression(scope, node.args[0])}, {_ordered(scope, node)})"


def _extreme(scope: Scope, node: ast.Call) -> str:
    """Return the largest or the least of values, or that by a key, or what stands for none."""
    given = {word.arg: word.value for word in node.keywords}
    target = scope.live(node.func)
    if not given:
        return f"{FUNCTIONS[target]}({_plain(scope, node)})"
    if not {*given} <= {"key", "default"} or len(node.args) != 1:
        refuse(scope.path, node, f"{target.__name__} with {sorted(map(str, given))}")
    key = _function_of(scope, given["key"]) if "key" in given else "null"
    default = expression(scope, given["default"]) if "default" in given else "undefined"
    sign = 1 if target is max else -1
    return f"$rt.extreme({expression(scope, node.args[0])}, {key}, {default}, {sign})"


def _next(scope: Scope, node: ast.Call) -> str:
    # A generator that stands here is asked once: an array does.
    word = "first" if isinstance(node.args[0], ast.GeneratorExp) else "next"
    return f"$rt.{word}({_plain(scope, node)})"


def _cast(scope: Scope, node: ast.Call) -> str:
    return expression(scope, node.args[1])


def _accumulate(scope: Scope, node: ast.Call) -> str:
    given = {word.arg: word.value for word in node.keywords}
    if {*given} != {"initial"} or len(node.args) != 1:
        refuse(scope.path, node, "accumulate without an initial value, or with a function")
    first = expression(scope, given["initial"])
    return f"$rt.accumulate({expression(scope, node.args[0])}, {first})"


_SPECIAL: Mapping[Any, Callable[[Scope, ast.Call], str]] = {
    np.asarray: _of_value,
    np.any: _truth,
    np.all: _truth,
    np.ndim: _ndim,
    bool: _truth,
    getattr: _getattr,
    isinstance: _isinstance,
    map: _map,
    max: _extreme,
    min: _extreme,
    sorted: _sorted,
    next: _next,
    accumulate: _accumulate,
    cast: _cast,
    fields: _fields,
    dataclass_replace: _replace,
    dict.fromkeys: _fromkeys,
}
