# SPDX-License-Identifier: Apache-2.0
"""A file of another tool -> a run: recognised, every key judged, the whole checked.

No key is lost in silence, and none costs the others: `lenient.py` reads on without those that are
refused. An import as text is the run.toml, the table of what became of each key, and its sums. The
run.toml always comes out. What is not taken, and what keeps the run from loading, stands at its top
as comments.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from echelon.config.entries import Entry, merge
from echelon.config.files.new_file import write_new
from echelon.config.job import Job
from echelon.config.load import absolute_entry, run_name_of
from echelon.config.presets import read_extendable
from echelon.config.reading import is_file
from echelon.config.schema import SETTINGS
from echelon.config.setting_layers import SettingLayers, gather_layers, parse_set_flags
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import Plan, Precision
from echelon.core.rulebook.interop import IMPORT_KIND
from echelon.core.settings.value_types import toml_tables, toml_text
from echelon.interop.followed import follow_files
from echelon.interop.formats import TABLE, recorded_entries, recorded_rows
from echelon.interop.horovod.read import parse_horovod
from echelon.interop.import_context import import_context
from echelon.interop.key_reader import FATES, NOT_SET, Fate, KeyOutcome, KeyReader
from echelon.interop.launcher import (
    COMMAND,
    after_launcher,
    assumed_cluster,
    launch_line,
    read_launcher,
)
from echelon.interop.lenient import read_leniently, resolve_import, unneeded_allowances
from echelon.interop.parsing import (
    command_words,
    flatten_keys,
    parse_command,
    parse_json,
    parse_toml,
    parse_yaml,
    read_text,
)
from echelon.interop.tools import TOOLS, ToolName, recognition_order
from echelon.interop.torchtitan.python_config import SIGN as PYTHON_SIGN
from echelon.interop.torchtitan.python_config import parse_python, split_function

CONFIGURATIONS = (".json", ".yaml", ".yml", ".toml")
FALLBACK = "nano"
"""The preset whose model and data a run has where its file gives no model that is known."""

_COMMENT_COLUMN = 44  # column of text
_WEIGHT: Mapping[Fate, int] = {"refused": 0, "dropped": 1, "taken": 2, "without effect": 3}
"""Of several rows of a key the first of these says what became of it."""
_WIDTH = 96  # columns of a comment
_HEAD = "# Behind each # stands where a value comes from; all settings: echelon config show FILE\n"
_REFUSED = (
    "NOT TAKEN, although it would change the mathematics: --allow KEY says to go without it, "
    "--set table.key=value says it in words of Echelon."
)
_INVALID = "This run does not load until these are mended:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """Hold the run that a foreign configuration makes, and what became of each of its keys."""

    kind: ToolName
    path: Path
    extends: str | None
    """The preset or run file that it builds on."""
    rows: tuple[KeyOutcome, ...]
    """What became of each key, those that are refused last."""
    settings: Mapping[str, Entry]
    """What the file and the --set flags set, over what `extends` names."""
    assumptions: tuple[str, ...]
    """What the file leaves open, and is taken to be."""
    refused: tuple[Problem, ...]
    """Of the keys that would change the mathematics, and that no --allow drops."""
    outcome: Job | ConfigError
    """The run, or what keeps it from loading."""

    @property
    def is_whole(self) -> bool:
        """Return whether every key was taken, has no effect or was dropped, and the run loads."""
        return not self.refused and isinstance(self.outcome, Job)

    @property
    def invalid(self) -> Sequence[Problem]:
        """Return what keeps the run from loading."""
        return () if isinstance(self.outcome, Job) else self.outcome.problems

    @property
    def job(self) -> Job:
        """Return the run; ConfigError where it does not load, or a key is refused."""
        if self.refused:
            raise ConfigError(self.problems)
        if isinstance(self.outcome, Job):
            return self.outcome
        raise self.outcome

    @property
    def plan(self) -> Plan:
        """Return the plan of the run; ConfigError where a key is refused, or it does not load."""
        return self.job.plan

    @property
    def problems(self) -> Sequence[Problem]:
        """Return why keys are refused, then what keeps the run from loading."""
        return (*self.refused, *self.invalid)

    def to_toml(self, folder: Path | None = None) -> str:
        """Return the run.toml, to stand in `folder` (or in the current one)."""
        head = f"# Imported from {_comment(str(self.path))} ({TOOLS[self.kind].title}).\n{_HEAD}"
        head += "".join(f"{line}\n" for line in _notes(self))
        if self.extends is not None:
            head += f"\nextends = {toml_text(_base(self.extends, folder or Path()))}\n"
        values: dict[str, str] = {}
        for key, setting in SETTINGS.items():
            if (entry := self.settings.get(key)) is not None:
                # A relative path would be another one in another folder.
                value = toml_text(absolute_entry(key, entry).value if setting.path else entry.value)
                width = max(0, _COMMENT_COLUMN - len(f"{key.rpartition('.')[2]} = "))
                source = _comment(entry.source.replace(f"{self.path}: ", ""))
                values[key] = f"{value:<{width}}# {source}"
        return f"{head}\n{toml_tables(values)}"

    def write(self, path: Path) -> None:
        """Write the run.toml; ConfigError where a file is there, or none can be."""
        write_new(path, self.to_toml(path.parent))


def import_file(
    path: Path,
    *,
    kind: ToolName | None = None,
    extends: str | None = None,
    ranks: int | str | None = None,
    allow: Sequence[str] = (),
    sets: Sequence[str] = (),
) -> ImportedRun:
    """Return the run that a configuration of another tool describes, as far as it can be had.

    `path` may also be the line that starts it (`horovodrun -np 4 python train.py --lr 0.1`).
    It builds on `extends` (a preset or run file), with `sets` on top; `ranks` says how many
    processes there are, or is the line or the file of a launcher that does. ConfigError is for a
    file that cannot be read or belongs to no tool, for `extends`, `sets` or `ranks` that cannot be,
    and for `allow` where it names no key that is refused.
    """
    if line := launch_line(path):
        named_file = file_of_line(line)
        path, ranks = named_file or COMMAND, line if ranks is None else ranks
    path, function = split_function(path)
    text = line if path == COMMAND else read_text(path)
    kind = kind or detect_tool(path, text)
    recorded = recorded_entries(path, text)
    named = extends is not None
    if extends is None and not any(key.startswith("model.") for key in recorded):
        extends = TOOLS[kind].base
    gathered = gather_layers(extends, ()) if extends else SettingLayers()
    gathered.add(recorded)
    over, problems = parse_set_flags(sets)
    launched = read_launcher(path, text, ranks)
    if found := [*gathered.problems, *problems, *launched.problems]:
        raise ConfigError(found)
    given = follow_files(kind, path, parse_keys(kind, path, text, function))
    base = merge([*gathered.layers, over])
    context = import_context(base, launched.ranks, base if named else {**recorded, **over})

    def read(left: Mapping[str, object]) -> KeyReader:
        reader = KeyReader(tool=TOOLS[kind].title, path=str(path), given=left)
        TOOLS[kind].read_keys(reader, context)
        return reader

    reading = read_leniently(read, given, allow)
    rows = (*launched.rows, *recorded_rows(recorded), *reading.rows)
    if found := unneeded_allowances(allow, rows, str(path)):
        raise ConfigError(found)
    taken = dict(reading.entries)
    if extends is None and not any(key.startswith("model.") for key in {**base, **taken}):
        extends = FALLBACK
        gathered.layers[:0] = gather_layers(FALLBACK, ()).layers
    gathered.add(taken)
    gathered.add(over)
    known = gathered.merged() if named else {**recorded, **over}
    assumed = assumed_cluster(known, gathered.merged())
    gathered.add({key: entry for key, (entry, _) in assumed.items()})
    own = {key: entry for key, entry in taken.items() if key not in over}
    outcome, own, rows = resolve_import(gathered, own, rows, run_name_of(path))
    dtypes, why = _dtypes_of_file(gathered, outcome)
    if dtypes:
        gathered.add(dtypes)
        outcome, own, rows = resolve_import(gathered, own, rows, run_name_of(path))
    taken |= own
    return ImportedRun(
        kind=kind,
        path=path,
        extends=extends,
        rows=rows,
        settings={
            **recorded,
            **taken,
            **over,
            **{key: one for key, (one, _) in assumed.items()},
            **dtypes,
        },
        assumptions=(
            *reading.assumptions,
            *(why for _, why in assumed.values()),
            *why,
            *(outcome.plan.model.assumed if isinstance(outcome, Job) else ()),
        ),
        refused=reading.refused,
        outcome=outcome,
    )


def _dtypes_of_file(
    gathered: SettingLayers, outcome: Job | ConfigError
) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Return fp32, and why, for a file without a dtype that would follow its devices."""
    named = any(key.startswith("precision.") for key in gathered.merged())
    if named or isinstance(outcome, ConfigError):
        return {}, ()
    if outcome.plan.mathematics.precision == Precision():
        return {}, ()
    why = "parameters in fp32: the file names no dtype"
    return {"precision.parameters": Entry(value="fp32", source="default")}, (why,)


