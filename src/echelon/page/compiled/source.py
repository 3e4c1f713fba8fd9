# SPDX-License-Identifier: Apache-2.0
"""The syntax tree of a live function or class, and how the compiler refuses what it can't do."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from types import CodeType, FunctionType
from typing import NoReturn


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
