"""`echelon import` and `echelon export`: a plan from the words of another tool, and into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from echelon.api.converting import export as export_run
from echelon.api.converting import import_run
from echelon.cli.flags import Json, Settings, require_suffix
from echelon.cli.output import note, print_json
from echelon.interop.importer import mapping_rows
from echelon.interop.tools import TargetName, ToolName, describe_files
from echelon.planner.view.text_layout import wrap_text


def import_(
    file: Annotated[Path, Parameter(help=f"{describe_files()}.")],
    /,
    *,
    tool: Annotated[
        ToolName | None, Parameter(name="--from", help="Whose FILE is; else its content tells.")
    ] = None,
    out: Annotated[
        Path | None, Parameter(help="The run.toml to write; without it nothing is written.")
    ] = None,
    extends: Annotated[
        str | None, Parameter(help="The preset or run file with the model and the data: else nano.")
    ] = None,
    ranks: Annotated[int | None, Parameter(help="Ranks that the launcher starts.")] = None,
    settings: Settings = (),
    json: Json = False,
) -> int:
    """Turn a configuration of another tool into a run.toml; show what became of each key."""
    require_suffix("--out", out, (".toml",))
    run = import_run(file, kind=tool, extends=extends, ranks=ranks, settings=settings)
    if out is not None:
        run.write(out)
    if json:
        result = {
            "kind": run.found.kind,
            "file": None if out is None else str(out),
            "rows": [row.to_json() for row in run.rows],
            "toml": run.to_toml(None if out is None else out.parent),
        }
        print_json("import", result)
        return 0
    print("\n".join(_rows(mapping_rows(run.found))))
    if run.found.extends is not None and extends is None:
        note(f"model and data: {run.found.extends}, because {file} has none; --extends names yours")
    if out is None:
        note("nothing is written; --out run.toml writes it")
    else:
        note(f"next: echelon config show {out}")
    return 0


def _rows(rows: Iterable[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield each key with its value, and under it the settings that it became and why."""
    for key, value, setting, why in rows:
        if key:
            yield from wrap_text(f"{key} = {value}" if value else key, "", "    ")
        yield from wrap_text(why if setting == "-" else f"-> {setting}: {why}", "    ", "       ")


AnyRun = Annotated[
    str, Parameter(help="A run.toml, a preset, a plan.json, or the folder of a run.")
]


def export(
    run: AnyRun,
    /,
    *,
    to: Annotated[TargetName, Parameter(help="Who is to read it.")],
    out: Annotated[
        Path | None, Parameter(help="The file to write; without it the text is printed.")
    ] = None,
    settings: Settings = (),
    json: Json = False,
) -> int:
    """Write a plan for another tool: read back, it is the same plan; what cannot be is refused."""
    found = export_run(run, to, settings=settings)
    if out is not None:
        found.write(out)
    elif not json:
        found.require_alone()
    if json:
        place = None if out is None else str(out)
        notes = [one.to_json() for one in found.notes]
        written = {"text": found.text, "beside": dict(found.found.beside), "notes": notes}
        print_json("export", {"to": to, "file": place, **written})
        return 0
    for one in found.notes:
        note(f"recorded, not said: {one.text()}")
    if out is None:
        print(found.text, end="")
    else:
        print("\n".join(str(out.parent / name) for name in (out.name, *found.found.beside)))
    return 0


EXPORT = App(name="export", default_command=export)
EXPORT.command(
    "echelon.cli.export_weights:weights",
    name="weights",
    help="Write trained weights for transformers, vLLM, DeepSpeed and others.",
)
