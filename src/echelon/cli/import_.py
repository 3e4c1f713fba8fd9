"""`echelon import`: a configuration of another tool becomes a run.toml, key by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from echelon.cli.flags import Json, Settings
from echelon.cli.new_files import require_suffix
from echelon.cli.output import note, print_json
from echelon.cli.wrapped import wrapped


def import_(
    file: Annotated[
        Path,
        Parameter(
            help="A DeepSpeed JSON, an Accelerate YAML, a torchtitan TOML, or a Megatron-LM "
            "command in a file."
        ),
    ],
    /,
    *,
    kind: Annotated[
        Literal["deepspeed", "accelerate", "megatron", "torchtitan"] | None,
        Parameter(help="What FILE is; else its content tells."),
    ] = None,
    output: Annotated[
        Path | None, Parameter(help="The run.toml to write; without it nothing is written.")
    ] = None,
    extends: Annotated[
        str | None,
        Parameter(help="The preset or run file with the model and the data: else nano."),
    ] = None,
    ranks: Annotated[int | None, Parameter(help="How many processes the launcher starts.")] = None,
    settings: Settings = (),
    json: Json = False,
) -> int:
    """Turn a configuration of another tool into a run.toml; show what became of each key."""
    from echelon.api.importing import import_run
    from echelon.config.foreign.write import mapping_rows

    require_suffix("--output", output, (".toml",))
    run = import_run(file, kind=kind, extends=extends, ranks=ranks, settings=settings)
    if output is not None:
        run.write(output)
    if json:
        result = {
            "kind": run.found.kind,
            "file": None if output is None else str(output),
            "rows": [row.to_json() for row in run.rows],
            "toml": run.to_toml(None if output is None else output.parent),
        }
        print_json("import", result)
        return 0
    print("\n".join(_rows(mapping_rows(run.found))))
    if run.found.extends is not None and extends is None:
        note(f"model and data: {run.found.extends}, because {file} has none; --extends names yours")
    if output is None:
        note("nothing is written; --output run.toml writes it")
    else:
        note(f"next: echelon config show {output}")
    return 0


def _rows(rows: Iterable[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield each key with its value, and under it the settings that it became and why."""
    for key, value, setting, why in rows:
        if key:
            yield from wrapped(f"{key} = {value}" if value else key, "", "    ")
        yield from wrapped(why if setting == "-" else f"-> {setting}: {why}", "    ", "       ")
