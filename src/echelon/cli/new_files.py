"""Check all files that a command is to write, before it writes the first of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from echelon.config.new_file import require_writable
from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.command_line import BAD_ARGUMENT, NEVER_OVERWRITE

_LONGEST_STEM = 100
_KINDS: Mapping[str, str] = {".toml": "a run file (TOML)", ".json": "a plan (JSON)"}
_OTHERS = frozenset((".yaml", ".yml", ".json", ".toml", ".txt", ".sh", ".csv", ".py", ".md"))


def require_new_files(targets: Mapping[str, Path | None]) -> None:
    """Refuse flags whose files exist, are the same, or cannot be made; ConfigError names each.

    Without this a command that cannot write its second file leaves the first, and the command that
    is typed in its place fails at that.
    """
    given = {flag: path for flag, path in targets.items() if path is not None}
    problems = [*_same(given)]
    for flag, path in given.items():
        problems.extend(_taken(flag, path))
    if problems:
        raise ConfigError(problems)


def require_suffix(flag: str, path: Path | None, suffixes: Sequence[str]) -> None:
    """Refuse a file whose name says that it is of another kind than what is written into it."""
    if path is None or path.suffix in suffixes:
        return
    stem = path.stem if path.suffix in _OTHERS else path.name
    problem = BAD_ARGUMENT.problem(
        f"{flag} {path} would hold {' or '.join(_KINDS[suffix] for suffix in suffixes)}, which its "
        "name does not say",
        set_by="the command line",
        works=[f"{flag} {_free(path.parent, stem or 'run', suffix)}" for suffix in suffixes],
    )
    raise ConfigError(problem)


def _same(given: Mapping[str, Path]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for flag, path in given.items():
        place = os.path.normpath(path.absolute())
        if place in first:
            suffix = f".{flag.removeprefix('--')}"
            yield BAD_ARGUMENT.problem(
                f"{first[place]} and {flag} name the same file, {path}",
                set_by="the command line",
                works=(f"{flag} {_free(path.parent, path.stem, suffix)}",),
            )
        first.setdefault(place, flag)


def _taken(flag: str, path: Path) -> Iterator[Problem]:
    try:
        require_writable(path, key=flag)
    except ConfigError as error:
        if os.path.isdir(path):
            free = _free(path, "schedule", f".{flag.removeprefix('--')}")
        else:
            there = path.parent if error.rules == (NEVER_OVERWRITE.id,) else Path()
            free = _free(there, path.stem, path.suffix)
        yield from (replace(one, works=(f"{flag} {free}",)) for one in error.problems)


def _free(folder: Path, stem: str, suffix: str) -> Path:
    """Return the first of stem, stem-2, stem-3 ... that is not there yet."""
    stem = stem[:_LONGEST_STEM]
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(path for name in names if not os.path.lexists(path := folder / f"{name}{suffix}"))
