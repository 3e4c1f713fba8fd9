"""Check all files that a command is to write, before it writes the first of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.command_line import BAD_ARGUMENT, CANNOT_WRITE, NEVER_OVERWRITE


def require_new_files(targets: Mapping[str, Path | None]) -> None:
    """Refuse flags whose files exist, are the same, or have no folder; ConfigError names each.

    Without this a command that cannot write its second file leaves the first, and the command that
    is typed in its place fails at that.
    """
    given = {flag: path for flag, path in targets.items() if path is not None}
    problems = [*_same(given)]
    for flag, path in given.items():
        problems.extend(_taken(flag, path))
    if problems:
        raise ConfigError(problems)


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
    suffix = f".{flag.removeprefix('--')}"
    try:
        if path.is_dir():
            text, free = f"{path} is a folder", _free(path, "schedule", suffix)
        elif path.exists() or path.is_symlink():
            text = f"{path} exists and is left as it is"
            free = _free(path.parent, path.stem, path.suffix)
        elif path.parent.is_dir():
            if not os.access(path.parent, os.W_OK):
                text = f"{path} cannot be written: nothing may be written to {path.parent}"
                yield CANNOT_WRITE.problem(text, key=flag)
            return
        else:
            yield CANNOT_WRITE.problem(
                f"{path} cannot be written: there is no folder {path.parent}",
                key=flag,
                works=(f"{flag} {_free(Path(), path.stem, path.suffix)}",),
            )
            return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        yield CANNOT_WRITE.problem(f"{path!a} cannot be written: {reason}", key=flag)
        return
    yield NEVER_OVERWRITE.problem(text, key=flag, works=(f"{flag} {free}",))


def _free(folder: Path, stem: str, suffix: str) -> Path:
    """Return the first of stem, stem-2, stem-3 ... that is not there yet."""
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(path for name in names if not (path := folder / f"{name}{suffix}").exists())