def file_of_line(line: str) -> Path | None:
    """Return the file of settings that a launch line names; None where its flags say them."""
    for word in command_words(COMMAND, line):
        path = Path(word.rpartition("=")[2]).expanduser()
        if path.suffix in CONFIGURATIONS and is_file(path):
            text = read_text(path)
            if any(tool.pattern.search(text) for tool in recognition_order()):
                return path
    return None


def detect_tool(path: Path, text: str) -> ToolName:
    """Return the tool whose file this is, by its content; ConfigError where it does not tell."""
    if path.suffix == ".py" and PYTHON_SIGN.search(text):
        return "torchtitan"
    for tool in recognition_order():
        if tool.pattern.search(text):
            return tool.name
    if path == COMMAND:
        raise ConfigError(_unread_command(text))
    signs = ", nor ".join(tool.signs for tool in recognition_order())
    raise ConfigError(
        IMPORT_KIND.problem(
            f"{path} is neither {signs}",
            key="--from",
            set_by=str(path),
            suggestions=[f"--from {name}" for name in TOOLS],
        )
    )


def _unread_command(line: str) -> Problem:
    """Return the problem of a launch line whose flags are of no tool: its settings are in files."""
    words = [word.rpartition("=")[2] for word in command_words(COMMAND, line)]
    files = [word for word in words if Path(word).suffix in CONFIGURATIONS]
    absent = [word for word in files if not is_file(Path(word).expanduser())]
    reason = "and it names no file of settings"
    if files:
        reason = f"and no tool is known by {files[0]}"
    if absent:
        reason = f"and there is no file {absent[0]}"
    signs = ", nor ".join(tool.signs for tool in recognition_order() if tool.form == "command")
    return IMPORT_KIND.problem(
        f"(command) is neither {signs}, {reason}",
        set_by=str(COMMAND),
        suggestions=["echelon import FILE (the settings of its program)", "echelon init"],
    )


