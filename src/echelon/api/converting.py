# SPDX-License-Identifier: Apache-2.0
"""`ec.export` and `ec.import_run`: plans into the configurations of other tools, and from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.api.given_plan import GivenPlan, plan_from_given
from echelon.config.files.new_file import require_writable, write_new
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.config import UNKNOWN_PRESET
from echelon.core.rulebook.interop import EXPORT_NEEDS_OUT, PLAN_SOURCE
from echelon.interop.export import ExportedFiles, ExportNote, export_plan
from echelon.interop.importer import Imported, import_file, imported_toml
from echelon.interop.key_reader import KeyOutcome
from echelon.interop.tools import TargetName, ToolName


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """Hold the run that a foreign configuration makes, and what became of each of its keys."""

    found: Imported

    @property
    def plan(self) -> Plan:
        """Return the plan of the run; ConfigError where a key is refused, or it does not load."""
        return self.found.job.plan

    @property
    def problems(self) -> Sequence[Problem]:
        """Return why keys are refused, then what keeps the run from loading."""
        return (*self.found.refused, *self.found.invalid)

    @property
    def rows(self) -> Sequence[KeyOutcome]:
        """Return what became of each key: the setting that it is now, or why none is needed."""
        return self.found.rows

    def to_toml(self, folder: Path | None = None) -> str:
        """Return the run.toml, to stand in `folder` (or in the current one)."""
        return imported_toml(self.found, folder)

    def write(self, path: Path) -> None:
        """Write the run.toml; ConfigError where a file is there, or none can be."""
        write_new(path, self.to_toml(path.parent))


def import_run(
    path: str | Path,
    *,
    kind: ToolName | None = None,
    extends: str | None = None,
    ranks: int | str | None = None,
    allow: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> ImportedRun:
    """Return the run that another tool's configuration describes: a file, or a launch line as text.

    It builds on `extends` (a preset or a run file: the model and the data, which such a file may
    not have), for `ranks` processes (or as many as a launcher starts, by its line or file), with
    `settings` ("table.key=value") on top. What is refused, because it would change the mathematics,
    is in `problems`; `allow` names keys to drop, or is ("all",). Raises ConfigError for a file that
    cannot be read, and for arguments that cannot be.
    """
    found = import_file(
        Path(path),
        kind=kind,
        extends=extends,
        ranks=ranks,
        allow=allow,
        sets=settings,
    )
    return ImportedRun(found=found)


PLAN_FILE, RUN_FILE = "plan.json", "run.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRun:
    """Hold the files that a plan became; `text` is that of the first, `beside` of all others."""

    found: ExportedFiles

    @property
    def text(self) -> str:
        """Return the text of the file."""
        return self.found.text

    @property
    def notes(self) -> Sequence[ExportNote]:
        """Return the settings that are recorded because the tool has no word for them, and why."""
        return self.found.notes

    def require_alone(self) -> None:
        """Raise ConfigError where the file names others, which must be written beside it."""
        if self.found.beside:
            names = " and ".join(self.found.beside)
            problem = EXPORT_NEEDS_OUT.problem(
                f"{names} must stand beside what is written for {self.found.tool}",
                key="--out",
                suggestions=(f"--out exported/{RUN_FILE}",),
            )
            raise ConfigError(problem)

    def write(self, path: Path) -> tuple[Path, ...]:
        """Write the file and those beside it; ConfigError where one is there, or none can be."""
        files = {path.parent / name: text for name, text in self.found.beside.items()}
        files[path] = self.text
        for file in files:
            require_writable(file)
        for file, text in files.items():
            write_new(file, text)
        return tuple(files)


def export(
    run: str | Path | GivenPlan, to: TargetName, *, settings: Sequence[str] = ()
) -> ExportedRun:
    """Return a plan in the words of a tool: read back, it is the same plan.

    `run` is a plan, the answer of `ec.plan`, a run.toml or preset, a plan.json, or the folder of a
    run; `settings` are "table.key=value", as after `--set`. Raises ConfigError, with every setting
    that the tool cannot honour.
    """
    job = None
    if isinstance(run, str | Path):
        plan, job = read_plan(run, settings=settings)
    else:
        plan = plan_from_given(run)
    return ExportedRun(found=export_plan(plan, to, job))


def read_plan(run: str | Path, *, settings: Sequence[str] = ()) -> tuple[Plan, Job | None]:
    """Return the plan of a run.toml, a preset, a plan.json or the folder of a run, and its job.

    A plan.json has the job of the run.toml beside it, if that gives this plan; with `settings` that
    run.toml counts. ConfigError where it is none of them.
    """
    path = Path(run).expanduser()
    file = path / PLAN_FILE if path.is_dir() else path
    if file.suffix != ".json":
        try:
            job = load_job(run, settings)
        except ConfigError as error:
            if UNKNOWN_PRESET.id not in error.rules:
                raise
            raise ConfigError([_or_plan(problem) for problem in error.problems]) from None
        return job.plan, job
    beside = file.parent / RUN_FILE
    if settings:
        job = load_job(beside, settings)
        return job.plan, job
    plan = _plan_of(file)
    return plan, _job_of(plan, beside)


def _or_plan(problem: Problem) -> Problem:
    """Return the problem of a name that is none, with what else a plan may stand in."""
    if problem.rule != UNKNOWN_PRESET.id or problem.key:
        return problem
    return replace(
        problem, suggestions=(*problem.suggestions, f"a {PLAN_FILE}", "the folder of a run")
    )


def _job_of(plan: Plan, file: Path) -> Job | None:
    """Return the job of a run file where it gives a plan; None where it does not, or is gone."""
    try:
        job = load_job(file)
    except ConfigError:
        return None
    return job if job.plan == plan else None


def _plan_of(file: Path) -> Plan:
    try:
        return Plan.read(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = PLAN_SOURCE.problem(
            f"{file} is not a plan that can be read: {reason}",
            key="RUN",
            set_by=str(file),
            suggestions=("a run.toml", "a preset", "the folder of a run", f"its {PLAN_FILE}"),
        )
        raise ConfigError(problem) from error
