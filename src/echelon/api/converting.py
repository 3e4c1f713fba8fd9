# SPDX-License-Identifier: Apache-2.0
"""`ec.export` and `ec.import_run`: plans into the configurations of other tools, and from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echelon.api.given_plan import GivenPlan, plan_from_given
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.config import UNKNOWN_PRESET
from echelon.core.rulebook.interop import PLAN_SOURCE
from echelon.interop.export import ExportedRun, export_plan
from echelon.interop.importer import ImportedRun, import_file
from echelon.interop.tools import TargetName, ToolName
from echelon.planner.search.request import or_else


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
    return import_file(
        Path(path), kind=kind, extends=extends, ranks=ranks, allow=allow, sets=settings
    )


PLAN_FILE, RUN_FILE = "plan.json", "run.toml"


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
    return export_plan(plan, to, job)


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
            also = (f"a {PLAN_FILE}", "the folder of a run")
            raise ConfigError([or_else(problem, *also) for problem in error.problems]) from None
        return job.plan, job
    beside = file.parent / RUN_FILE
    if settings:
        job = load_job(beside, settings)
        return job.plan, job
    plan = _plan_of(file)
    return plan, _job_of(plan, beside)


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
