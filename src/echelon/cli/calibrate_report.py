"""What `echelon calibrate` prints: the constants that were found, and how far each time is off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

from echelon.cli.output import table
from echelon.core.cluster import Cluster, Device, Efficiency, Link
from echelon.cost.fit_trainer import TrainerFit, words

if TYPE_CHECKING:
    from echelon.api.calibrate_machine import MachineCalibration
    from echelon.api.calibrate_run import RunCalibration
    from echelon.config.times_file import TimesFile


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
    parts = [
        f"{found.cluster.name}, by {found.cluster.backend}\n",
        *_constants(found.cluster, (*found.device.at_bound, *_link_bounds(found))),
        "\nKernels, all ranks at work at once, and what the constants make of them:\n",
        table(("kernel", "ranks", "measured", "predicted", "off"), _kernel_rows(found)),
    ]
    if found.links:
        parts.append("\nCollectives:\n")
        parts.append(table(("collective", "measured", "predicted", "off"), _link_rows(found)))
    if found.trainer:
        parts.append("\nSteps of plans, with what they told of the trainer and the link:\n")
        parts.append(table(("plan", "measured", "predicted", "off"), _step_rows(found.trainer)))
    parts.append("\nTogether:\n")
    parts.append(table(("kind", "times", "mean of |off|", "median"), _summary(found)))
    parts.append(f'\nwritten to {found.out}; use it: --set cluster.file="{found.out}"')
    return "\n".join(parts)


def machine_json(found: MachineCalibration) -> dict[str, object]:
    """Return the same as a JSON object."""
    kernels = zip(found.device.timed, found.device.errors, strict=True)
    links = zip(found.links.timed, found.links.errors, strict=True) if found.links else ()
    trainer = found.trainer
    steps = zip(trainer.timed, trainer.errors, strict=True) if trainer else ()
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
            for one, error in kernels
        ],
        "collectives": [
            {**asdict(one.collective), "seconds": one.seconds, "error": error}
            for one, error in links
        ],
        "steps": [
            {"plan": words(one.plan), "hidden": one.plan.model.hidden, "seconds": one.seconds}
            | {"error": error}
            for one, error in steps
        ],
    }


def run_report(found: RunCalibration) -> str:
    """Return which constants a run changed by how much, and its times before and after."""
    changes = [
        (one.name, f"{one.before:.4g}", f"{one.after:.4g}", _change(one.before, one.after))
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


def _constants(cluster: Cluster, at_bound: Sequence[str]) -> Iterable[str]:
    device = cluster.device
    rows = [(name, value, _meaning(name, at_bound)) for name, value in _device_values(device)]
    for link in cluster.links:
        rows += [(name, value, _meaning(name, at_bound)) for name, value in _link_values(link)]
    rows += [(name, f"{value:.4g}", _meaning(name, at_bound)) for name, value in cluster.trainer]
    yield table(("constant", "value", ""), rows)


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


def _meaning(name: str, at_bound: Sequence[str]) -> str:
    return "at the bound of what is plausible" if name in at_bound else ""


def _link_bounds(found: MachineCalibration) -> list[str]:
    of_links = found.links.at_bound if found.links else ()
    of_steps = found.trainer.at_bound if found.trainer else ()
    return [*(f"link {name}" for name in of_links), *of_steps]


def _kernel_rows(found: MachineCalibration) -> list[tuple[object, ...]]:
    return [
        (one.kernel, one.running, _time(one.seconds), _time(one.seconds * (1 + off)), _off(off))
        for one, off in zip(found.device.timed, found.device.errors, strict=True)
    ]


def _link_rows(found: MachineCalibration) -> list[tuple[object, ...]]:
    assert found.links is not None, "there are collectives to show"
    return [
        (one.collective, _time(one.seconds), _time(one.seconds * (1 + off)), _off(off))
        for one, off in zip(found.links.timed, found.links.errors, strict=True)
    ]


def _step_rows(found: TrainerFit) -> list[tuple[object, ...]]:
    return [
        (
            f"{words(one.plan)}, width {one.plan.model.hidden}",
            _time(one.seconds),
            _time(one.seconds * (1 + off)),
            _off(off),
        )
        for one, off in zip(found.timed, found.errors, strict=True)
    ]


def _summary(found: MachineCalibration) -> list[tuple[object, ...]]:
    by_kind: dict[str, list[float]] = {}
    for one, off in zip(found.device.timed, found.device.errors, strict=True):
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


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.0%}" if before else "new"


def _off(error: float) -> str:
    return f"{error:+.0%}"
