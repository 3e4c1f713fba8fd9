"""`echelon calibrate` and `echelon calibrate merge`: their flags, and what they start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from echelon.api.calibrating.machine import calibrate_machine
from echelon.api.calibrating.merge import merge_calibrations
from echelon.api.calibrating.model import calibrate_model
from echelon.api.calibrating.run import calibrate_run
from echelon.cli.calibrate.text import (
    machine_json,
    machine_report,
    merged_json,
    merged_report,
    run_json,
    run_report,
    times_json,
    times_report,
)
from echelon.cli.flags import Json, Settings
from echelon.cli.output import note, print_result
from echelon.core.errors import ConfigError
from echelon.core.rulebook.command_line import BAD_ARGUMENT
from echelon.launch.environment import is_launched

TIMES = Path("times.json")
CLUSTER = Path("cluster.toml")


def calibrate(
    *,
    model: Annotated[
        str | None, Parameter(help="A run.toml or preset: its embedding, block and head instead.")
    ] = None,
    run: Annotated[
        Path | None,
        Parameter(
            name="--from", help="The folder of a run: refine its cluster by its events instead."
        ),
    ] = None,
    ranks: Annotated[
        int | None, Parameter(help="Ranks at work at once: one on each core or GPU by default.")
    ] = None,
    settings: Settings = (),
    out: Annotated[
        Path | None,
        Parameter(help="The file to write; it must be new: cluster.toml, with --model times.json."),
    ] = None,
    json: Json = False,
) -> int:
    """Measure kernels and collectives of this machine in minutes, or of all nodes under torchrun.

    The same command after an interruption goes on where it stopped.
    """
    _require_one(model=model, run=run, ranks=ranks, settings=settings)
    if model is not None:
        note(f"measuring {model} ...")
        times = calibrate_model(model, settings=settings, out=out or TIMES)
        values, text = times_json(times, out or TIMES), times_report(times, out or TIMES)
    elif run is not None:
        refined = calibrate_run(run, out=out or CLUSTER)
        values, text = run_json(refined), run_report(refined)
    else:
        found = calibrate_machine(out=out or CLUSTER, ranks=ranks, say=note)
        if found.rank > 0:
            return 0  # The first rank prints what all have found.
        values, text = machine_json(found), machine_report(found)
    print_result("calibrate", lambda: values, lambda: text + "\n", as_json=json)
    return 0


def merge(
    *files: Annotated[
        Path, Parameter(help="Files that echelon calibrate wrote, of the same kind of device.")
    ],
    out: Annotated[Path, Parameter(help="The cluster file to write; it must be new.")],
    json: Json = False,
) -> int:
    """Join calibrations of a device, of its links, or of several nodes: the median of each."""
    merged = merge_calibrations(files, out=out)
    print_result(
        "calibrate merge",
        lambda: merged_json(merged),
        lambda: merged_report(merged) + "\n",
        as_json=json,
    )
    return 0


CALIBRATE = App(name="calibrate", default_command=calibrate)
CALIBRATE.command(merge, help="Join calibrations of a device, of its links, or of several nodes.")


def _require_one(
    *, model: str | None, run: Path | None, ranks: int | None, settings: Sequence[str]
) -> None:
    """Raise ConfigError where flags of different measurements stand together, or under torchrun."""
    wrong = ""
    if model is not None and run is not None:
        wrong = "--model measures units here, --from reads a run; each writes a file of its own"
    elif ranks is not None and (model is not None or run is not None):
        wrong = "--ranks is for measuring the machine; a model or a run has its own ranks"
    elif settings and model is None:
        wrong = "--set changes the run of --model; kernels and collectives are of no run"
    elif is_launched() and (model is not None or run is not None):
        flag = "--from" if model is None else "--model"
        wrong = f"torchrun starts several processes, and {flag} is work for one: all would write it"
    if wrong:
        suggestions = ("echelon calibrate --ranks 4", "echelon calibrate --model run.toml")
        raise ConfigError(BAD_ARGUMENT.problem(wrong, suggestions=suggestions))
