"""The flags that several commands share, and what is said of a wrong one.

All files that a command is to write are checked before it writes the first of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Annotated

from cyclopts import Parameter

from echelon.config.files.new_file import require_writable
from echelon.config.settings.value_types import MEMORY_BYTES, NUMBERS, Quantity
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import Plan
from echelon.core.quantities import EXAMPLES, near_quantity
from echelon.core.rulebook.command_line import BAD_ARGUMENT, NEVER_OVERWRITE

RunFile = Annotated[str, Parameter(help="A run.toml, or the name of a preset such as nano.")]
"""What to run: a file or a preset."""

Settings = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        show_default=False,
        help="Set table.key=value over what the file says; repeat for more.",
    ),
]
"""Any setting of run.toml."""

Json = Annotated[
    bool,
    Parameter(
        name="--json", show_default=False, help="Print one versioned JSON object instead of text."
    ),
]
"""The form of the result."""


_LONGEST_STEM = 100  # characters of a file name
_KINDS: Mapping[str, str] = {
    ".toml": "a run file (TOML)",
    ".json": "a plan (JSON)",
    ".html": "a page (HTML)",
}
_OTHERS = frozenset((".yaml", ".yml", ".json", ".toml", ".txt", ".sh", ".csv", ".py", ".md"))


def bad_argument(message: str, *suggestions: str) -> ConfigError:
    """Return the error of a single `argument_problem`."""
    return ConfigError(argument_problem(message, *suggestions))


def plan_if_named(run: str | None, settings: Sequence[str], example: str) -> Plan | None:
    """Return the plan of a run, None without one; ConfigError for settings of no run."""
    from echelon.config.load import load_job

    if run is None and settings:
        example = f"echelon explain {example} --set {' --set '.join(settings)}"
        raise bad_argument("--set has an effect where a run is named", example)
    return None if run is None else load_job(run, settings).plan


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
    raise bad_argument(
        f"{flag} {path} would hold {' or '.join(_KINDS[suffix] for suffix in suffixes)}, which its "
        "name does not say",
        *(f"{flag} {free_path(path.parent, stem or 'run', suffix)}" for suffix in suffixes),
    )


def argument_problem(message: str, *suggestions: str, typed: str = "") -> Problem:
    """Return the problem of something that was `typed`, with what to type instead.

    Without it the whole command is shown where the error is told.
    """
    return BAD_ARGUMENT.problem(message, set_by=typed, suggestions=suggestions)


def read_bytes(flag: str, text: str) -> int | Problem:
    """Return the bytes that a flag says, as ``24 GB`` or 24e9; a problem where it says none.

    It is read as `memory_bytes` of a cluster file is.
    """
    return _read_size(flag, text, MEMORY_BYTES)


def read_number(flag: str, text: str) -> int | Problem:
    """Return the number that a flag says, as ``7B`` or 7e9; a problem where it says none."""
    return _read_size(flag, text, NUMBERS)


def _read_size(flag: str, text: str, kind: Quantity) -> int | Problem:
    found, invalid = kind.read(text), kind.check(text)
    if invalid is None:
        assert isinstance(found, int), "bytes and parameters are whole"
        return found
    typed = f"{flag} {quote(text)}"
    near = [found for found in (near_quantity(text, kind.dimension),) if found is not None]
    return invalid.rule.problem(
        f"{typed} {invalid.message}",
        set_by=typed,
        suggestions=[f"{flag} {quote(one)}" for one in near or EXAMPLES[kind.dimension]],
    )


def _same(given: Mapping[str, Path]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for flag, path in given.items():
        place = os.path.normpath(path.absolute())
        if place in first:
            suffix = f".{flag.removeprefix('--')}"
            free = f"{flag} {free_path(path.parent, path.stem, suffix)}"
            yield argument_problem(f"{first[place]} and {flag} name the same file, {path}", free)
        first.setdefault(place, flag)


def _taken(flag: str, path: Path) -> Iterator[Problem]:
    try:
        require_writable(path, key=flag)
    except ConfigError as error:
        if os.path.isdir(path):
            free = free_path(path, "schedule", f".{flag.removeprefix('--')}")
        else:
            there = path.parent if error.rules == (NEVER_OVERWRITE.id,) else Path()
            free = free_path(there, path.stem, path.suffix)
        yield from (replace(one, suggestions=(f"{flag} {free}",)) for one in error.problems)


def free_path(folder: Path, stem: str, suffix: str) -> Path:
    """Return the first of stem, stem-2, stem-3 ... that is not there yet."""
    stem = stem[:_LONGEST_STEM]
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(path for name in names if not os.path.lexists(path := folder / f"{name}{suffix}"))
