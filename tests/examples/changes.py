"""Random changes of one line of a program: of what a rank does, never of what one device does."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ON_RANK, ONE_DEVICE = "on_rank", "one_device"
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.FloorDiv: ast.Mult,
}
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Hold a changed program: what kind of change, in which line, and the line before and after."""

    kind: str
    line: int
    before: str
    after: str
    source: str

    @property
    def sort(self) -> str:
        """Return the kind without what it is of."""
        return self.kind.partition(":")[0]


Edit = Callable[[ast.AST], None]
"""Changes a node of a copied tree in place."""


def changes_of(source: str) -> list[Change]:
    """Return every change of one node of what a rank does that gives another program.

    That is `on_rank`, and the functions that it calls and one device does not.
    """
    tree = ast.parse(source)
    own = _called_from(tree, ON_RANK) - _called_from(tree, ONE_DEVICE)
    axes, right = _axes(tree), ast.unparse(tree)
    found: list[Change] = []
    for place, node in _nodes_of(tree, own):
        for kind, edit in _edits(node, axes):
            changed = copy.deepcopy(tree)
            target = dict(_nodes_of(changed, own))[place]
            before = _line_of(changed, target)
            edit(target)
            text = ast.unparse(ast.fix_missing_locations(changed))
            if text != right:
                found.append(
                    Change(
                        kind=kind,
                        line=getattr(node, "lineno", 0),
                        before=before,
                        after=_line_of(changed, target),
                        source=text + "\n",
                    )
                )
    return found


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _called_from(tree: ast.Module, name: str) -> set[str]:
    """Return the functions of a program that are called from one of them, and itself."""
    functions = _functions(tree)
    found, waiting = set[str](), [name]
    while waiting:
        one = waiting.pop()
        if one in functions and one not in found:
            found.add(one)
            waiting += [node.id for node in ast.walk(functions[one]) if isinstance(node, ast.Name)]
    return found


def _nodes_of(tree: ast.Module, names: set[str]) -> Iterator[tuple[tuple[str, int], ast.AST]]:
    for name, function in _functions(tree).items():
        if name in names:
            yield from (((name, place), node) for place, node in enumerate(ast.walk(function)))


def random_change(source: str, random_of: random.Random) -> Change:
    """Return one change: each kind that is there is as likely as any other."""
    every = changes_of(source)
    kind = random_of.choice(sorted({one.sort for one in every}))
    return random_of.choice([one for one in every if one.sort == kind])


def _axes(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MESH":
            return [str(axis) for axis in ast.literal_eval(node.value)]
    return []


def _line_of(tree: ast.AST, target: ast.AST) -> str:
    """Return the innermost statement around a node, its first line."""
    around = ""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and any(one is target for one in ast.walk(node)):
            around = ast.unparse(node).splitlines()[0]
    return around


def _edits(node: ast.AST, axes: list[str]) -> Iterator[tuple[str, Edit]]:
    yield from _constant_edits(node, axes)
    yield from _expression_edits(node)
    yield from _statement_edits(node)


def _constant_edits(node: ast.AST, axes: list[str]) -> Iterator[tuple[str, Edit]]:
    match node:
        case ast.Constant(value=bool(value)):
            yield "flag", _setters(value=not value)
        case ast.Constant(value=int(value)):
            yield "number", _setters(value=value * 2 if value else 1)
            yield "number", _setters(value=value - 1)
        case ast.Constant(value=float(value)):
            yield "number", _setters(value=value * 2 if value else 1.0)
        case ast.Constant(value=str(value)) if value in axes:
            for other in axes:
                yield "axis", _setters(value=other)
        case ast.Name(id=name, ctx=ast.Load()) if name.isupper() and name != "MESH":
            yield "constant", _setters(id=f"(2 * {name})")
        case _:
            pass


def _expression_edits(node: ast.AST) -> Iterator[tuple[str, Edit]]:
    match node:
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            yield "operator", _setters(op=_OPERATORS[type(op)]())
            neutral = 0 if isinstance(op, ast.Add | ast.Sub) else 1
            yield "operand", _setters(right=ast.Constant(neutral))
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            yield "comparison", _setters(ops=[_COMPARISONS[type(op)]()])
        case ast.IfExp(body=body, orelse=orelse):
            yield "condition", _setters(body=orelse, orelse=body)
        case ast.If(test=test):
            yield "condition", _setters(test=ast.UnaryOp(op=ast.Not(), operand=test))
        case ast.Call(args=arguments, keywords=keywords):
            for place in range(len(keywords)):
                yield "keyword", _setters(keywords=[*keywords[:place], *keywords[place + 1 :]])
            if len(arguments) > 1:
                yield "arguments", _setters(args=arguments[::-1])
        case _:
            pass


def _statement_edits(node: ast.AST) -> Iterator[tuple[str, Edit]]:
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    statements: list[ast.stmt] = body
    for place, statement in enumerate(statements):
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, ast.Expr | ast.AugAssign) and not text:
            lines = [*statements[:place], ast.Pass(), *statements[place + 1 :]]
            yield f"without: {ast.unparse(statement)}", _setters(body=lines)
            if place:
                two = [statement, statements[place - 1]]
                lines = [*statements[: place - 1], *two, *statements[place + 1 :]]
                yield f"earlier: {ast.unparse(statement)}", _setters(body=lines)


def _setters(**values: object) -> Edit:
    def edit(node: ast.AST) -> None:
        for name, value in values.items():
            setattr(node, name, copy.deepcopy(value))

    return edit
