"""`echelon init`: write a run.toml that builds on a preset, with what one usually changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json
from echelon.cli.new_files import require_suffix
from echelon.cli.output import note, print_json

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
    from echelon.config.load import load_job
    from echelon.config.new_file import write_new

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
    from echelon.config.kinds import toml_text
    from echelon.config.schema import SETTINGS

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
    for table, names in SHOWN.items():
        yield ""
        yield f"[{table}]"
        for name in names:
            setting = SETTINGS[f"{table}.{name}"]
            value, source = values[setting.key]
            if source.startswith("derived"):
                value = toml_text(setting.default)
            line = f"# {name} = {value}"
            yield f"{line:<34}# {setting.about}"
