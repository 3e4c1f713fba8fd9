"""`echelon calibrate`: measure this machine, a model's units on it, or what a run says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from echelon.cli.calibrate_report import (
    machine_json,
    machine_report,
    run_json,
    run_report,
    times_report,
)
from echelon.cli.flags import Json, Settings
from echelon.cli.output import note, print_json
from echelon.core.errors import ConfigError
from echelon.core.rulebook.command_line import BAD_ARGUMENT

TIMES, CLUSTER = Path("times.json"), Path("cluster.toml")


def calibrate(
    *,
    model: Annotated[
        str | None,
        Parameter(
            show_default=False, help="A run.toml or preset: its embedding, block and head instead."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        Parameter(
            name="--from",
            show_default=False,
            help="The folder of a run: refine its cluster by its events instead.",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        Parameter(
            show_default=False, help="Ranks at work at once: one on each core or GPU by default."
        ),
    ] = None,
    settings: Settings = (),
    out: Annotated[
        Path | None,
        Parameter(
            show_default=False,
            help="The file to write; it must be new: cluster.toml, with --model times.json.",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Measure kernels and collectives here for two minutes; cluster.file reads what is written."""
    _require_one(model=model, run=run, ranks=ranks, settings=settings)
    if model is not None:
        return _model(model, settings, out or TIMES, json=json)
    if run is not None:
        return _run(run, out or CLUSTER, json=json)
    from echelon.api.calibrate_machine import calibrate_machine

    found = calibrate_machine(out=out or CLUSTER, ranks=ranks, say=note)
    if json:
        print_json("calibrate", machine_json(found))
    else:
        print(machine_report(found))
    return 0


def _model(model: str, settings: Sequence[str], out: Path, *, json: bool) -> int:
    from echelon.api.calibrating import calibrate as measure

    note(f"measuring {model} ...")
    times = measure(model, settings=settings, out=out)
    if json:
        result = {"out": str(out), "seconds": times.seconds, "spread": times.spread}
        print_json("calibrate", result)
    else:
        print(times_report(times, out))
    return 0


def _run(run: Path, out: Path, *, json: bool) -> int:
    from echelon.api.calibrate_run import calibrate_run

    found = calibrate_run(run, out=out)
    if json:
        print_json("calibrate", run_json(found))
    else:
        print(run_report(found))
    return 0


def _require_one(
    *, model: str | None, run: Path | None, ranks: int | None, settings: Sequence[str]
) -> None:
    """Raise ConfigError where flags of different measurements stand together."""
    wrong = ""
    if model is not None and run is not None:
        wrong = "--model measures units here, --from reads a run; each writes a file of its own"
    elif ranks is not None and (model is not None or run is not None):
        wrong = "--ranks is for measuring the machine; a model or a run has its own ranks"
    elif settings and model is None:
        wrong = "--set changes the run of --model; kernels and collectives are of no run"
    if wrong:
        works = ("echelon calibrate --ranks 4", "echelon calibrate --model run.toml")
        raise ConfigError(BAD_ARGUMENT.problem(wrong, works=works))
