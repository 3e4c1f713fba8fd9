# SPDX-License-Identifier: Apache-2.0
"""Python files that users name (FILE or FILE:FUNCTION), looked at without importing them.

A proof imports the file in every rank, after torch. A missing path or function is reported before
that.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from echelon.config.reading import is_file
from echelon.core.errors import ConfigError
from echelon.core.optional import is_installed
from echelon.core.rulebook.prove import PROVE_SUBJECT
from echelon.core.rulebook.verify import VERIFY_FILE, VERIFY_RAISED
from echelon.core.rules import did_you_mean

DEVICE_FUNCTION, RANK_FUNCTION = "one_device", "on_rank"
"""Functions of the file of a program: one device's training, and the program of a rank."""
MOST_NEAR = 3  # names in a message


def split_program(named: str | Path, function: str) -> tuple[Path, str]:
    """Return the file and the function of FILE or FILE:FUNCTION; `function` where none is named."""
    path = Path(named)
    name, _, own = path.name.partition(":")
    return path.with_name(name) if name else path, own or function


def require_program(path: Path, functions: Sequence[str]) -> list[str]:
    """Refuse a Python file that is not there, cannot be parsed, or lacks one of `functions`.

    Return the functions that it defines.
    """
    if not is_file(path):
        folder = path.parent
        beside = sorted(other.name for other in folder.glob("*.py")) if folder.is_dir() else []
        near = did_you_mean(path.name, beside) or beside[:MOST_NEAR]
        reason = "" if folder.is_dir() else f"; there is no folder {folder}"
        raise ConfigError(VERIFY_FILE.problem(f"there is no file {path}{reason}", suggestions=near))
    if path.suffix != ".py":
        raise ConfigError(VERIFY_FILE.problem(f"{path} is not a Python file (.py)"))
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        place = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        problem = VERIFY_RAISED.problem(f"{path}{place}: SyntaxError: {message}")
        raise ConfigError(problem) from error
    except OSError as error:
        problem = VERIFY_FILE.problem(f"{path} cannot be read: {error.strerror or error}")
        raise ConfigError(problem) from error
    names = {*_names(tree)}
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if "*" in names:  # Whatever another module has.
        return defined
    missing = [
        VERIFY_FILE.problem(
            f"{path.name} has no function {function}",
            suggestions=did_you_mean(function, defined) or defined[:MOST_NEAR],
        )
        for function in functions
        if function not in names
    ]
    if missing:
        raise ConfigError(missing)
    return defined


def require_module(named: str | Path) -> None:
    """Refuse FILE:FUNCTION of a user's module if the file or the function is missing."""
    path, function = split_program(named, "")
    defined = require_program(path, (function,) if function else ())
    if not function:
        raise ConfigError(
            VERIFY_FILE.problem(
                f"{path} is a file: FILE:FUNCTION names the function that returns a module too",
                suggestions=[f"{path}:{name}" for name in defined[:MOST_NEAR]],
            )
        )


def require_subject(subject: str) -> None:
    """Refuse ``module:function`` if its package is not on the path of this Python."""
    module, _, function = subject.partition(":")
    package = module.partition(".")[0]
    if not function:
        reason = "names no function: an engine is module:function"
    elif package in sys.modules or is_installed(package):
        return
    else:
        reason = f"cannot be imported: there is no module {package!r} on PYTHONPATH"
    raise ConfigError(
        PROVE_SUBJECT.problem(
            f"subject {subject!r} {reason}",
            key="--subject",
            suggestions=("without --subject", "--subject MODULE:FUNCTION, on PYTHONPATH"),
        )
    )


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a file defines, imports or assigns, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            if node.name == "__getattr__":
                yield "*"
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
