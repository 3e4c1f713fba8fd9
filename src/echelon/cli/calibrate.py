"""`echelon calibrate --model`: measure the units of a model here, for stages balanced by time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json, Settings
from echelon.cli.output import note, print_json, table


def calibrate(
    *,
    model: Annotated[
        str, Parameter(help="A run.toml or a preset, whose model and microbatch are measured.")
    ],
    settings: Settings = (),
    out: Annotated[Path, Parameter(help="The file to write; it must be new.")] = Path("times.json"),
    json: Json = False,
) -> int:
    """Measure embedding, block and head on one rank of this machine; pipeline.times reads them."""
    from echelon.api.calibrating import calibrate as measure

    note(f"measuring {model} ...")
    times = measure(model, settings=settings, out=out)
    if json:
        result = {"out": str(out), "seconds": times.seconds, "spread": times.spread}
        print_json("calibrate", result)
        return 0
    rows = [
        (unit, *(f"{1e3 * seconds:.3f}" for seconds in found.values()), f"{times.spread[unit]:.0%}")
        for unit, found in times.seconds.items()
    ]
    head = ("unit", "F ms", "B ms", "W ms", "BW ms", "spread of F")
    print(f"{times.model} on {times.device}, {times.threads} threads, one microbatch:\n")
    print(table(head, rows))
    print(f'\nwritten to {out}; use it: --set pipeline.times="{out}"')
    return 0
