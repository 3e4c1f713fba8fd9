# SPDX-License-Identifier: Apache-2.0
"""The flags that several commands share, and what is said of a wrong one.

`--out` says what a command writes, by what each name ends in, alike in every command. FILE.html is
the page of what was found. NAME.svg and NAME.png are the figures of that page, each in a file
NAME-PART.svg; FOLDER/ is a folder to make, with each figure as PART.svg. What else a command writes
has an ending of its own, and the flag is repeated for more. All names are checked before the work
for the first of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, TypeAlias

from cyclopts import Parameter

from echelon.cli.output import note
from echelon.config.files.new_file import require_free_names, require_writable
from echelon.core.errors import ConfigError, Problem, either
from echelon.core.plan import Plan
from echelon.core.rulebook.config import BAD_ARGUMENT, NEVER_OVERWRITE
from echelon.core.settings.value_types import MEMORY_BYTES, NUMBERS, Quantity
from echelon.core.units import EXAMPLES, near_quantity

if TYPE_CHECKING:
    from echelon.page.drawn.document import FigureFiles
    from echelon.planner.view.document import PageDocument

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Say what a file that a command writes holds, and what its name ends in to ask for it."""

    ending: str
    holds: str


RUN_FILE = Form(ending=".toml", holds="a run file (TOML)")
PLAN = Form(ending=".json", holds="a plan (JSON)")
REHEARSAL = Form(ending=".json", holds="a rehearsal (JSON)")
TRACES = Form(ending=".json.gz", holds="a trace of each distinct rank (JSON.GZ)")
CELLS = Form(ending=".csv", holds="the cells of a schedule (CSV)")
DRAWING = Form(ending=".svg", holds="a drawing (SVG)")
PAGE = Form(ending=".html", holds="a page (HTML)")
SVG_FIGURES = Form(ending=".svg", holds="figures (SVG)")
PNG_FIGURES = Form(ending=".png", holds="figures (PNG)")
FIGURE_FOLDER = Form(ending="/", holds="a folder of figures (/)")

FIGURES = (FIGURE_FOLDER, SVG_FIGURES, PNG_FIGURES)
REPORT = (PAGE, *FIGURES)
"""What every command writes that has a page."""

Names: TypeAlias = tuple[str, ...]
ReportNames = Annotated[
    Names,
    Parameter(
        name=OUT,
        show_default=False,
        help="What to write, by its ending: a page that opens anywhere as FILE.html, its figures "
        "as FOLDER/, NAME.svg or NAME.png; repeat for more.",
    ),
]
"""The flag of commands that write a page, and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFiles:
    """Hold what a command is to write, and where; all of it was free when this was made."""

    paths: Mapping[Form, Path]

    @classmethod
    def read(cls, names: Sequence[str], forms: Sequence[Form]) -> WrittenFiles:
        """Return what the values of `--out` ask for of the `forms` that a command writes.

        ConfigError names each that no form has, that is there, that cannot be made, or whose form
        another one has; EnvironmentProblem where it asks for PNG, and what draws it is missing.
        """
        found = dict[Form, Path]()
        problems = list[Problem]()
        for name in names:
            form = next((one for one in forms if name.lower().endswith(one.ending)), None)
            if form is None:
                holds = {one.ending: one.holds for one in forms}
                problems.append(ending_problem(Path(name), holds))
            elif form in found:
                problems.append(_twice(form, found[form], name))
            else:
                found[form] = Path(name)
                problems.extend(_taken(form, found[form]))
        if problems:
            raise ConfigError(problems)
        return cls(paths=found)

    def get(self, form: Form) -> Path | None:
        """Return where a form is to be written, None where it is not."""
        return self.paths.get(form)

    def names(self, *forms: Form) -> tuple[str, ...]:
        """Return those of `forms` that are to be written, as they are typed."""
        return tuple(
            f"{OUT} {path}{'/' if form is FIGURE_FOLDER else ''}"
            for form, path in self.paths.items()
            if form in forms
        )

    @property
    def has_report(self) -> bool:
        """Return whether a page is to be written, or its figures."""
        return any(form in self.paths for form in REPORT)

    def write_report(self, document: PageDocument) -> None:
        """Write the page and its figures, as far as they are asked for, and say on stderr where."""
        for form, path in self.paths.items():
            if form is PAGE:
                from echelon.page.html import write_page

                write_page(document, path, key=OUT)
                note(f"written: {path}")
            elif form in FIGURES:
                for file in _figure_files(form, path).write(document, key=OUT):
                    note(f"written: {file}")


def _figure_files(form: Form, path: Path) -> FigureFiles:
    from echelon.page.drawn.document import FigureFiles

    return FigureFiles(folder=path) if form is FIGURE_FOLDER else FigureFiles.at(path)


def _twice(form: Form, first: Path, name: str) -> Problem:
    message = (
        f"{OUT} {first} and {OUT} {name} ask both for {form.holds}: one of each ending is written"
    )
    return argument_problem(message, f"{OUT} {name}")


def _taken(form: Form, path: Path) -> Iterator[Problem]:
    if form is not TRACES and form not in FIGURES:
        yield from taken_problems(OUT, path)
        return
    try:
        if form is TRACES:
            require_free_names(path, form.ending, key=OUT)
        else:
            _figure_files(form, path).require(OUT)
    except ConfigError as error:
        if form is FIGURE_FOLDER and os.path.lexists(path):
            free = f"{OUT} {free_path(path.parent, path.name, '')}/"
            yield from (replace(one, suggestions=(free,)) for one in error.problems)
        else:
            yield from error.problems
