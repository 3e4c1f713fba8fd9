# SPDX-License-Identifier: Apache-2.0
"""Write a plan for a tool: its file, or a refusal of every setting that it cannot say.

The plan becomes keys of the tool, and these are read back: a setting that they do not say is
recorded beside them, or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap

from echelon.config.derived.pipeline import EVEN, SCHEDULE_KEY, STAGES_KEY, VIRTUAL_KEY
from echelon.config.entries import Entry
from echelon.config.files.new_file import require_writable, write_new
from echelon.config.files.show import describe_same_run
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.config.plan_view import plan_settings
from echelon.config.rules.violations import change_text
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.interop import EXPORT_NEEDS_OUT, EXPORT_NOT_EXPRESSIBLE
from echelon.core.settings.value_types import toml_text
from echelon.cost.seconds.stages import split_layers
from echelon.interop.abilities import tool_tables
from echelon.interop.formats import ExportRefusal
from echelon.interop.import_context import import_context
from echelon.interop.importer import import_file
from echelon.interop.key_reader import KeyReader
from echelon.interop.plan_settings import (
    RunSettings,
    needed_settings,
    resolve_settings,
    run_toml,
    written_out,
)
from echelon.interop.tools import WRITTEN_TOOLS, TargetName, Tool, WrittenToolName

PLACE = Path("the plan")
COLUMNS = 76  # columns of text
_PART_OF_SCALE = tuple(
    f"precision.loss_scale{part}" for part in ("", "_window", "_min", "_hysteresis")
)
_FOLLOWERS: Mapping[str, tuple[str, ...]] = {
    SCHEDULE_KEY: (STAGES_KEY, VIRTUAL_KEY),
    "mesh.pp": (SCHEDULE_KEY, STAGES_KEY, VIRTUAL_KEY),
    "mesh.cp": ("context.kind", "context.ulysses_degree"),
    "mesh.ep": ("experts.expert_tp",),
    "optimizer.kind": ("optimizer.momentum", "optimizer.newton_schulz_steps"),
    "optimizer.schedule": (
        "optimizer.decay_steps",
        "optimizer.final_ratio",
        "optimizer.warmup_steps",
    ),
    "precision.gradients": ("precision.reduction",),
    "precision.loss_scaling": _PART_OF_SCALE,
    "precision.parameters": ("precision.loss_scaling", *_PART_OF_SCALE),
    "recompute.every": ("recompute.policy",),
    "zero.stage": ("zero.reshard_after_forward", "zero.prefetch", "zero.unit_blocks"),
}
"""Settings that are no news where another is refused."""

PASSES = 2
"""What is recorded depends on what the keys say, and a key may be read by what is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRun:
    """Hold the files that a plan became; `text` is that of the first, `beside` of all others.

    `notes` are the settings that are recorded because the tool has no word for them, and why.
    """

    tool: TargetName
    text: str
    beside: Mapping[str, str]
    notes: tuple[ExportNote, ...] = ()

    def require_alone(self) -> None:
        """Raise ConfigError where the file names others, which must be written beside it."""
        if self.beside:
            problem = EXPORT_NEEDS_OUT.problem(
                f"{' and '.join(self.beside)} must stand beside what is written for {self.tool}",
                key="--out",
                suggestions=("--out exported/run.toml",),
            )
            raise ConfigError(problem)

    def write(self, path: Path) -> tuple[Path, ...]:
        """Write the file and those beside it; ConfigError where one is there, or none can be."""
        files = {path.parent / name: text for name, text in self.beside.items()}
        files[path] = self.text
        for file in files:
            require_writable(file)
        for file, text in files.items():
            write_new(file, text)
        return tuple(files)


def export_plan(plan: Plan, to: TargetName, job: Job | None = None) -> ExportedRun:
    """Return a plan, and the rest of the run of `job`, in the words of a tool.

    Read back with `echelon import` (or as a run.toml) it is the same plan. ConfigError names every
    setting that the tool cannot honour, and the targets that can.
    """
    run = needed_settings(plan, job)
    if to == "run.toml":
        exported = ExportedRun(tool=to, text=run_toml(run), beside=run.beside)
        _require_same(plan, exported)
        return exported
    tool = WRITTEN_TOOLS[to]
    found = attempt_export(tool, plan, run)
    if found.refusals:
        raise ConfigError(_problems(tool, found, plan, run))
    text = tool.writer.render(found.keys, [*header_lines(plan, tool, found.notes)], found.recorded)
    exported = ExportedRun(tool=to, text=text, beside=run.beside, notes=found.notes)
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


