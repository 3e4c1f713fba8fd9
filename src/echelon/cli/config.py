"""`echelon config`: every setting with where its value came from, and the presets there are."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json, RunFile, Settings
from echelon.cli.output import print_json, table


def show(
    run: RunFile,
    /,
    *,
    settings: Settings = (),
    toml: Annotated[
        bool,
        Parameter(negative=(), show_default=False, help="Print it as a run.toml of its own."),
    ] = False,
    json: Json = False,
) -> int:
    """Show every setting of a run, its value, and where the value came from."""
    from echelon.config.load import load_job
    from echelon.config.show import resolved_toml, setting_rows, settings_json

    job = load_job(run, settings)
    if json:
        print_json("config show", settings_json(job))
    elif toml:
        print(resolved_toml(job), end="")
    else:
        rows = [(row.key, row.value, row.source) for row in setting_rows(job)]
        print(table(("setting", "value", "set by"), rows))
    return 0


def presets(*, json: Json = False) -> int:
    """List the presets: whole runs, models, and clusters."""
    from echelon.config.show import preset_rows

    rows = preset_rows()
    if json:
        listed = [{"kind": kind, "name": name, "about": about} for kind, name, about in rows]
        print_json("config presets", {"presets": listed})
    else:
        print(table(("kind", "name", "about"), rows))
    return 0
