# SPDX-License-Identifier: Apache-2.0
"""`--out`: what a command writes, by what each name ends in, alike in every command.

FILE.html is the page of what was found. NAME.svg and NAME.png are the figures of that page, each in
a file NAME-PART.svg; FOLDER/ is a folder to make, with each figure as PART.svg. What else a command
writes has an ending of its own, and the flag is repeated for more. All names are checked before the
work for the first of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from cyclopts import Parameter

from echelon.cli.flags import OUT, argument_problem, ending_problem, free_path, taken_problems
from echelon.cli.stderr import note
from echelon.config.files.new_file import require_free_names
from echelon.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from echelon.page.drawn.files import FigureFiles
    from echelon.planner.view.document import PageDocument


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
    from echelon.page.drawn.files import FigureFiles

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
