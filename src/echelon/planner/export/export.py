"""Write a plan for a tool: its file, what is told of it, and a refusal of what it cannot say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

from echelon.config.foreign.importer import TOOLS, import_file
from echelon.config.job import Job
from echelon.config.kinds import toml_text
from echelon.config.load import load_job
from echelon.config.run_files import same_run
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.export import EXPORT_NOT_EXPRESSIBLE
from echelon.planner.export.accelerate import ACCELERATE
from echelon.planner.export.deepspeed import DEEPSPEED
from echelon.planner.export.megatron import MEGATRON
from echelon.planner.export.run_toml import run_toml
from echelon.planner.export.settings import RunSettings, needed_settings, resolved
from echelon.planner.export.target import Attempt, Note, Refusal, Target, attempt, heads
from echelon.planner.export.torchtitan import TORCHTITAN

TargetName = Literal["run.toml", "megatron", "deepspeed", "torchtitan", "accelerate"]
TARGETS: tuple[TargetName, ...] = get_args(TargetName)
FOREIGN: Mapping[str, Target] = {
    target.kind: target for target in (MEGATRON, DEEPSPEED, TORCHTITAN, ACCELERATE)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Hold the text of a file, that of the files beside it that it names, and what is told."""

    to: TargetName
    text: str
    beside: Mapping[str, str]
    notes: tuple[Note, ...] = ()


def export_plan(plan: Plan, to: TargetName, job: Job | None = None) -> Exported:
    """Return a plan, and the rest of the run of `job`, in the words of a tool.

    Read back with `echelon import` (or as a run.toml) it is the same plan. ConfigError names every
    setting that the tool cannot honour, and the targets that can.
    """
    run = needed_settings(plan, job)
    if to == "run.toml":
        exported = Exported(to=to, text=run_toml(run), beside=run.beside)
        _require_same(plan, exported)
        return exported
    target = FOREIGN[to]
    found = attempt(target, plan, run)
    if found.refusals:
        raise ConfigError(_problems(target, found, plan, run))
    text = target.render(found.keys, [*heads(plan, target, found.notes)], found.recorded)
    exported = Exported(to=to, text=text, beside=run.beside, notes=found.notes)
    _require_same(plan, exported)
    return exported


def _problems(target: Target, found: Attempt, plan: Plan, run: RunSettings) -> Iterator[Problem]:
    others = [attempt(other, plan, run) for other in FOREIGN.values()]
    tools = [TOOLS[target.kind] for target in FOREIGN.values()]
    whole = [
        f"--to {name}" for name, other in zip(FOREIGN, others, strict=True) if not other.refusals
    ]
    for refusal in found.refusals:
        able = [
            tool for tool, other in zip(tools, others, strict=True) if refusal.setting in other.said
        ]
        said = f"; {' and '.join(able)} can say it" if able else ""
        instead = [
            _text(change) for change in refusal.works if _helps(target, run, refusal, change)
        ]
        yield EXPORT_NOT_EXPRESSIBLE.problem(
            f"{_what(refusal)} cannot be written for {target.tool}: {refusal.why}{said}",
            key=refusal.setting,
            works=(*instead, *whole, "--to run.toml"),
        )


def _helps(
    target: Target, run: RunSettings, refusal: Refusal, change: Mapping[str, object]
) -> bool:
    """Return whether a plan with other settings is legal, and no longer refused for this one."""
    try:
        plan = resolved({**run.settings, **change}, Path()).plan
        found = attempt(target, plan, needed_settings(plan))
    except ConfigError:
        return False
    return refusal.setting not in {other.setting for other in found.refusals}


def _text(change: Mapping[str, object]) -> str:
    return " with ".join(f"{key} = {toml_text(value)}" for key, value in change.items())


def _what(refusal: Refusal) -> str:
    if refusal.value is None:
        return refusal.setting
    return f"{refusal.setting} = {toml_text(refusal.value)}"


def _require_same(plan: Plan, exported: Exported) -> None:
    """Read a file back: it is the same plan, or this is a bug."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "exported.toml"
        for path, text in {file.name: exported.text, **exported.beside}.items():
            (file.parent / path).write_text(text, encoding="utf-8")
        if exported.to == "run.toml":
            again = load_job(file).plan
        else:
            again = import_file(file, kind=FOREIGN[exported.to].kind).job.plan
    same = replace(again, cluster=plan.cluster)
    assert same_run(same, plan), f"{exported.to} reads back as another plan"
    assert same.name == plan.name, f"{exported.to} reads back under another name"
