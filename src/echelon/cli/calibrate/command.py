# SPDX-License-Identifier: Apache-2.0
"""`echelon calibrate` and `echelon calibrate merge`: their flags, and what they start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from echelon.api.calibrating.machine import calibrate_machine
from echelon.api.calibrating.merge import merge_calibrations
from echelon.api.calibrating.run import calibrate_model, calibrate_run
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
from echelon.cli.output import WIDEST, page_columns, print_result
from echelon.cli.stderr import note, working
from echelon.config.reading import is_folder
from echelon.config.setting_layers import preset_meant
from echelon.core.errors import ConfigError
from echelon.core.rulebook.config import BAD_ARGUMENT
from echelon.launch.environment import is_launched

TIMES = Path("times.json")
CLUSTER = Path("cluster.toml")


def calibrate(
    run: Annotated[
        str | None,
        Parameter(
            help="A run.toml or preset: measure its embedding, block and head instead. The folder "
            "of a run: refine its cluster by its events instead."
        ),
    ] = None,
    /,
    *,
    ranks: Annotated[
        int | None, Parameter(help="Ranks at work at once: one on each core or GPU by default.")
    ] = None,
    settings: Settings = (),
    out: Annotated[
        Path | None,
        Parameter(
            help="The file to write; it must be new: times.json for a run.toml or preset, else "
            "cluster.toml."
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Measure kernels and collectives of this machine in minutes, or of all nodes under torchrun.

    The same command after an interruption goes on where it stopped.
    """
    columns = page_columns(WIDEST)
    folder = None if run is None else _run_folder(run)
    _require_one(run=run, folder=folder, ranks=ranks, settings=settings)
    if folder is not None:
        refined = calibrate_run(folder, out=out or CLUSTER)
        values, text = run_json(refined), run_report(refined, columns=columns)
    elif run is not None:
        note(f"measuring {run} ...")
        with working("measuring the model", lines=not json):
            times = calibrate_model(run, settings=settings, out=out or TIMES)
        values, text = (
            times_json(times, out or TIMES),
            times_report(times, out or TIMES, columns=columns),
        )
    else:
        with working("measuring the machine", lines=not json):
            found = calibrate_machine(out=out or CLUSTER, ranks=ranks, say=note)
        if found.rank > 0:
            return 0  # The first rank prints what all have found.
        values, text = machine_json(found), machine_report(found, columns=columns)
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
        lambda: merged_report(merged, columns=page_columns()) + "\n",
        as_json=json,
    )
    return 0


CALIBRATE = App(name="calibrate", default_command=calibrate)
CALIBRATE.command(merge, help="Join calibrations of a device, of its links, or of several nodes.")


def _run_folder(run: str) -> Path | None:
    """Return the folder of a run that has been; None where a run.toml or a preset is named."""
    path = Path(run)
    return path if preset_meant(run, path) is None and is_folder(path) else None


def _require_one(
    *, run: str | None, folder: Path | None, ranks: int | None, settings: Sequence[str]
) -> None:
    """Raise ConfigError where flags of different measurements stand together, or under torchrun."""
    wrong = ""
    if ranks is not None and run is not None:
        wrong = f"--ranks is for measuring the machine; {run} has its own ranks"
    elif settings and folder is not None:
        wrong = f"--set changes a run that is to be measured; {folder} is one that has been"
    elif settings and run is None:
        wrong = "--set changes a run; kernels and collectives are of no run"
    elif is_launched() and run is not None:
        wrong = f"torchrun starts several processes, and {run} is work for one: all would write it"
    if wrong:
        suggestions = ("echelon calibrate --ranks 4", "echelon calibrate run.toml")
        raise ConfigError(BAD_ARGUMENT.problem(wrong, suggestions=suggestions))
