"""`echelon init` and `echelon config`: write a run.toml, show its settings, list the presets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json, RunFile, Settings, require_suffix
from echelon.cli.output import note, print_json, print_result, table
from echelon.config.files.new_file import write_new
from echelon.config.files.show import preset_rows, resolved_toml, settings_json
from echelon.config.load import load_job
from echelon.config.settings.schema import SETTINGS
from echelon.config.settings.value_types import toml_text

SHOWN = {
    "cluster": ("preset",),
    "mesh": ("pp", "dp_replicate", "tp", "sequence_parallel"),
    "pipeline": ("schedule", "stages"),
    "batch": ("global_sequences", "microbatch_sequences", "sequence_length"),
    "recompute": ("policy",),
    "optimizer": ("learning_rate", "schedule", "warmup_steps", "weight_decay", "clip_norm"),
    "data": ("source", "tokenizer", "validation_fraction"),
    "train": ("steps", "seed", "run_name", "runs_dir", "validate_every"),
    "checkpoint": ("every", "keep"),
    "observe": ("log_every",),
}
"""The settings that a new file shows, by table; `echelon config show` has all of them."""


def init(
    file: Annotated[Path, Parameter(help="The file to write.")] = Path("run.toml"),
    /,
    *,
    preset: Annotated[str, Parameter(help="The preset to build on: echelon config presets.")] = (
        "nano"
    ),
    json: Json = False,
) -> int:
    """Write a run.toml that builds on a preset; a file that exists is left as it is."""
    if not file.is_dir():
        require_suffix("FILE", file, (".toml",))
    job = load_job(preset)
    values = {row.key: (row.value, row.source) for row in job.sources}
    write_new(file, "\n".join(_lines(file, preset, values)) + "\n")
    if json:
        print_json("init", {"file": str(file), "preset": preset})
    else:
        print(file)
        note(f"next: echelon plan {file}")
    return 0


def _lines(file: Path, preset: str, values: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    yield "# A run: what is trained, how it is split over ranks, where its results go."
    yield "#"
    for verb, what in (
        ("plan ", "what each rank holds and sends, and whether it can run at all"),
        ("prove", "whether the split computes what one device computes"),
        ("train", "the run itself"),
    ):
        yield f"#   echelon {verb} {file}    {what}"
    yield "#"
    yield f"# A line behind # shows what holds anyway ({preset}, or a default): take the # away and"
    yield f"# change it. All settings, with their sources: echelon config show {file}"
    yield ""
    yield f"extends = {toml_text(preset)}"
    for group, names in SHOWN.items():
        yield ""
        yield f"[{group}]"
        for name in names:
            setting = SETTINGS[f"{group}.{name}"]
            value, source = values[setting.key]
            if source.startswith("derived"):
                value = toml_text(setting.default)
            line = f"# {name} = {value}"
            yield f"{line:<34}# {setting.about}"


def show(
    run: RunFile,
    /,
    *,
    settings: Settings = (),
    toml: Annotated[
        bool, Parameter(show_default=False, help="Print it as a run.toml of its own.")
    ] = False,
    json: Json = False,
) -> int:
    """Show every setting of a run, its value, and where the value came from."""
    job = load_job(run, settings)
    if json:
        print_json("config show", settings_json(job))
    elif toml:
        print(resolved_toml(job), end="")
    else:
        rows = [(row.key, row.value, row.source) for row in job.sources]
        print(table(("setting", "value", "set by"), rows))
    return 0


def presets(*, json: Json = False) -> int:
    """List the presets: whole runs, models, and clusters."""
    rows, head = preset_rows(), ("kind", "name", "about")
    listed = {"presets": [dict(zip(head, row, strict=True)) for row in rows]}
    print_result("config presets", lambda: listed, lambda: table(head, rows) + "\n", as_json=json)
    return 0
