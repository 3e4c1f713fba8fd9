"""`echelon export`: write a plan in the words of another tool, or as a run.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from echelon.cli.flags import Json, Settings
from echelon.cli.output import note, print_json

AnyRun = Annotated[
    str, Parameter(help="A run.toml, a preset, a plan.json, or the folder of a run.")
]


def export(
    run: AnyRun,
    /,
    *,
    to: Annotated[
        Literal["run.toml", "megatron", "deepspeed", "torchtitan", "accelerate"],
        Parameter(help="Who is to read it."),
    ],
    out: Annotated[
        Path | None, Parameter(help="The file to write; without it the text is printed.")
    ] = None,
    settings: Settings = (),
    json: Json = False,
) -> int:
    """Write a plan for another tool: read back, it is the same plan; what cannot be is refused."""
    from echelon.api.exporting import export as export_run

    found = export_run(run, to, settings=settings)
    if out is not None:
        found.write(out)
    elif not json:
        found.require_alone()
    if json:
        result = {
            "to": to,
            "file": None if out is None else str(out),
            "text": found.text,
            "beside": dict(found.found.beside),
            "notes": [one.to_json() for one in found.notes],
        }
        print_json("export", result)
        return 0
    for one in found.notes:
        note(f"recorded, not said: {one.text()}")
    if out is None:
        print(found.text, end="")
    else:
        print("\n".join(str(out.parent / name) for name in (out.name, *found.found.beside)))
    return 0
