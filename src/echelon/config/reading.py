# SPDX-License-Identifier: Apache-2.0
"""Files that a user names: read, or reported missing together with what is there.

Of a TOML file also the line on which each key is set, which the standard parser does not tell: a
scanner runs after the parser, so it may assume that the syntax is right.

Python files (FILE or FILE:FUNCTION) are looked at without importing them: a proof imports the file
in every rank, after torch, and a missing path or function is reported before that.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from echelon.core.errors import ConfigError, Problem
from echelon.core.optional import is_installed
from echelon.core.rulebook.config import NO_SUCH_FILE, TOML_SYNTAX
from echelon.core.rulebook.prove import PROVE_SUBJECT
from echelon.core.rulebook.verify import VERIFY_FILE, VERIFY_RAISED
from echelon.core.rules import did_you_mean

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_DOTTED = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_HEADER = re.compile(rf"[ \t]*\[\[?[ \t]*({_DOTTED})[ \t]*\]\]?")
_KEY = re.compile(rf"[ \t]*({_DOTTED})[ \t]*=")
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}\n]|.',
    re.DOTALL,
)


def key_lines(text: str) -> Mapping[str, int]:
    """Return the line (from 1) of every dotted key and table of valid TOML `text`."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in _statements(text):
        if header := _HEADER.match(line):
            table = _plain(header[1])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            name = _plain(key[1])
            lines.setdefault(f"{table}.{name}" if table else name, number)
    return lines


def line_of(key: str, lines: Mapping[str, int]) -> int | None:
    """Return the line of `key`, or of the nearest table around it."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0]
    return None


def _statements(text: str) -> Iterator[tuple[int, str]]:
    number = start = 1
    depth = 0
    statement = ""
    for token in _TOKEN.findall(text + "\n"):
        if token in ("[", "{"):
            depth += 1
        elif token in ("]", "}"):
            depth -= 1
        if token == "\n" and depth == 0:
            yield start, statement
            statement, start = "", number + 1
        elif not token.startswith("#"):
            statement += token
        number += token.count("\n")


def _plain(dotted: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in re.findall(_PART, dotted))


def is_file(path: Path) -> bool:
    """Return whether there is a file, False too for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Return whether there is a folder, False too for a name that no folder can have."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def read_toml(path: Path, set_by: str) -> tuple[Mapping[str, object], Mapping[str, int]] | Problem:
    """Return the tables of a TOML file and the line of each key, or the problem with it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        return TOML_SYNTAX.problem(f"{path} is not UTF-8 text: {error.reason}", set_by=str(path))
    except (OSError, ValueError) as error:
        return missing_file(path, error, set_by)
    try:
        return tomllib.loads(text), key_lines(text)
    # Beside its own error the parser lets through those of numbers too long and lists too deep.
    except (ValueError, RecursionError) as error:
        message, _, place = str(error).partition(" (at ")
        line = re.search(r"line (\d+)", place)
        where = f"{path}:{line[1]}" if line else f"{path}, at its end"
        return TOML_SYNTAX.problem(f"{path} is not TOML: {message}", set_by=where)


def missing_file(path: Path, error: OSError | ValueError, set_by: str) -> Problem:
    """Return the problem of a file that cannot be read, with what lies beside it."""
    folder = path.parent
    beside: list[str] = []
    if is_folder(path):
        beside = sorted(map(str, path.glob("*.toml")))
        there = "; the file may be in it" if beside else ""
    elif is_folder(folder):
        names = sorted(found.name for found in _files_beside(path))
        close = did_you_mean(path.name, names)
        beside = [str(folder / name) for name in (*close, *(n for n in names if n not in close))]
        there = "" if beside else f"; {folder} has no {path.suffix or 'such'} file"
    else:
        there = f"; there is no folder {folder}"
        beside = sorted(str(found) for found in folder.parent.glob(f"*/{path.name}"))
    reason = getattr(error, "strerror", None) or str(error)
    return NO_SUCH_FILE.problem(
        f"{path} cannot be read ({reason}){there}", set_by=set_by, suggestions=beside[:8]
    )


def _is_toml(file: Path) -> bool:
    try:
        tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _files_beside(path: Path) -> list[Path]:
    try:
        found = [f for f in path.parent.iterdir() if f.is_file()]
        alike = [f for f in found if f.suffix == path.suffix or f.stem == path.name]
        return [f for f in alike if f.suffix != ".toml" or _is_toml(f)]
    except OSError:
        return []


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
