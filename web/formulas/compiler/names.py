# SPDX-License-Identifier: Apache-2.0
"""What is reached from the entries of the module: its source, its name, and live values."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from math import isinf, isnan
from types import CodeType, FunctionType
from typing import Any, NoReturn

import numpy as np

RESERVED = frozenset(
    (
        *("arguments", "await", "break", "case", "catch", "class", "const", "continue"),
        *("debugger", "default", "delete", "do", "else", "enum", "eval", "export", "extends"),
        *("false", "finally", "for", "function", "if", "implements", "import", "in", "instanceof"),
        *("interface", "let", "new", "null", "package", "private", "protected", "public"),
        *("return", "static", "super", "switch", "this", "throw", "true", "try", "typeof", "var"),
        *("void", "while", "with", "yield", "Map", "Number", "Math", "Array", "Object", "String"),
    )
)
"""Words that a variable can't have as its name in JavaScript, or that the module reads."""

UFUNCS = {"minimum": "min", "maximum": "max"}
"""Functions of NumPy that stand as values, by their names in the page's runtime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """Say what is compiled, and how what can't be is replaced.

    `evaluated` are functions without arguments that are called now; `tabulated` functions of one
    argument, with all values that it can have, which become tables. `given` are functions and
    classes that the page's own code has, by their names there.
    """

    entries: Sequence[Callable[..., Any]]
    evaluated: Sequence[Callable[..., Any]] = ()
    tabulated: Mapping[Callable[..., Any], Sequence[Any]] = field(default_factory=dict[Any, Any])
    given: Mapping[Any, str] = field(default_factory=dict[Any, str])
    dropped: frozenset[tuple[str, str]] = frozenset()
    """Arguments that are left out, as (class, name)."""
    read: frozenset[str] = frozenset()
    """Members of classes that the page's own code reads."""


@dataclass(slots=True)
class Reached:
    """Hold the functions, classes and constants of the module, and the attributes that are read."""

    program: CompiledProgram
    functions: dict[FunctionType, str] = field(default_factory=dict[FunctionType, str])
    classes: dict[type, str] = field(default_factory=dict[type, str])
    constants: dict[str, tuple[str, Any]] = field(default_factory=dict[str, tuple[str, Any]])
    attributes: set[str] = field(default_factory=set[str])
    taken: set[str] = field(default_factory=set[str])

    def function(self, one: FunctionType) -> str:
        """Return the name of a function, which is then part of the module."""
        if one not in self.functions:
            word = one.__name__ if one.__name__ != "<lambda>" else "lambda"
            self.functions[one] = self.free_name(word)
        return self.functions[one]

    def class_(self, one: type) -> str:
        """Return the name of a class, which is then part of the module."""
        if one not in self.classes:
            self.classes[one] = self.free_name(one.__name__)
        return self.classes[one]

    def constant(self, key: str, word: str, value: Any) -> str:
        """Return the name of a constant; `key` tells whether two are one."""
        if key not in self.constants:
            self.constants[key] = self.free_name(word), value
        return self.constants[key][0]

    def free_name(self, word: str) -> str:
        """Return a name that nothing has yet."""
        name, count = f"${word}", 2
        while name in self.taken:
            name, count = f"${word}_{count}", count + 1
        self.taken.add(name)
        return name


def local_name(word: str) -> str:
    """Return what a local variable is called."""
    return f"{word}_" if word in RESERVED else word


class NotCompiled(Exception):
    """Say at which line of which file is something that has no counterpart in the page."""


@cache
def tree_of_file(path: str) -> ast.Module:
    """Return the syntax tree of a file."""
    with open(path, encoding="utf-8") as file:
        return ast.parse(file.read())


def refuse(path: str, node: ast.AST, why: str) -> NoReturn:
    """Raise NotCompiled about a node of a file."""
    raise NotCompiled(f"{path}:{getattr(node, 'lineno', 0)}: {why}")


def function_tree(function: FunctionType) -> ast.FunctionDef | ast.Lambda:
    """Return the syntax tree of a function, or of the only lambda of its line with its names."""
    code: CodeType = function.__code__
    wanted = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = [
        node
        for node in ast.walk(tree_of_file(code.co_filename))
        if isinstance(node, ast.FunctionDef | ast.Lambda)
        and first_line(node) == code.co_firstlineno
        and (function.__name__ == "<lambda>") == isinstance(node, ast.Lambda)
        and tuple(arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)) == wanted
    ]
    if len(found) != 1:
        raise NotCompiled(
            f"{code.co_filename}:{code.co_firstlineno}: {len(found)} functions look like "
            f"{function.__qualname__}"
        )
    return found[0]


def first_line(node: ast.FunctionDef | ast.Lambda) -> int:
    """Return the line on which a function begins, its decorators included."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return min([node.lineno, *(one.lineno for one in decorators)])


def class_tree(kind: type) -> ast.ClassDef:
    """Return the syntax tree of a class at the top of a module."""
    path = inspect.getsourcefile(kind)
    assert path is not None
    return next(
        node
        for node in tree_of_file(path).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )


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
