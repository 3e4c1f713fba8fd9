"""Files that a user names: read, or reported missing together with what is there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from echelon.config.toml_lines import key_lines
from echelon.core.errors import Problem
from echelon.core.rulebook.config import NO_SUCH_FILE, TOML_SYNTAX
from echelon.core.rules import did_you_mean


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
        f"{path} cannot be read ({reason}){there}", set_by=set_by, works=beside[:8]
    )


def _files_beside(path: Path) -> list[Path]:
    try:
        found = [f for f in path.parent.iterdir() if f.is_file()]
        return [f for f in found if f.suffix == path.suffix or f.stem == path.name]
    except OSError:
        return []
