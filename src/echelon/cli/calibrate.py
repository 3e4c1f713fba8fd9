"""`echelon calibrate`: measure this machine, a model's units on it, or what a run says of it.

What is printed: the constants that were found, and how far each time is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

from cyclopts import Parameter

from echelon.api.calibrating.machine import MachineCalibration, calibrate_machine
from echelon.api.calibrating.model import calibrate_model
from echelon.api.calibrating.run import RunCalibration, calibrate_run
from echelon.cli.flags import Json, Settings
from echelon.cli.output import note, print_result
from echelon.config.files.reading import is_folder
from echelon.config.files.times_file import TimesFile
from echelon.config.setting_layers import preset_meant
from echelon.core.cluster import Cluster, Device, Efficiency, Link
from echelon.core.errors import ConfigError
from echelon.core.rulebook.command_line import BAD_ARGUMENT
from echelon.cost.fit.device import DeviceFit
from echelon.cost.fit.links import LinkFit
from echelon.cost.fit.trainer import TimedStep, TrainerFit, plan_label
from echelon.planner.view.text_layout import table

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
    """Measure kernels and collectives here for two minutes; cluster.file reads what is written."""
    folder = None if run is None else _run_folder(run)
    _require_one(run=run, folder=folder, ranks=ranks, settings=settings)
    if folder is not None:
        refined = calibrate_run(folder, out=out or CLUSTER)
        values, text = run_json(refined), run_report(refined)
    elif run is not None:
        note(f"measuring {run} ...")
        times = calibrate_model(run, settings=settings, out=out or TIMES)
        values, text = times_json(times, out or TIMES), times_report(times, out or TIMES)
    else:
        found = calibrate_machine(out=out or CLUSTER, ranks=ranks, say=note)
        values, text = machine_json(found), machine_report(found)
    print_result("calibrate", lambda: values, lambda: text + "\n", as_json=json)
    return 0


def _run_folder(run: str) -> Path | None:
    """Return the folder of a run that has been; None where a run.toml or a preset is named."""
    path = Path(run)
    return path if preset_meant(run, path) is None and is_folder(path) else None


def _require_one(
    *, run: str | None, folder: Path | None, ranks: int | None, settings: Sequence[str]
) -> None:
    """Raise ConfigError where flags of different measurements stand together."""
    wrong = ""
    if ranks is not None and run is not None:
        wrong = f"--ranks is for measuring the machine; {run} has its own ranks"
    elif settings and folder is not None:
        wrong = f"--set changes a run that is to be measured; {folder} is one that has been"
    elif settings and run is None:
        wrong = "--set changes a run; kernels and collectives are of no run"
    if wrong:
        suggestions = ("echelon calibrate --ranks 4", "echelon calibrate run.toml")
        raise ConfigError(BAD_ARGUMENT.problem(wrong, suggestions=suggestions))


def times_json(times: TimesFile, out: Path) -> dict[str, object]:
    """Return the same as a JSON object."""
    return {"out": str(out), "seconds": times.seconds, "spread": times.spread}


def times_report(times: TimesFile, out: Path) -> str:
    """Return the seconds of the units of a model."""
    rows = [
        (unit, *(f"{1e3 * seconds:.3f}" for seconds in found.values()), f"{times.spread[unit]:.0%}")
        for unit, found in times.seconds.items()
    ]
    head = ("unit", "F ms", "B ms", "W ms", "BW ms", "spread of F")
    return (
        f"{times.model} on {times.device}, {times.threads} threads, one microbatch:\n\n"
        f'{table(head, rows)}\n\nwritten to {out}; use it: --set pipeline.times="{out}"'
    )


def machine_report(found: MachineCalibration) -> str:
    """Return the constants of a machine, then each time with what they make of it."""
    off = ("measured", "predicted", "off")
    kernels = _rows(found.device, lambda one: (one.kernel, one.running))
    parts = [
        f"{found.cluster.name}, by {found.cluster.backend}\n",
        _constants(found.cluster, (*found.device.at_bound, *_link_bounds(found))),
        "\nKernels, all ranks at work at once, and what the constants make of them:\n",
        table(("kernel", "ranks", *off), kernels),
    ]
    if found.links:
        rows = _rows(found.links, lambda one: (one.collective,))
        parts += ["\nCollectives:\n", table(("collective", *off), rows)]
    if found.trainer:
        rows = _rows(found.trainer, _step_name)
        head = "\nSteps of plans, with what they told of the trainer and the link:\n"
        parts += [head, table(("plan", *off), rows)]
    together = table(("kind", "times", "mean of |off|", "median"), _summary(found))
    written = f'\nwritten to {found.out}; use it: --set cluster.file="{found.out}"'
    return "\n".join([*parts, "\nTogether:\n", together, written])


def machine_json(found: MachineCalibration) -> dict[str, object]:
    """Return the same as a JSON object."""
    return {
        "out": str(found.out),
        "cluster": asdict(found.cluster),
        "at_bound": [*found.device.at_bound, *_link_bounds(found)],
        "kernels": [
            {
                "kind": type(one.kernel).__name__.lower(),
                **asdict(one.kernel),
                "ranks": one.running,
                "seconds": one.seconds,
                "error": error,
            }
            for one, error in _timed(found.device)
        ],
        "collectives": [
            {**asdict(one.collective), "seconds": one.seconds, "error": error}
            for one, error in _timed(found.links)
        ],
        "steps": [
            {"plan": plan_label(one.plan), "hidden": one.plan.model.hidden, "seconds": one.seconds}
            | {"error": error}
            for one, error in _timed(found.trainer)
        ],
    }


def _timed(found: DeviceFit | LinkFit | TrainerFit | None) -> list[tuple[Any, float]]:
    """Return what was timed, each with how far off the fit is; nothing without a fit."""
    return list(zip(found.timed, found.errors, strict=True)) if found else []


def run_report(found: RunCalibration) -> str:
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
    return "\n".join(
        (
            f"{found.run}: {found.steps} steps on {found.cluster.name}\n",
            table(("constant", "before", "after", "change"), changes),
            "\nWhat ranks did, the median of each, and how far the constants were and are off:\n",
            table(("what", "times", "measured", "before", "after"), times),
            f'\nwritten to {found.out}; use it: --set cluster.file="{found.out}"',
        )
    )


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


def _constants(cluster: Cluster, at_bound: Sequence[str]) -> str:
    values = [
        *_device_values(cluster.device),
        *(value for link in cluster.links for value in _link_values(link)),
        *((name, f"{value:.4g}") for name, value in cluster.trainer),
    ]
    bound = "at the bound of what is plausible"
    rows = [(name, value, bound if name in at_bound else "") for name, value in values]
    return table(("constant", "value", ""), rows)


def _device_values(device: Device) -> Iterable[tuple[str, str]]:
    for dtype, flops in device.peak_flops:
        yield f"peak_flops.{dtype}", f"{flops / 1e9:.4g} GFLOP/s"
    yield "memory_bandwidth", f"{device.memory_bandwidth / 1e9:.4g} GB/s"
    if device.cores:
        yield "cores", f"{device.cores:.2f}"
    for item in fields(Efficiency):
        value = getattr(device.efficiency, item.name)
        yield item.name, _time(value) if item.name.endswith("_s") else f"{value:.3g}"


def _link_values(link: Link) -> Iterable[tuple[str, str]]:
    yield "link bandwidth", f"{link.bandwidth / 1e9:.4g} GB/s"
    yield "link latency_s", _time(link.latency_s)
    yield "link efficiency", f"{link.efficiency:.3g}"
    yield "link half_bytes", f"{link.half_bytes / 1024:.4g} KiB"


def _link_bounds(found: MachineCalibration) -> list[str]:
    of_links = found.links.at_bound if found.links else ()
    of_steps = found.trainer.at_bound if found.trainer else ()
    return [*(f"link {name}" for name in of_links), *of_steps]


def _rows(
    found: DeviceFit | LinkFit | TrainerFit, name: Callable[[Any], Sequence[object]]
) -> list[tuple[object, ...]]:
    """Return each time behind its name, what the constants make of it, and how far it is off."""
    return [
        (*name(one), _time(one.seconds), _time(one.seconds * (1 + off)), _off(off))
        for one, off in _timed(found)
    ]


def _step_name(one: TimedStep) -> tuple[str]:
    return (f"{plan_label(one.plan)}, width {one.plan.model.hidden}",)


def _summary(found: MachineCalibration) -> list[tuple[object, ...]]:
    by_kind: dict[str, list[float]] = {}
    for one, off in _timed(found.device):
        by_kind.setdefault(type(one.kernel).__name__.lower(), []).append(abs(off))
    if found.links:
        by_kind["collective"] = [abs(off) for off in found.links.errors]
    if found.trainer:
        by_kind["step"] = [abs(off) for off in found.trainer.errors]
    return [
        (kind, len(offs), f"{mean(offs):.0%}", f"{median(offs):.0%}")
        for kind, offs in by_kind.items()
    ]


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.1f} us"
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _off(error: float) -> str:
    return f"{error:+.0%}"
