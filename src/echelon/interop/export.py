# SPDX-License-Identifier: Apache-2.0
"""Write a plan for a tool: its file, or a refusal of every setting that it cannot say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.config.files.show import describe_same_run
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.config.rules.violations import change_text
from echelon.config.settings.value_types import toml_text
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.interop import EXPORT_NOT_EXPRESSIBLE
from echelon.interop.export_attempt import ExportAttempt, ExportNote, attempt_export, header_lines
from echelon.interop.importer import import_file
from echelon.interop.plan_settings import RunSettings, needed_settings, resolve_settings, run_toml
from echelon.interop.tool_writer import ExportRefusal
from echelon.interop.tools import WRITTEN_TOOLS, TargetName, Tool, WrittenToolName


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFiles:
    """Hold the text of a file, that of the files beside it that it names, and what is recorded."""

    tool: TargetName
    text: str
    beside: Mapping[str, str]
    notes: tuple[ExportNote, ...] = ()


def export_plan(plan: Plan, to: TargetName, job: Job | None = None) -> ExportedFiles:
    """Return a plan, and the rest of the run of `job`, in the words of a tool.

    Read back with `echelon import` (or as a run.toml) it is the same plan. ConfigError names every
    setting that the tool cannot honour, and the targets that can.
    """
    run = needed_settings(plan, job)
    if to == "run.toml":
        exported = ExportedFiles(tool=to, text=run_toml(run), beside=run.beside)
        _require_same(plan, exported)
        return exported
    tool = WRITTEN_TOOLS[to]
    found = attempt_export(tool, plan, run)
    if found.refusals:
        raise ConfigError(_problems(tool, found, plan, run))
    text = tool.writer.render(found.keys, [*header_lines(plan, tool, found.notes)], found.recorded)
    exported = ExportedFiles(tool=to, text=text, beside=run.beside, notes=found.notes)
    _require_same(plan, exported)
    return exported


def _problems(tool: Tool, found: ExportAttempt, plan: Plan, run: RunSettings) -> Iterator[Problem]:
    others: dict[WrittenToolName, ExportAttempt] = {
        name: attempt_export(other, plan, run) for name, other in WRITTEN_TOOLS.items()
    }
    without_refusal = [f"--to {name}" for name, other in others.items() if not other.refusals]
    for refusal in found.refusals:
        able = [
            WRITTEN_TOOLS[n].title
            for n, other in others.items()
            if refusal.setting in other.expressed
        ]
        instead = f"; {' and '.join(able)} can say it" if able else ""
        changes = [
            change_text(change)
            for change in refusal.suggestions
            if _helps(tool, run, refusal, change)
        ]
        value = "" if refusal.value is None else f" = {toml_text(refusal.value)}"
        yield EXPORT_NOT_EXPRESSIBLE.problem(
            f"{refusal.setting}{value} cannot be written for {tool.title}: {refusal.why}{instead}",
            key=refusal.setting,
            suggestions=(*changes, *without_refusal, "--to run.toml"),
        )


def _helps(
    tool: Tool, run: RunSettings, refusal: ExportRefusal, change: Mapping[str, object]
) -> bool:
    """Return whether a plan with other settings is legal, and no longer refused for this one."""
    try:
        plan = resolve_settings({**run.settings, **change}, Path()).plan
        found = attempt_export(tool, plan, needed_settings(plan))
    except ConfigError:
        return False
    return refusal.setting not in {other.setting for other in found.refusals}


def _require_same(plan: Plan, exported: ExportedFiles) -> None:
    """Read a file back: it is the same plan, or this is a bug."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "exported.toml"
        for path, text in {file.name: exported.text, **exported.beside}.items():
            (file.parent / path).write_text(text, encoding="utf-8")
        if exported.tool == "run.toml":
            again = load_job(file).plan
        else:
            again = import_file(file, kind=exported.tool).job.plan
    same = replace(again, cluster=plan.cluster)
    assert describe_same_run(same, plan), f"{exported.tool} reads back as another plan"
    assert same.name == plan.name, f"{exported.tool} reads back under another name"
