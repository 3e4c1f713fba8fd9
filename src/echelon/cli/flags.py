# SPDX-License-Identifier: Apache-2.0
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
from echelon.core.errors import ConfigError, Problem, either
from echelon.core.plan import Plan
from echelon.core.rulebook.config import BAD_ARGUMENT, NEVER_OVERWRITE
from echelon.core.settings.value_types import MEMORY_BYTES, NUMBERS, Quantity
from echelon.core.units import EXAMPLES, near_quantity

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

Overcommit = Annotated[
    bool,
    Parameter(
        negative="",
        show_default=False,
        help="Start the ranks though this host has less free memory than they would take.",
    ),
]
"""Whether to go on where memory is short."""

Json = Annotated[
    bool,
    Parameter(
        name="--json", show_default=False, help="Print one versioned JSON object instead of text."
    ),
]
"""The form of the result."""


OUT = "--out"
"""What every command calls the flag of what it writes."""

_LONGEST_STEM = 100  # characters of a file name
_ENDINGS = frozenset(
    (
        *(".json", ".toml", ".yaml", ".yml", ".csv", ".txt", ".md", ".py", ".sh", ".gz"),
        *(".html", ".htm", ".svg", ".png", ".pdf", ".jpg", ".jpeg", ".gif", ".webp", ".eps", ".ps"),
    )
)
"""What is an ending of a file's name, and no part of it behind a dot."""


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


def require_new_files(targets: Mapping[str, Path]) -> None:
    """Refuse files that exist or cannot be made, by who asked for them; ConfigError names each.

    Without this a command that cannot write its second file leaves the first, and the command that
    is typed in its place fails at that.
    """
    problems = [one for flag, path in targets.items() for one in taken_problems(flag, path)]
    if problems:
        raise ConfigError(problems)


def require_run_file(path: Path | None) -> None:
    """Refuse a file whose name says that it is no run file, where one is written into it."""
    if path is not None and path.suffix != ".toml":
        raise ConfigError(ending_problem(path, {".toml": "a run file (TOML)"}))


def ending_problem(path: Path, holds: Mapping[str, str]) -> Problem:
    """Return the problem of a name that does not say what is to be written, with names that do.

    `holds` says what is written, by what its name ends in: a folder by ``/``.
    """
    stem = path.stem if path.suffix.lower() in _ENDINGS else path.name
    stem = stem.removesuffix(".json") or "run"
    return argument_problem(
        f"{OUT} {path} would hold {either(tuple(holds.values()))}, which its name does not say",
        *(
            f"{OUT} {free_path(path.parent, stem, '')}/"
            if ending == "/"
            else f"{OUT} {free_path(path.parent, stem, ending)}"
            for ending in holds
        ),
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


def taken_problems(flag: str, path: Path) -> Iterator[Problem]:
    """Yield what keeps a file from being written, with a name for `flag` that is free."""
    try:
        require_writable(path, key=flag)
    except ConfigError as error:
        there = path.parent if error.rules == (NEVER_OVERWRITE.id,) else Path()
        free = free_path(there, path.stem, path.suffix)
        yield from (replace(one, suggestions=(f"{flag} {free}",)) for one in error.problems)


def free_path(folder: Path, stem: str, suffix: str) -> Path:
    """Return the first of stem, stem-2, stem-3 ... that is not there yet."""
    stem = stem[:_LONGEST_STEM]
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(path for name in names if not os.path.lexists(path := folder / f"{name}{suffix}"))
