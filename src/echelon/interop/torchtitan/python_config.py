# SPDX-License-Identifier: Apache-2.0
"""A configuration of torchtitan that is Python -> the keys of its TOML: parsed, and never run.

    def llama3_8b() -> Trainer.Config:
        return Trainer.Config(model_spec=model_registry("8B"), training=TrainingConfig(...), ...)

A function may also begin with another one and change what it returned. What is no number, text,
list or call of a configuration stays as its own text, so that its key is judged by name.
https://github.com/pytorch/torchtitan: models/*/config_registry.py, of 0.3.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from echelon.core.errors import ConfigError
from echelon.core.rulebook.interop import IMPORT_KIND
from echelon.interop.parsing import flatten_keys, syntax_problem
from echelon.interop.torchtitan.abilities import FLAVORS

SIGN = re.compile(r"->\s*Trainer\.Config\s*:")
"""Found in a file that holds such functions."""
_SPEC = "model_spec"
_IN_BACKWARD = "OptimizersInBackwardContainer"
_RENAMED = {
    "hf_assets_path": "model.hf_assets_path",
    "model_converters.converters": "model.converters",
    "dataloader.dataset": "training.dataset",
    "dataloader.dataset_path": "training.dataset_path",
    "dataloader.": "training.dataloader.",
    "validator.": "validation.",
}
"""Keys that a TOML calls otherwise, and how tables of them begin."""
_DEEPEST = 8  # functions that begin with one another

Table = dict[str, object]


def split_function(path: Path) -> tuple[Path, str]:
    """Return the file and the function of ``FILE.py:FUNCTION``; the function may be left out."""
    file, colon, name = path.name.rpartition(":")
    is_named = bool(colon) and file.endswith(".py") and name.isidentifier()
    return (path.with_name(file), name) if is_named else (path, "")


def parse_python(path: Path, text: str, function: str = "") -> Mapping[str, object]:
    """Return the keys of the configuration that a function of a file returns.

    ConfigError where it is no Python, or where it is not said which of its functions is meant.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(syntax_problem(path, f"is not Python: {error}")) from error
    functions = {one.name: one for one in module.body if isinstance(one, ast.FunctionDef)}
    known = [name for name, one in functions.items() if _returns_config(one)]
    if function not in known:
        if function or len(known) != 1:
            what = (
                f"has no configuration {function!r}"
                if function
                else f"has {len(known)} configurations"
            )
            raise ConfigError(
                IMPORT_KIND.problem(
                    f"{path} {what}: FILE.py:FUNCTION names one that returns Trainer.Config",
                    key="FILE",
                    set_by=str(path),
                    suggestions=[f"{path}:{name}" for name in known],
                )
            )
        (function,) = known
    found = _Reading(functions).table_of(function, 0)
    flat = dict(flatten_keys(found))
    model = next((name for name, _ in FLAVORS if function.startswith(name)), path.parent.name)
    keys: dict[str, object] = {"model.name": model} if _SPEC in flat else {}
    for key, value in flat.items():
        keys[_renamed(key)] = value
    return keys


def _returns_config(function: ast.FunctionDef) -> bool:
    return function.returns is not None and ast.unparse(function.returns) == "Trainer.Config"


def _renamed(key: str) -> str:
    if key == _SPEC:
        return "model.flavor"
    for old, new in _RENAMED.items():
        if key == old or (old.endswith(".") and key.startswith(old)):
            return new + key.removeprefix(old)
    return key


class _Reading:
    """Follow the statements of functions, as far as they are plain."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        """Read these functions."""
        self.functions = functions

    def table_of(self, name: str, depth: int) -> Table:
        """Return what a function returns; what cannot be followed is a key with its text."""
        names: dict[str, object] = {}
        unclear: Table = {}
        for statement in self.functions[name].body:
            match statement:
                case ast.Return(value=ast.expr() as value):
                    found = self._value(value, names, depth)
                    if not isinstance(found, dict):
                        return {"(returned)": str(found), **unclear}
                    return {**cast(Table, found), **unclear}
                case ast.Assign(targets=[ast.Name(id=target)], value=value):
                    names[target] = self._value(value, names, depth)
                case ast.Assign(targets=[ast.Attribute() as target], value=value):
                    place = ast.unparse(target).split(".")
                    if not _put(names.get(place[0]), place[1:], self._value(value, names, depth)):
                        unclear[f"(line {statement.lineno})"] = ast.unparse(statement)
                case ast.Expr(value=ast.Constant()) | ast.ImportFrom() | ast.Import():
                    pass
                case ast.FunctionDef(name=target):
                    names[target] = f"the function {target}"
                case _:
                    unclear[f"(line {statement.lineno})"] = ast.unparse(statement)
        return unclear

    def _value(self, node: ast.expr, names: Mapping[str, object], depth: int) -> object:
        match node:
            case ast.Call(func=ast.Name(id=called), args=[], keywords=[]) if (
                called in self.functions and depth < _DEEPEST
            ):
                return self.table_of(called, depth + 1)
            case ast.Call(
                func=ast.Name(id="model_registry"), args=[ast.Constant(value=flavor)], keywords=[]
            ):
                return flavor
            case ast.Call(func=called, args=[], keywords=keywords) if ast.unparse(called).endswith(
                "Config"
            ):
                table = {one.arg or "**": self._value(one.value, names, depth) for one in keywords}
                if ast.unparse(called).startswith(_IN_BACKWARD):
                    table["early_step_in_backward"] = True
                return table
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(one, names, depth) for one in items]
            case _:
                try:
                    return ast.literal_eval(node)
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    return ast.unparse(node)


def _put(table: object, place: list[str], value: object) -> bool:
    """Put a value where an attribute of a configuration stands, if it is one that was followed."""
    for name in place[:-1]:
        if not isinstance(table, dict):
            return False
        table = cast(Table, table).setdefault(name, {})
    if isinstance(table, dict):
        cast(Table, table)[place[-1]] = value
    return isinstance(table, dict)
