# SPDX-License-Identifier: Apache-2.0
"""Expressions of Python as expressions of JavaScript that mean the same for numbers."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, ModuleType
from typing import Any

from web.formulas.compiler.names import NotCompiled, Reached, constant_text, local_name, refuse

OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Mult: "mul",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.BitAnd: "and",
    ast.BitOr: "or",
}
PLAIN: Mapping[type[ast.operator], str] = {ast.Sub: "-", ast.Div: "/", ast.Pow: "**"}
COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
UNKNOWN = object()
"""What a name or an attribute is where only a run tells."""


@dataclass(slots=True)
class Scope:
    """Hold where an expression stands: its file, the names of its module, and its own variables."""

    path: str
    module: Mapping[str, Any]
    reached: Reached
    variables: set[str] = field(default_factory=set[str])
    functions: dict[str, ast.arguments] = field(default_factory=dict[str, ast.arguments])
    """Functions inside of this one, by name."""
    call: Callable[[Scope, ast.Call], str] | None = None
    yields: list[str] | None = None

    def inner(self, names: set[str]) -> Scope:
        """Return the scope of something inside with variables of its own."""
        return Scope(
            path=self.path,
            module=self.module,
            reached=self.reached,
            variables=self.variables | names,
            functions={k: v for k, v in self.functions.items() if k not in names},
            call=self.call,
        )

    def live(self, node: ast.expr) -> Any:
        """Return the live value of a name of the module or of an attribute of it; else UNKNOWN."""
        if isinstance(node, ast.Name) and node.id not in self.variables:
            found = self.module.get(node.id, UNKNOWN)
            return getattr(builtins, node.id, UNKNOWN) if found is UNKNOWN else found
        if isinstance(node, ast.Attribute):
            owner = self.live(node.value)
            if isinstance(owner, ModuleType | type) or hasattr(owner, "__dataclass_fields__"):
                return getattr(owner, node.attr, UNKNOWN)
        return UNKNOWN


def expression(scope: Scope, node: ast.expr) -> str:
    """Return an expression of JavaScript."""
    make = _KINDS.get(type(node))
    if make is None:
        refuse(scope.path, node, f"{type(node).__name__} has no counterpart in the page")
    return make(scope, node)


def truth(scope: Scope, node: ast.expr) -> str:
    """Return the truth of an expression, as Python has it."""
    if isinstance(node, ast.Compare) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    ):
        return expression(scope, node)
    if isinstance(node, ast.BoolOp):
        sign = " && " if isinstance(node.op, ast.And) else " || "
        return f"({sign.join(truth(scope, one) for one in node.values)})"
    return f"$rt.truth({expression(scope, node)})"


def targets(node: ast.expr) -> set[str]:
    """Return the names that a target binds."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def pattern(scope: Scope, node: ast.expr) -> str:
    """Return a target of an assignment or of a loop."""
    if isinstance(node, ast.Name):
        return local_name(node.id)
    if isinstance(node, ast.Tuple):
        return f"[{', '.join(pattern(scope, one) for one in node.elts)}]"
    if isinstance(node, ast.Attribute):
        return f"{expression(scope, node.value)}.{node.attr}"
    refuse(scope.path, node, "what is assigned to is no name, no tuple of names, no attribute")


def _name(scope: Scope, node: ast.Name) -> str:
    if node.id in scope.variables:
        return local_name(node.id)
    value = scope.live(node)
    if value is UNKNOWN:
        refuse(scope.path, node, f"{node.id} is not known")
    return live_text(scope, node, node.id, value)


def live_text(scope: Scope, node: ast.AST, word: str, value: Any) -> str:
    """Return a live value: a short one as it is, another as a constant of the module."""
    if value in scope.reached.program.given if is_hashable(value) else False:
        return scope.reached.program.given[value]
    if isinstance(value, BuiltinFunctionType | ModuleType) or value in (len, float, int):
        refuse(scope.path, node, f"{word} stands as a value")
    try:
        text = constant_text(value, scope.reached)
    except NotCompiled as error:
        refuse(scope.path, node, f"{word}: {error}")
    if len(text) <= 40 and "(" not in text.strip("()"):
        return text
    return scope.reached.constant(text, word, text)


