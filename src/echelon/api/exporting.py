"""`ec.export`: a plan becomes the configuration of another tool, or a run.toml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.config import UNKNOWN_PRESET
from echelon.core.rulebook.export import EXPORT_NEEDS_OUT, PLAN_SOURCE

if TYPE_CHECKING:
    from echelon.config.job import Job
    from echelon.planner.export.export import Exported, TargetName
    from echelon.planner.export.target import Note

PLAN_FILE, RUN_FILE = "plan.json", "run.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRun:
    """Hold the files that a plan became; `text` is that of the first, `beside` of all others."""

    found: Exported

    @property
    def text(self) -> str:
        """Return the text of the file."""
        return self.found.text

    @property
    def notes(self) -> Sequence[Note]:
        """Return the settings that are recorded because the tool has no word for them, and why."""
        return self.found.notes

    def require_alone(self) -> None:
        """Raise ConfigError where the file names others, which must be written beside it."""
        if self.found.beside:
            names = " and ".join(self.found.beside)
            problem = EXPORT_NEEDS_OUT.problem(
                f"{names} must stand beside what is written for {self.found.to}",
                key="--out",
                works=(f"--out exported/{RUN_FILE}",),
            )
            raise ConfigError(problem)

    def write(self, path: Path) -> tuple[Path, ...]:
        """Write the file and those beside it; ConfigError where one is there, or none can be."""
        from echelon.config.new_file import require_writable, write_new

        files = {path.parent / name: text for name, text in self.found.beside.items()}
        files[path] = self.text
        for file in files:
            require_writable(file)
        for file, text in files.items():
            write_new(file, text)
        return tuple(files)


def export(run: str | Path | Plan, to: TargetName, *, settings: Sequence[str] = ()) -> ExportedRun:
    """Return a plan in the words of a tool: read back, it is the same plan.

    `run` is a plan, a run.toml or preset, a plan.json, or the folder of a run; `settings` are
    "table.key=value", as after `--set`. Raises ConfigError, with every setting that the tool cannot
    honour.
    """
    from echelon.planner.export.export import export_plan

    plan, job = (run, None) if isinstance(run, Plan) else read_plan(run, settings=settings)
    return ExportedRun(found=export_plan(plan, to, job))


def read_plan(run: str | Path, *, settings: Sequence[str] = ()) -> tuple[Plan, Job | None]:
    """Return the plan of a run.toml, a preset, a plan.json or the folder of a run, and its job.

    A plan.json has the job of the run.toml beside it, if that gives this plan; with `settings` that
    run.toml counts. ConfigError where it is none of them.
    """
    from echelon.config.load import load_job

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
    return replace(problem, works=(*problem.works, f"a {PLAN_FILE}", "the folder of a run"))


def _job_of(plan: Plan, file: Path) -> Job | None:
    """Return the job of a run file where it gives a plan; None where it does not, or is gone."""
    from echelon.config.load import load_job

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
            set_by="the command line",
            works=("a run.toml", "a preset", "the folder of a run", f"its {PLAN_FILE}"),
        )
        raise ConfigError(problem) from error
