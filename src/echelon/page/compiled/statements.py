# SPDX-License-Identifier: Apache-2.0
"""Statements, functions and classes of Python as those of JavaScript."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

from echelon.page.compiled.calls import call
from echelon.page.compiled.constants import constant_text
from echelon.page.compiled.expressions import Scope, expression, local_name, pattern, targets, truth
from echelon.page.compiled.names import Reached
from echelon.page.compiled.source import class_tree, function_tree, refuse


def function_text(function: FunctionType, name: str, reached: Reached) -> str:
    """Return a function at the top of the module."""
    tree = function_tree(function)
    scope = Scope(
        path=function.__code__.co_filename,
        module=function.__globals__,
        reached=reached,
        call=call,
    )
    if function.__closure__:
        refuse(scope.path, tree, f"{function.__qualname__} has variables of what is around it")
    if isinstance(tree, ast.Lambda):
        return f"const {name} = {expression(scope, tree)};"
    return _function(scope, tree, f"function{'*' * _is_generator(tree)} {name}")


def class_text(kind: type, name: str, reached: Reached) -> str:
    """Return a class with those of its members that somebody reads."""
    members: list[str] = []
    if is_dataclass(kind):
        members.append(_constructor(kind, reached))
    members += _class_variables(kind, reached)
    for owner in kind.__mro__[:-1]:
        if owner.__module__ not in ("abc", "builtins", "typing"):
            members += _members(owner, reached, kind, {one.split("(")[0] for one in members})
    body = "\n".join(members)
    return f"class {name} {{\n{body}\n}}"


def _constructor(kind: type, reached: Reached) -> str:
    rows: list[str] = []
    for item in fields(kind):
        if (kind.__name__, item.name) in reached.program.dropped:
            continue
        if item.default is not MISSING:
            given = f"$rt.given(of.{item.name}, {constant_text(item.default, reached)})"
        elif item.default_factory is not MISSING:
            given = f"$rt.given(of.{item.name}, {constant_text(item.default_factory(), reached)})"
        else:
            given = f"$rt.required(of.{item.name}, {item.name!r})"
        rows.append(f"this.{item.name} = {given};")
    return "constructor(of) {\n" + "\n".join(rows) + "\n}"


def _class_variables(kind: type, reached: Reached) -> Iterator[str]:
    """Yield what the class itself holds, and how its instances read it."""
    own = {item.name for item in fields(kind)} if is_dataclass(kind) else set[str]()
    for name in sorted(reached.attributes - own):
        value = getattr(kind, name, None)
        if isinstance(value, bool | int | float | str):
            yield f"static {name} = {constant_text(value, reached)};"
            yield f"get {name}() {{ return this.constructor.{name}; }}"


def _members(kind: type, reached: Reached, of: type, there: set[str]) -> Iterator[str]:
    """Yield what is read of `kind`, which is the class `of` or one that it is made of."""
    dropped = {item for owner, item in reached.program.dropped if owner in _names(of)}
    tree = class_tree(kind)
    module = vars(sys.modules[kind.__module__])
    path = inspect.getsourcefile(kind) or ""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        if node.name in dropped or node.name not in {*_WORDS, *reached.attributes}:
            continue
        scope = Scope(path=path, module=module, reached=reached, call=call)
        word = _WORDS.get(node.name, node.name)
        head = f"{'*' * _is_generator(node)}{word}"
        marks = {ast.unparse(one) for one in node.decorator_list}
        if word in there or f"get {word}" in there or f"static {word}" in there:
            continue
        if isinstance(vars(kind)[node.name], property | cached_property):
            head = f"get {word}"
        elif marks in ({"classmethod"}, {"staticmethod"}):
            head = f"static {head}"
        elif marks:
            refuse(path, node, f"the decorator {marks}")
        first = node.args.args[0].arg if marks != {"staticmethod"} else None
        yield _function(scope, node, head, this=first)
        if marks == {"classmethod"}:
            yield f"{word}(...given) {{ return this.constructor.{word}(...given); }}"


def _names(kind: type) -> set[str]:
    return {one.__name__ for one in kind.__mro__}


_WORDS: Mapping[str, str] = {
    "__init__": "constructor",
    "__contains__": "__contains__",
    "__str__": "toString",
}
"""What methods with a meaning are called in the page."""


def _is_generator(node: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Yield | ast.YieldFrom) for one in _own(node))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a function, but not in functions inside of it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield from _own(child)


def _function(scope: Scope, node: ast.FunctionDef, head: str, this: str | None = None) -> str:
    given = node.args
    if given.kwarg or given.posonlyargs:
        refuse(scope.path, node, f"the arguments of {node.name}")
    names = [arg.arg for arg in (*given.args, *given.kwonlyargs)]
    defaults: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults))
    defaults += [*given.defaults, *given.kw_defaults]
    bound = {*names, *([given.vararg.arg] if given.vararg else [])}
    assigned = _assigned(node) - bound
    inside = scope.inner(bound | assigned)
    inner = {one.name: one.args for one in node.body if isinstance(one, ast.FunctionDef)}
    inside.functions = {**inside.functions, **inner}
    words: list[str] = []
    for name, default in zip(names, defaults, strict=True):
        if name == this:
            continue
        word = local_name(name)
        words.append(word if default is None else f"{word} = {expression(scope, default)}")
    if given.vararg:
        words.append(f"...{local_name(given.vararg.arg)}")
    lines = [f"{head}({', '.join(words)}) {{"]
    if this is not None:
        lines.append(f"const {this} = this;")
    if loose := sorted(assigned - set(inner)):
        lines.append(f"let {', '.join(map(local_name, loose))};")
    lines += _block(inside, node.body)
    return "\n".join([*lines, "}"])


def _assigned(node: ast.FunctionDef) -> set[str]:
    found: set[str] = set()
    for one in _own(node):
        if isinstance(one, ast.Assign):
            for target in one.targets:
                bound = isinstance(target, ast.Name | ast.Tuple)
                found |= targets(target) if bound else set()
        elif isinstance(one, ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
            if isinstance(one.target, ast.Name | ast.Tuple):
                found |= targets(one.target)
        elif isinstance(one, ast.FunctionDef):
            found.add(one.name)
    return found


def _block(scope: Scope, body: list[ast.stmt]) -> list[str]:
    lines: list[str] = []
    for node in body:
        test = _only_numbers(node)
        if test is not None:
            assert isinstance(node, ast.If)
            lines += _block(scope, node.body if test else node.orelse)
            if test and isinstance(node.body[-1], ast.Return):
                return lines
            continue
        lines.append(_statement(scope, node))
        if isinstance(node, ast.Return):
            return lines
    return lines


def _only_numbers(node: ast.stmt) -> bool | None:
    """Return what ``if x.ndim == 0`` comes to, where all are numbers; None for what is not it."""
    if not isinstance(node, ast.If):
        return None
    return True if ast.unparse(node.test).endswith(".ndim == 0") else None


def _statement(scope: Scope, node: ast.stmt) -> str:
    make = _KINDS.get(type(node))
    if make is None:
        refuse(scope.path, node, f"{type(node).__name__} has no counterpart in the page")
    return make(scope, node)


def _return(scope: Scope, node: ast.Return) -> str:
    return f"return {'undefined' if node.value is None else expression(scope, node.value)};"


def _assign(scope: Scope, node: ast.Assign) -> str:
    value, first = expression(scope, node.value), node.targets[0]
    if len(node.targets) == 1 and isinstance(first, ast.Tuple):
        return f"{pattern(scope, first)} = $rt.unpack({value}, {len(first.elts)});"
    if len(node.targets) == 1 and isinstance(first, ast.Subscript):
        return f"$rt.setitem({_place(scope, first)}, {value});"
    return f"{' = '.join([*(pattern(scope, one) for one in node.targets), value])};"


def _annotated(scope: Scope, node: ast.AnnAssign) -> str:
    if node.value is None:
        return ""
    return f"{pattern(scope, node.target)} = {expression(scope, node.value)};"


def _augmented(scope: Scope, node: ast.AugAssign) -> str:
    both = ast.BinOp(left=node.target, op=node.op, right=node.value)
    value = expression(scope, ast.copy_location(both, node))
    if isinstance(node.target, ast.Subscript):
        if any(isinstance(one, ast.Call) for one in ast.walk(node.target)):
            refuse(scope.path, node, "a place that would be computed twice")
        return f"$rt.setitem({_place(scope, node.target)}, {value});"
    return f"{pattern(scope, node.target)} = {value};"


def _place(scope: Scope, node: ast.Subscript) -> str:
    return f"{expression(scope, node.value)}, {expression(scope, node.slice)}"


def _delete(scope: Scope, node: ast.Delete) -> str:
    if not all(isinstance(one, ast.Name) for one in node.targets):
        refuse(scope.path, node, "del of what is no name")
    return ""


def _if(scope: Scope, node: ast.If) -> str:
    lines = [f"if ({truth(scope, node.test)}) {{", *_block(scope, node.body)]
    if node.orelse:
        lines += ["} else {", *_block(scope, node.orelse)]
    return "\n".join([*lines, "}"])


def _for(scope: Scope, node: ast.For) -> str:
    if node.orelse:
        refuse(scope.path, node, "a loop with else")
    head = f"for ({pattern(scope, node.target)} of $rt.iter({expression(scope, node.iter)}))"
    return "\n".join([f"{head} {{", *_block(scope, node.body), "}"])


def _while(scope: Scope, node: ast.While) -> str:
    if node.orelse:
        refuse(scope.path, node, "a loop with else")
    return "\n".join([f"while ({truth(scope, node.test)}) {{", *_block(scope, node.body), "}"])


def _inner(scope: Scope, node: ast.FunctionDef) -> str:
    if _is_generator(node) or node.decorator_list:
        refuse(scope.path, node, "a generator inside of a function")
    return _function(scope, node, f"function {local_name(node.name)}")


def _raise(scope: Scope, node: ast.Raise) -> str:
    if node.exc is None or node.cause is not None:
        refuse(scope.path, node, "raising what was caught")
    return f"throw {expression(scope, node.exc)};"


def _assert(scope: Scope, node: ast.Assert) -> str:
    return f"$rt.assert({truth(scope, node.test)}, {ast.unparse(node.test)!r});"


def _expression(scope: Scope, node: ast.Expr) -> str:
    return _loose(scope, node.value)


def _loose(scope: Scope, node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return ""
    if isinstance(node, ast.Yield):
        return f"yield {expression(scope, node.value) if node.value else 'undefined'};"
    if isinstance(node, ast.YieldFrom):
        return f"yield* $rt.iter({expression(scope, node.value)});"
    return f"{expression(scope, node)};"


_KINDS: Mapping[type[ast.stmt], Callable[[Scope, Any], str]] = {
    ast.Return: _return,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.If: _if,
    ast.For: _for,
    ast.While: _while,
    ast.Delete: _delete,
    ast.FunctionDef: _inner,
    ast.Expr: _expression,
    ast.Raise: _raise,
    ast.Assert: _assert,
    ast.Break: lambda _, __: "break;",
    ast.Continue: lambda _, __: "continue;",
    ast.Pass: lambda _, __: "",
}