def parse_keys(kind: ToolName, path: Path, text: str, function: str = "") -> Mapping[str, object]:
    """Return the keys of a file, with dots, and their values; ConfigError where it is not one.

    Of a file that is Python, `function` says which configuration of it is meant.
    """
    form = TOOLS[kind].form
    if kind == "torchtitan" and path.suffix == ".py":
        return parse_python(path, text, function)
    if kind == "horovod":
        return parse_horovod(path, text)
    if form == "command":
        return parse_command(path, after_launcher(command_words(path, text)))
    if form == "toml":
        return dict(flatten_keys(parse_toml(path, text)))
    if form == "yaml" and not text.lstrip().startswith("{"):
        return dict(flatten_keys(parse_yaml(path, text)))
    tables = parse_json(path, text)
    if isinstance(tables.get(TABLE), dict):
        tables = {key: value for key, value in tables.items() if key != TABLE}
    return dict(flatten_keys(tables))


def mapping_rows(imported: ImportedRun) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, value, what became of it (a setting, or the fate) and why; a key is named once."""
    before = ""
    for row in imported.rows:
        became = f"{row.setting} = {toml_text(row.value)}" if row.setting else row.fate
        if row.rule:
            became = f"{row.fate}[{row.rule}]"
        same = row.key == before
        yield ("" if same else row.key, "" if same else row.given, became, row.why)
        before = row.key


def keys_by_fate(imported: ImportedRun) -> dict[Fate, list[str]]:
    """Return the keys of the file by what became of them, each once.

    What the file leaves to a default of its tool is none of its keys.
    """
    fates: dict[str, Fate] = {}
    for row in sorted(imported.rows, key=lambda row: _WEIGHT[row.fate]):
        if not row.key.startswith("(") and row.given != NOT_SET:
            fates.setdefault(row.key, row.fate)
    ordered = dict.fromkeys(row.key for row in imported.rows if row.key in fates)
    return {fate: [key for key in ordered if fates[key] == fate] for fate in FATES}


def summary_lines(imported: ImportedRun) -> Iterator[str]:
    """Yield the sums: how many keys were taken, have no effect, were dropped, are refused."""
    for fate, keys in keys_by_fate(imported).items():
        names = ", ".join(keys) if fate in ("dropped", "refused") else ""
        yield f"{fate:<16}{len(keys):>4}  {names}".rstrip()


def _notes(imported: ImportedRun) -> Iterator[str]:
    for what in imported.assumptions:
        yield from _lines(f"Assumed: {what}")
    dropped = keys_by_fate(imported)["dropped"]
    if dropped:
        yield from _lines(f"Dropped by --allow: {', '.join(dropped)}")
    if imported.refused:
        yield "#"
        yield from _lines(_REFUSED)
        yield from _problems(imported.refused)
    if imported.invalid:
        yield "#"
        yield from _lines(_INVALID)
        yield from _problems(imported.invalid)


def _problems(problems: Iterable[Problem]) -> Iterator[str]:
    for problem in problems:
        yield from _lines(f"[{problem.rule}] {problem.message}", first="- ")


def _lines(text: str, *, first: str = "") -> Iterator[str]:
    indent = " " * (len(first) or 2)
    for line in wrap(
        _comment(f"{first}{text}"), _WIDTH, subsequent_indent=indent, break_on_hyphens=False
    ):
        yield f"# {line}"


def _comment(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _base(extends: str, folder: Path) -> str:
    """Return what a run builds on as it stands in a file of `folder`: a preset, or a path."""
    if read_extendable(extends) or Path(extends).is_absolute():
        return extends
    path = os.path.relpath(Path(extends).expanduser(), folder)
    return path if "/" in path else f"./{path}"
