# SPDX-License-Identifier: Apache-2.0
"""`echelon calibrate`, `echelon calibrate merge`: constants of a machine, and the error of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

from cyclopts import App, Parameter

from echelon.api.calibrating.machine import MachineCalibration, calibrate_machine
from echelon.api.calibrating.merge import MergedCalibration, merge_calibrations
from echelon.api.calibrating.run import RunCalibration, calibrate_model, calibrate_run
from echelon.cli.flags import Json, Settings
from echelon.cli.output import WIDEST, note, page_columns, print_result, working
from echelon.config.files.measurements import TimesFile
from echelon.config.reading import is_folder
from echelon.config.setting_layers import preset_meant
from echelon.core.cluster import Cluster, Efficiency, Link
from echelon.core.errors import ConfigError
from echelon.core.rulebook.config import BAD_ARGUMENT
from echelon.cost.fit.device import DeviceFit
from echelon.cost.fit.links import LinkFit
from echelon.cost.fit.merge import is_inside
from echelon.cost.fit.runs import TimedStep, TrainerFit, plan_label
from echelon.launch.environment import is_launched
from echelon.planner.view.text_layout import WIDTH, fit_page, table

TIMES = Path("times.json")
CLUSTER = Path("cluster.toml")

Fits = DeviceFit | LinkFit | TrainerFit
HELD_OUT_SIGN = "*"


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


def times_json(times: TimesFile, out: Path) -> dict[str, object]:
    """Return the same as a JSON object."""
    return {"out": str(out), "seconds": times.seconds, "spread": times.spread}


def times_report(times: TimesFile, out: Path, *, columns: int = WIDEST) -> str:
    """Return the seconds of the units of a model."""
    rows = [
        (unit, *(f"{1e3 * seconds:.3f}" for seconds in found.values()), f"{times.spread[unit]:.0%}")
        for unit, found in times.seconds.items()
    ]
    head = ("unit", "F ms", "B ms", "W ms", "BW ms", "spread of F")
    title = f"{times.model} on {times.device}, {times.threads} threads, one microbatch:"
    page = fit_page(f"{title}\n\n{table(head, rows, columns)}", columns=columns)
    return f'{page}\n\nwritten to {out}; use it: --set pipeline.times="{out}"'


def machine_report(found: MachineCalibration, *, columns: int = WIDEST) -> str:
    """Return the constants of a machine, then each time with what they make of it."""
    off = ("measured", "predicted", "off")
    kernels = _rows(found.device, lambda one: (one.kernel, one.running))
    parts = [
        f"{found.cluster.name}, by {found.cluster.backend}, torch {found.record.torch}\n",
        _constants(found.cluster, (*found.device.at_bound, *_link_bounds(found)), columns),
        "\nKernels, all ranks at work at once, and what the constants make of them:\n",
        table(("kernel", "ranks", *off), kernels, columns),
    ]
    for where, links in (("inside of a node", found.links), ("between nodes", found.network)):
        if links:
            rows = _rows(links, lambda one: (one.collective,))
            parts += [f"\nCollectives {where}:\n", table(("collective", *off), rows, columns)]
    if found.trainer:
        rows = _rows(found.trainer, _step_name)
        head = "\nSteps of plans, with what they told of the trainer and the link:\n"
        parts += [head, table(("plan", *off), rows, columns)]
    head = ("kind", "fitted", "mean |off|", "median", "held out", "mean |off|", "median")
    together = [
        f"\nTogether ({HELD_OUT_SIGN} is held out: measured, not fitted; so far off are sizes that",
        "nobody measured):\n",
        table(head, _summary(found), columns),
    ]
    return fit_page("\n".join([*parts, *together]), columns=columns) + f"\n{_written(found.out)}"


def machine_json(found: MachineCalibration) -> dict[str, object]:
    """Return the same as a JSON object."""
    return {
        "out": str(found.out),
        "cluster": asdict(found.cluster),
        "calibration": {**asdict(found.record), "held_out": dict(found.record.held_out)},
        "at_bound": [*found.device.at_bound, *_link_bounds(found)],
        "kernels": [
            {
                "kind": type(one.kernel).__name__.lower(),
                **asdict(one.kernel),
                "ranks": one.running,
                **_numbers(one, error),
            }
            for one, error in _timed(found.device)
        ],
        "collectives": [
            {**asdict(one.collective), **_numbers(one, error)}
            for links in (found.links, found.network)
            for one, error in _timed(links)
        ],
        "steps": [
            {"plan": plan_label(one.plan), "hidden": one.plan.model.hidden, **_numbers(one, error)}
            for one, error in _timed(found.trainer)
        ],
    }


def merged_report(found: MergedCalibration, *, columns: int = WIDTH) -> str:
    """Return the constants of merged calibrations, and how far apart they were."""
    values = [dict(_plain_values(cluster)) for _, cluster in found.clusters]
    rows = [
        (name, _shown(name, merged), *(_shown(name, end) for end in (min(own), max(own))))
        for name, merged in _plain_values(found.cluster)
        if (own := [each[name] for each in values if name in each])
    ]
    errors = [(name, f"{error:.0%}") for name, error in found.record.held_out]
    parts = [
        f"{found.cluster.name}: {len(found.clusters)} files, {found.record.merged} calibrations\n",
        table(("constant", "median", "lowest", "highest"), rows, columns),
    ]
    if errors:
        parts += ["\nThe largest errors at sizes that were held out:\n"]
        parts += [table(("kind", "mean |off|"), errors, columns)]
    return fit_page("\n".join(parts), columns=columns) + f"\n{_written(found.out)}"


def merged_json(found: MergedCalibration) -> dict[str, object]:
    """Return the same as a JSON object."""
    return {
        "out": str(found.out),
        "cluster": asdict(found.cluster),
        "calibration": {**asdict(found.record), "held_out": dict(found.record.held_out)},
        "files": [{"file": str(path), "cluster": asdict(one)} for path, one in found.clusters],
    }


def _plain_values(cluster: Cluster) -> Iterable[tuple[str, float]]:
    """Yield every measured constant by its name."""
    device = cluster.device
    for dtype, flops in device.peak_flops:
        yield f"peak_flops.{dtype}", flops
    yield "memory_bandwidth", device.memory_bandwidth
    for item in fields(Efficiency):
        yield item.name, getattr(device.efficiency, item.name)
    for link in cluster.links:
        where = _tier(cluster, link)
        for name in ("bandwidth", "latency_s", "efficiency", "half_bytes"):
            yield f"{where} {name}", getattr(link, name)
    yield from cluster.trainer


def _shown(name: str, value: float, *, digits: int = 4) -> str:
    """A constant with its unit; with `digits` digits where it has none."""
    if name.endswith("_s"):
        return _time(value)
    if name.startswith("peak_flops"):
        return f"{value / 1e9:.4g} GFLOP/s"
    return f"{value / 1e9:.4g} GB/s" if name.endswith("bandwidth") else f"{value:.{digits}g}"


def _numbers(one: Any, error: float) -> dict[str, object]:
    return {"seconds": one.seconds, "error": error, "fitted": one.fitted}


def _written(out: Path) -> str:
    """Return how a file is used: to be copied, so that no width cuts it."""
    return f'\nwritten to {out}; use it:\n  --cluster {out}, or --set cluster.file="{out}"'


def _timed(found: Fits | None) -> list[tuple[Any, float]]:
    """Return what was timed, each with how far off the fit is; nothing without a fit."""
    return list(zip(found.timed, found.errors, strict=True)) if found else []


def run_report(found: RunCalibration, *, columns: int = WIDEST) -> str:
    """Return which constants a run changed by how much, and its times before and after."""
    changes = [
        (
            one.name,
            f"{one.before:.4g}",
            f"{one.after:.4g}",
            f"{one.after / one.before - 1:+.0%}" if one.before else "new",
        )
        for one in found.changes
    ]
    times = [
        (one.name, one.count, _time(one.seconds), _off(one.before), _off(one.after))
        for one in found.times
    ]
    page = "\n".join(
        (
            f"{found.run}: {found.steps} steps on {found.cluster.name}\n",
            table(("constant", "before", "after", "change"), changes, columns),
            "\nWhat ranks did, the median of each, and how far the constants were and are off:\n",
            table(("what", "times", "measured", "before", "after"), times, columns),
        )
    )
    return fit_page(page, columns=columns) + f"\n{_written(found.out)}"


def run_json(found: RunCalibration) -> dict[str, object]:
    """Return the same as a JSON object."""
    return {
        "out": str(found.out),
        "run": str(found.run),
        "steps": found.steps,
        "cluster": asdict(found.cluster),
        "changes": [asdict(one) for one in found.changes],
        "times": [asdict(one) for one in found.times],
    }


def _constants(cluster: Cluster, at_bound: Sequence[str], columns: int) -> str:
    trainer, device = dict(cluster.trainer), cluster.device
    values = [
        (
            name,
            f"{value:.4g}"
            if name in trainer
            else f"{value / 1024:.4g} KiB"
            if name.endswith("half_bytes")
            else _shown(name, value, digits=3),
        )
        for name, value in _plain_values(cluster)
    ]
    if device.cores:
        values.insert(len(device.peak_flops) + 1, ("cores", f"{device.cores:.2f}"))
    bound = "at the bound of what is plausible"
    rows = [(name, value, bound if name in at_bound else "") for name, value in values]
    return table(("constant", "value", ""), rows, columns)


def _tier(cluster: Cluster, link: Link) -> str:
    """Return what a tier is called here: the link of a node, or the network between nodes."""
    return "link" if is_inside(cluster, link) else "network"


def _link_bounds(found: MachineCalibration) -> list[str]:
    links = (("link", found.links), ("network", found.network))
    of_links = [f"{where} {name}" for where, fit in links if fit for name in fit.at_bound]
    return [*of_links, *(found.trainer.at_bound if found.trainer else ())]


def _rows(found: Fits, name: Callable[[Any], Sequence[object]]) -> list[tuple[object, ...]]:
    """Return each time behind its name, what the constants make of it, and how far it is off."""
    return [
        (
            *name(one),
            _time(one.seconds),
            _time(one.seconds * (1 + off)),
            _off(off) + ("" if one.fitted else f" {HELD_OUT_SIGN}"),
        )
        for one, off in _timed(found)
    ]


def _step_name(one: TimedStep) -> tuple[str]:
    return (f"{plan_label(one.plan)}, width {one.plan.model.hidden}",)


def _summary(found: MachineCalibration) -> list[tuple[object, ...]]:
    """Return how far off each kind is: where it was fitted, and where it was held out."""
    by_kind: dict[str, list[tuple[bool, float]]] = {}
    kinds = {"collective": found.links, "network": found.network, "step": found.trainer}
    for one, off in _timed(found.device):
        name = type(one.kernel).__name__.lower()
        by_kind.setdefault(name, []).append((one.fitted, abs(off)))
    for name, fit in kinds.items():
        if fit:
            by_kind[name] = [(one.fitted, abs(off)) for one, off in _timed(fit)]
    return [
        (
            kind,
            *_means([off for fitted, off in offs if fitted]),
            *_means([off for fitted, off in offs if not fitted]),
        )
        for kind, offs in by_kind.items()
    ]


def _means(offs: Sequence[float]) -> tuple[str, str, str]:
    if not offs:
        return "-", "-", "-"
    return str(len(offs)), f"{mean(offs):.0%}", f"{median(offs):.0%}"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.1f} us"
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _off(error: float) -> str:
    return f"{error:+.0%}"