def _require_same(plan: Plan, exported: ExportedRun) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportNote:
    """Say of a setting why it is recorded, and does not stand in the words of the tool."""

    setting: str
    value: object
    why: str

    def text(self) -> str:
        """Return the note as a line."""
        return f"{self.setting} = {toml_text(self.value)}: {self.why}"

    def to_json(self) -> dict[str, object]:
        """Return the note as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAttempt:
    """Hold what an export for one tool gives: its keys, what is recorded and why, what is refused.

    `expressed` are the settings that its keys say as they are.
    """

    expressed: frozenset[str]
    keys: Mapping[str, object]
    recorded: Mapping[str, object]
    notes: tuple[ExportNote, ...]
    refusals: tuple[ExportRefusal, ...]


def attempt_export(tool: Tool, plan: Plan, run: RunSettings) -> ExportAttempt:
    """Return what an export of a plan, whose settings are `run`, gives."""
    writer = tool.writer
    keys = writer.keys(plan, run.settings)
    settings, recorded = run.settings, run.settings
    if writer.says_model:
        recorded = {key: value for key, value in settings.items() if not key.startswith("model.")}
        settings = written_out(plan.model) | recorded
    reader = _read(tool, keys, recorded)
    for _ in range(PASSES):
        recorded = _settings_not_expressed(settings, reader)
        reader = _read(tool, keys, recorded)
    notes: list[ExportNote] = []
    tables = tool_tables(tool.name)
    refusals = [
        *writer.unsupported(plan),
        *(
            ExportRefusal(setting=problem.key, value=None, why=problem.message)
            for problem in reader.problems
        ),
        *_settings_read_otherwise(tool, plan, reader),
    ]
    for key, value in recorded.items():
        why = _reason_for(tables.elsewhere, key) or _reason_for(tables.speed, key)
        if why is not None:
            notes.append(ExportNote(setting=key, value=value, why=why))
        else:
            why = _reason_for(tables.reasons, key) or f"{tool.title} has no word for it"
            refusals.append(ExportRefusal(setting=key, value=value, why=why))
    return ExportAttempt(
        expressed=frozenset(reader.entries.keys() - {refusal.setting for refusal in refusals}),
        keys=keys,
        recorded=recorded,
        notes=tuple(notes),
        refusals=tuple(_first(refusals)),
    )


def _first(refusals: Iterable[ExportRefusal]) -> list[ExportRefusal]:
    """Return the first refusal of each setting, but for those that follow from another."""
    found: dict[str, ExportRefusal] = {}
    for refusal in refusals:
        found.setdefault(refusal.setting, refusal)
    for key in [follower for cause in found for follower in _FOLLOWERS.get(cause, ())]:
        found.pop(key, None)
    return list(found.values())


def _read(tool: Tool, keys: Mapping[str, object], recorded: Mapping[str, object]) -> KeyReader:
    """Return what the keys are read as, beside what is recorded."""
    entries = {key: Entry(value=value, source=str(PLACE)) for key, value in recorded.items()}
    reader = KeyReader(tool=tool.title, path=str(PLACE), given=keys)
    tool.read_keys(reader, import_context(entries, None))
    return reader


def _settings_not_expressed(settings: Mapping[str, object], reader: KeyReader) -> dict[str, object]:
    """Return the settings that keys do not say: a preset of theirs is a whole model."""
    whole = "model.preset" in reader.entries
    return {
        key: value
        for key, value in settings.items()
        if key not in reader.entries and not (whole and key.startswith("model."))
    }


def _settings_read_otherwise(tool: Tool, plan: Plan, reader: KeyReader) -> Iterator[ExportRefusal]:
    """Yield settings that the tool would have otherwise."""
    wanted = plan_settings(plan)
    for key, entry in reader.entries.items():
        value = wanted.get(key, entry.value)
        if value == entry.value:
            continue
        if entry.value == EVEN:
            even = split_layers(plan.model.layers, plan.num_stages)
            if plan.layout.pipeline.stages == even:
                continue
        why = _reason_for(tool_tables(tool.name).reasons, key)
        would = f"{tool.title} would have {toml_text(entry.value)}"
        why = f"{why} ({would})" if why else would
        yield ExportRefusal(setting=key, value=value, why=why, suggestions=({key: entry.value},))


def _reason_for(reasons: Mapping[str, str], key: str) -> str | None:
    """Return the reason that is given for a setting, for its table, or for a table around it."""
    while key:
        if key in reasons:
            return reasons[key]
        key = key.rpartition(".")[0]
    return None


def header_lines(plan: Plan, tool: Tool, notes: Iterable[ExportNote]) -> Iterator[str]:
    """Yield the lines that a file begins with: what it is, and what it cannot say."""
    for sentence in _sentences(plan, tool, notes):
        yield from wrap(sentence, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def _sentences(plan: Plan, tool: Tool, notes: Iterable[ExportNote]) -> Iterator[str]:
    mesh, names = plan.mesh, ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    degrees = [f"{name}={getattr(mesh, name)}" for name in names if getattr(mesh, name) > 1]
    split = f" ({', '.join(degrees)})" if degrees else ""
    ranks = f"ranks: {mesh.world_size}{split}"
    yield f"Written by echelon export for {tool.title}: {plan.name}, {ranks}."
    yield f"echelon import FILE --from {tool.name} reads it back as the same plan."
    yield from tool.writer.advice(plan)
    by_reason: dict[str, list[str]] = {}
    for note in notes:
        by_reason.setdefault(note.why, []).append(note.setting)
    if by_reason:
        yield "Recorded below, because it stands elsewhere, or changes speed and memory only:"
    yield from (f"- {', '.join(names)}: {why}." for why, names in by_reason.items())
