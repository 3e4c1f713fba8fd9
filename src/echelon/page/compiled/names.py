# SPDX-License-Identifier: Apache-2.0
"""What is reached from the entries of the module, and what each thing is called in the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

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