def is_hashable(value: Any) -> bool:
    """Return whether a live value can be looked up."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _constant(scope: Scope, node: ast.Constant) -> str:
    if node.value is Ellipsis or isinstance(node.value, bytes | complex):
        refuse(scope.path, node, f"the constant {node.value!r}")
    return constant_text(node.value, scope.reached)


def _attribute(scope: Scope, node: ast.Attribute) -> str:
    value = scope.live(node)
    if value is not UNKNOWN and not callable(value) and not isinstance(value, property):
        return live_text(scope, node, node.attr, value)
    if node.attr == "ndim":
        return "0"
    if node.attr == "value":
        # Members of enumerations are their values in the page.
        return f"$rt.value({expression(scope, node.value)})"
    if isinstance(scope.live(node.value), type):
        scope.reached.attributes.add(node.attr)
        return f"{expression(scope, node.value)}.{node.attr}"
    scope.reached.attributes.add(node.attr)
    return f"{expression(scope, node.value)}.{node.attr}"


def _binary(scope: Scope, node: ast.BinOp) -> str:
    left, right = expression(scope, node.left), expression(scope, node.right)
    if type(node.op) in OPERATORS:
        if isinstance(node.op, ast.Mult | ast.Add) and _is_number(node.left, node.right):
            sign = "*" if isinstance(node.op, ast.Mult) else "+"
            return f"({left} {sign} {right})"
        return f"$rt.{OPERATORS[type(node.op)]}({left}, {right})"
    if type(node.op) in PLAIN:
        return f"({left} {PLAIN[type(node.op)]} {right})"
    refuse(scope.path, node, f"the operator {type(node.op).__name__}")


def _is_number(left: ast.expr, right: ast.expr) -> bool:
    """Return whether an operator has a number in it, so that it is one of numbers."""
    return any(
        isinstance(one, ast.Constant) and isinstance(one.value, float) for one in (left, right)
    )


def _unary(scope: Scope, node: ast.UnaryOp) -> str:
    if isinstance(node.op, ast.Not):
        return f"!{truth(scope, node.operand)}"
    inner = expression(scope, node.operand)
    if isinstance(node.op, ast.Invert):
        return f"$rt.invert({inner})"
    return f"(-{inner})" if isinstance(node.op, ast.USub) else f"(+{inner})"


def _boolean(scope: Scope, node: ast.BoolOp) -> str:
    word = "both" if isinstance(node.op, ast.And) else "either"
    first, *rest = (expression(scope, one) for one in node.values)
    for one in rest:
        first = f"$rt.{word}({first}, () => {one})"
    return first


def _compare(scope: Scope, node: ast.Compare) -> str:
    values = [node.left, *node.comparators]
    if len(values) > 2 and not all(
        isinstance(one, ast.Name | ast.Constant | ast.Attribute | ast.Call) for one in values[1:-1]
    ):
        refuse(scope.path, node, "a chain compares what would be computed twice")
    texts = [expression(scope, one) for one in values]
    pairs = zip(texts[:-1], node.ops, texts[1:], strict=True)
    found = [_compared(scope, node, left, op, right) for left, op, right in pairs]
    return found[0] if len(found) == 1 else f"({' && '.join(found)})"


def _compared(scope: Scope, node: ast.Compare, left: str, op: ast.cmpop, right: str) -> str:
    if type(op) in COMPARISONS:
        return f"$rt.number({left}) {COMPARISONS[type(op)]} $rt.number({right})".join("()")
    if isinstance(op, ast.Eq):
        return f"$rt.eq({left}, {right})"
    if isinstance(op, ast.NotEq):
        return f"!$rt.eq({left}, {right})"
    if isinstance(op, ast.In | ast.NotIn):
        return f"{'!' * isinstance(op, ast.NotIn)}$rt.has({right}, {left})"
    if right == "null" or isinstance(scope.live(node.comparators[-1]), Enum):
        return f"({left} {'===' if isinstance(op, ast.Is) else '!=='} {right})"
    refuse(scope.path, node, "`is` is for None and for members of enumerations alone")


def _conditional(scope: Scope, node: ast.IfExp) -> str:
    test = truth(scope, node.test)
    return f"({test} ? {expression(scope, node.body)} : {expression(scope, node.orelse)})"


def _list(scope: Scope, node: ast.Tuple | ast.List | ast.Set) -> str:
    rows = [
        f"...$rt.iter({expression(scope, one.value)})"
        if isinstance(one, ast.Starred)
        else expression(scope, one)
        for one in node.elts
    ]
    return f"[{', '.join(rows)}]"


def _set(scope: Scope, node: ast.Set) -> str:
    return f"$rt.set({_list(scope, node)})"


def _dict(scope: Scope, node: ast.Dict) -> str:
    rows: list[str] = []
    for key, value in zip(node.keys, node.values, strict=True):
        text = expression(scope, value)
        rows.append(f"...{text}" if key is None else f"[{expression(scope, key)}, {text}]")
    return f"$rt.dict([{', '.join(rows)}])"


def _subscript(scope: Scope, node: ast.Subscript) -> str:
    owner = expression(scope, node.value)
    if isinstance(node.slice, ast.Slice):
        if node.slice.step is not None:
            refuse(scope.path, node, "a slice with a step")
        ends = [
            "undefined" if one is None else expression(scope, one)
            for one in (node.slice.lower or ast.Constant(value=0), node.slice.upper)
        ]
        return f"$rt.slice({owner}, {ends[0]}, {ends[1]})"
    return f"$rt.item({owner}, {expression(scope, node.slice)})"


def comprehension(
    scope: Scope, generators: list[ast.comprehension], leaf: Callable[[Scope], str]
) -> str:
    """Return an array of what a comprehension yields."""
    one, *rest = generators
    source = f"$rt.iter({expression(scope, one.iter)})"
    inside = scope.inner(targets(one.target))
    target = pattern(inside, one.target)
    if one.ifs:
        tests = " && ".join(truth(inside, test) for test in one.ifs)
        source += f".filter(({target}) => {tests})"
    if rest:
        return f"{source}.flatMap(({target}) => {comprehension(inside, rest, leaf)})"
    return f"{source}.map(({target}) => {leaf(inside)})"


def _sequence(scope: Scope, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> str:
    return comprehension(scope, node.generators, lambda inside: expression(inside, node.elt))


def _set_of(scope: Scope, node: ast.SetComp) -> str:
    return f"$rt.set({_sequence(scope, node)})"


def _walrus(scope: Scope, node: ast.NamedExpr) -> str:
    return f"({pattern(scope, node.target)} = {expression(scope, node.value)})"


def _mapping(scope: Scope, node: ast.DictComp) -> str:
    rows = comprehension(
        scope,
        node.generators,
        lambda at: f"[{expression(at, node.key)}, {expression(at, node.value)}]",
    )
    return f"$rt.dict({rows})"


def _lambda(scope: Scope, node: ast.Lambda) -> str:
    given = node.args
    if given.vararg or given.kwarg or given.kwonlyargs:
        refuse(scope.path, node, "a lambda with arguments by name")
    names = [arg.arg for arg in given.args]
    inside = scope.inner(set(names))
    body = f"({expression(inside, node.body)})"
    words = ", ".join(map(local_name, names))
    if given.defaults:
        if len(given.defaults) != len(names):
            refuse(scope.path, node, "a lambda with some arguments that have a default")
        # Defaults are bound where the lambda is made.
        values = ", ".join(expression(scope, one) for one in given.defaults)
        return f"(({words}) => () => {body})({values})"
    return f"(({words}) => {body})"


def _formatted(scope: Scope, node: ast.JoinedStr) -> str:
    rows: list[str] = []
    for one in node.values:
        if isinstance(one, ast.Constant):
            rows.append(json.dumps(one.value))
        elif isinstance(one, ast.FormattedValue):
            rows.append(_formatted_value(scope, one))
    return f"$rt.join({', '.join(rows)})" if rows else '""'


def _formatted_value(scope: Scope, node: ast.FormattedValue) -> str:
    text = expression(scope, node.value)
    if node.conversion == ord("r"):
        return f"$rt.repr({text})"
    if node.conversion != -1:
        refuse(scope.path, node, "a conversion other than !r")
    if node.format_spec is None:
        return f"$rt.str({text})"
    parts = node.format_spec.values if isinstance(node.format_spec, ast.JoinedStr) else []
    spec = "".join(str(one.value) for one in parts if isinstance(one, ast.Constant))
    if spec == ",":
        return f"$rt.grouped({text})"
    fixed = _FIXED.fullmatch(spec)
    if fixed is None:
        refuse(scope.path, node, f"the format {spec!r}")
    return f"$rt.fixed({text}, {fixed[2]}, {json.dumps(bool(fixed[1]))})"


_FIXED = re.compile(r"(,?)\.(\d)f")
"""Formats with so many digits behind the point, with commas or without."""


def _called(scope: Scope, node: ast.Call) -> str:
    assert scope.call is not None
    return scope.call(scope, node)


_KINDS: Mapping[type[ast.expr], Callable[[Scope, Any], str]] = {
    ast.Name: _name,
    ast.Constant: _constant,
    ast.Attribute: _attribute,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.BoolOp: _boolean,
    ast.Compare: _compare,
    ast.IfExp: _conditional,
    ast.Tuple: _list,
    ast.List: _list,
    ast.Set: _set,
    ast.Dict: _dict,
    ast.Subscript: _subscript,
    ast.ListComp: _sequence,
    ast.GeneratorExp: _sequence,
    ast.SetComp: _set_of,
    ast.DictComp: _mapping,
    ast.NamedExpr: _walrus,
    ast.Lambda: _lambda,
    ast.JoinedStr: _formatted,
    ast.Call: _called,
}
