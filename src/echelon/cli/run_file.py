# SPDX-License-Identifier: Apache-2.0
"""`echelon init` and `echelon config`: write a run.toml, show its settings, list the presets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json, Settings, bad_argument, require_run_file
from echelon.cli.output import WIDEST, note, page_columns, print_json, print_result
from echelon.config.cluster.file import cluster_toml
from echelon.config.cluster.settings import read_typed_cluster, typed_cluster
from echelon.config.files.new_file import write_new
from echelon.config.files.show import (
    CLUSTER_FILE_HEAD,
    SCHEMA,
    cluster_rows,
    cluster_tables,
    preset_rows,
    resolved_toml,
    settings_json,
)
from echelon.config.load import load_job
from echelon.config.schema import SETTINGS
from echelon.core.settings.value_types import toml_text
from echelon.planner.view.text_layout import table

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
    *,
    extends: Annotated[
        str, Parameter(help="The preset to build on: echelon config presets.")
    ] = "nano",
    out: Annotated[Path, Parameter(help="The file to write; it must be new.")] = Path("run.toml"),
    json: Json = False,
) -> int:
    """Write a run.toml that builds on a preset; a file that exists is left as it is."""
    if not out.is_dir():
        require_run_file(out)
    job = load_job(extends)
    values = {row.key: (row.value, row.source) for row in job.sources}
    write_new(out, "\n".join(_lines(out, extends, values)) + "\n", key="--out")
    if json:
        print_json("init", {"file": str(out), "extends": extends})
    else:
        print(out)
        note(f"next: echelon plan {out}")
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


RunOrNone = Annotated[
    str | None, Parameter(help="A run.toml, or the name of a preset such as nano.")
]
ClusterToShow = Annotated[
    str | None,
    Parameter(help="Show COUNTxDEVICE such as 8xh100, or a file's; with RUN, the run on it."),
]


def show(
    run: RunOrNone = None,
    /,
    *,
    cluster: ClusterToShow = None,
    settings: Settings = (),
    toml: Annotated[
        bool,
        Parameter(show_default=False, help="Print a run.toml of its own, or a cluster file."),
    ] = False,
    json: Json = False,
) -> int:
    """Show every setting of a run, its value, and where the value came from; or a cluster.

    What --toml prints of a cluster is a file to edit, and to give back as --cluster FILE.toml.
    """
    source = f"--cluster {quote(cluster)}" if cluster is not None else ""
    if run is None:
        if cluster is None:
            raise bad_argument("nothing is named to show", "RUN", "--cluster 8xh100")
        if settings:
            raise bad_argument("--set has an effect where a run is named", "RUN --set KEY=VALUE")
        return _show_cluster(cluster, source, toml=toml, json=json)
    typed = None if cluster is None else typed_cluster(cluster, source)
    job = load_job(run, settings, typed=typed)
    if json:
        print_json("config show", settings_json(job))
    elif toml:
        print(resolved_toml(job), end="")
    else:
        rows = [(row.key, row.value, row.source) for row in job.sources]
        print(table(("setting", "value", "set by"), rows, page_columns(WIDEST)))
    return 0


def _show_cluster(cluster: str, source: str, *, toml: bool, json: bool) -> int:
    found = read_typed_cluster(cluster, source)
    if json:
        print_json("config show", {"schema": SCHEMA, "cluster": cluster_tables(found)})
    elif toml:
        about = (f"{found.name}: {found.num_devices} x {found.device.name}.", *CLUSTER_FILE_HEAD)
        print(cluster_toml(found, about), end="")
    else:
        rows = [(key, value) for key, value in cluster_rows(found)]
        print(table(("setting", "value"), rows, page_columns(WIDEST)))
    return 0


def presets(*, json: Json = False) -> int:
    """List the presets: whole runs, models, and clusters."""
    rows, head = preset_rows(), ("kind", "name", "about")
    listed = {"presets": [dict(zip(head, row, strict=True)) for row in rows]}
    print_result(
        "config presets",
        lambda: listed,
        lambda: table(head, rows, page_columns(WIDEST)) + "\n",
        as_json=json,
    )
    return 0
