# SPDX-License-Identifier: Apache-2.0
"""`ec.calibrate_run`, `ec.calibrate_model`: files of a run's cluster and of a model's units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from echelon.config.cluster.file import cluster_toml
from echelon.config.files.measurements import TimesFile
from echelon.config.files.new_file import require_writable, write_new
from echelon.config.load import load_job
from echelon.config.reading import is_file, is_folder
from echelon.config.rules.finders import require_trainable
from echelon.core.axis import LOSS_AXES, MESH_AXES, SHARD_AXES, Axis
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError
from echelon.core.event import Event
from echelon.core.mesh import Mesh
from echelon.core.optional import optional_package
from echelon.core.rulebook.pipeline import UNIT_TIMES_WRITTEN_ONCE
from echelon.cost.fit.runs import COMPUTED, GroupCollective, ObservedTime, StageAction, fit_run
from echelon.cost.fit.samples import Collective, CollectiveKind
from echelon.launch.host import num_usable_cores
from echelon.telemetry.events import ranks_with_events
from echelon.telemetry.recorded_steps import ACTION_KINDS, RecordedSteps, no_events
from echelon.telemetry.run_directory import open_run

STEPS_READ = 20
"""The last steps of a run, which are taken; its first one warms up and never is."""
AXES: Mapping[str, tuple[Axis, ...]] = {
    "tp": (Axis.TP,),
    "dp": LOSS_AXES,
    "dp_shard": SHARD_AXES,
    "dp_replicate": (Axis.DP_REPLICATE,),
    "world": MESH_AXES,
}
"""Axes of events whose groups are a degree and a stride, and the axes of the mesh in them."""
_FITTED: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
KINDS: Mapping[str, CollectiveKind] = {kind: kind for kind in _FITTED}
QUARTER = 0
"""Of the times of a collective the lower quartile counts: others wait for a slower rank."""

MEASURED_FOR_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantChange:
    """Give one constant before and after."""

    name: str
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionErrors:
    """Give what ranks did, its usual seconds, and how far predictions were and are off."""

    name: str
    count: int
    seconds: float
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCalibration:
    """Hold the refined cluster of a run, which constants changed, and every time."""

    run: Path
    steps: int
    cluster: Cluster
    changes: tuple[ConstantChange, ...]
    times: tuple[PredictionErrors, ...]
    out: Path


def calibrate_run(run: str | Path, *, out: str | Path) -> RunCalibration:
    """Refine the cluster of a run by what its ranks recorded, and write it to `out`.

    Raises ConfigError where `out` is there already, or the run has no events of two steps.
    """
    folder, path = Path(run), Path(out)
    require_writable(path, key="--out")
    plan = open_run(folder).plan()
    steps = _steps(folder, plan.mesh.world_size)
    observed = tuple(_observed(plan.mesh, steps))
    if not observed:
        raise no_events(folder, "no action or collective of two steps in its events")
    found = fit_run(plan, observed)
    calibration = RunCalibration(
        run=folder,
        steps=len({number for number, _ in steps}),
        cluster=found.cluster,
        changes=tuple(_changes(plan.cluster, found.cluster)),
        times=tuple(
            PredictionErrors(
                name=one.name, count=one.count, seconds=one.seconds, before=before, after=after
            )
            for one, before, after in zip(observed, found.before, found.after, strict=True)
        ),
        out=path,
    )
    about = (f"Refined by `echelon calibrate RUN` from {calibration.steps} steps of a run.",)
    write_new(path, cluster_toml(found.cluster, about), key="--out")
    return calibration


def _steps(folder: Path, world: int) -> list[tuple[int, Sequence[Event]]]:
    """Return the events of each rank in each of the last steps but the first."""
    there = set(ranks_with_events(folder))
    if missing := [rank for rank in range(world) if rank not in there]:
        raise no_events(folder, f"no events of {len(missing)} of its {world} ranks")
    recorded = RecordedSteps(folder, range(world))
    return [
        (number, events)
        for number in recorded.numbers[1:][-STEPS_READ:]
        for events in recorded.read(number).events.values()
    ]


def _observed(mesh: Mesh, steps: Sequence[tuple[int, Sequence[Event]]]) -> Iterator[ObservedTime]:
    actions: dict[StageAction, list[float]] = {}
    collectives: dict[GroupCollective, list[float]] = {}
    for _, events in steps:
        sent = [event for event in events if event.kind in KINDS]
        for event in events:
            if event.kind in ACTION_KINDS and event.stage is not None:
                what = StageAction(kind=event.kind, stage=event.stage)
                actions.setdefault(what, []).append(computed_s(event, sent))
        for event in sent:
            if (collective := group_collective(mesh, event)) is not None:
                collectives.setdefault(collective, []).append(event.end - event.start)
    for what, seconds in actions.items():
        if (usual := median(seconds)) > 0:
            yield ObservedTime(operation=what, seconds=usual, count=len(seconds))
    for what, seconds in collectives.items():
        if len(seconds) > 1 and (quick := quantiles(seconds, n=4)[QUARTER]) > 0:
            yield ObservedTime(operation=what, seconds=quick, count=len(seconds))


def computed_s(action: Event, sent: Sequence[Event]) -> float:
    """Return the seconds of an action without those in which a collective was under way."""
    waited, free = 0.0, action.start
    inside = (e for e in sent if e.start < action.end and e.end > action.start)
    for event in sorted(inside, key=lambda e: e.start):
        begin, end = max(event.start, free), min(event.end, action.end)
        waited += max(0.0, end - begin)
        free = max(free, end)
    return action.end - action.start - waited


def group_collective(mesh: Mesh, event: Event) -> GroupCollective | None:
    """Return the collective of an event; None where it sends nothing, or its group is unlike."""
    axes = AXES.get(event.axis)
    degree = mesh.degree(*axes) if axes else 1
    if axes is None or degree == 1 or event.bytes == 0:
        return None
    kind = KINDS[event.kind]
    share = (degree - 1) / degree * (2 if kind == "all_reduce" else 1)
    inner = MESH_AXES[MESH_AXES.index(axes[-1]) + 1 :]
    return GroupCollective(
        collective=Collective(kind=kind, degree=degree, num_bytes=round(event.bytes / share)),
        stride=mesh.degree(*inner),
        axis=event.axis,
    )


def _changes(before: Cluster, after: Cluster) -> Iterator[ConstantChange]:
    for name in (*COMPUTED, "launch_s"):
        old, new = (getattr(one.device.efficiency, name) for one in (before, after))
        yield ConstantChange(name=name, before=old, after=new)
    for old_link, new_link in zip(before.links, after.links, strict=True):
        for name in ("latency_s", "efficiency", "half_bytes"):
            old, new = getattr(old_link, name), getattr(new_link, name)
            yield ConstantChange(name=f"{old_link.name}: {name}", before=old, after=new)


def calibrate_model(
    run: str | Path,
    *,
    settings: Sequence[str] = (),
    out: str | Path,
    seconds: float = MEASURED_FOR_S,
) -> TimesFile:
    """Measure embedding, block and head of a run's model on this machine, and write them to `out`.

    Each is measured on one rank with the threads (on a GPU: the device) that a rank of the run
    would have here. Raises, before anything is measured, ConfigError where the run is wrong or
    `out` is there already or cannot be written, EnvironmentProblem where the run is for GPUs and
    there is none.
    """
    path = Path(out)
    _require_new(path)
    require_writable(path, key="--out")
    job = load_job(run, [*settings, 'pipeline.times="none"'])
    require_trainable(job.plan, job.sources)
    optional_package("torch", extra="train", purpose="measuring a model")
    import torch

    from echelon.launch.process_group import require_devices
    from echelon.launch.room import require_kernels
    from echelon.training.measure.trainer import measure_units

    backend = job.plan.cluster.backend
    require_devices(backend, 1, set_by=job.source_of("cluster.preset"))
    require_kernels(job.plan.layout.kernels, backend, set_by=job.source_of("kernels.provider"))
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, int(num_usable_cores()) // job.plan.mesh.world_size))
    try:
        times = measure_units(job.plan, device, seconds=seconds)
    finally:
        torch.set_num_threads(before)
    write_new(path, times.to_json() + "\n", key="--out")
    return times


def _require_new(path: Path) -> None:
    if not is_file(path) and not is_folder(path):
        return
    first = path / "times.json" if is_folder(path) else path
    others = (first.with_stem(f"{first.stem}-{n}") for n in range(2, 10_000))
    free = next(other for other in (first, *others) if not other.exists())
    what = "is a folder" if is_folder(path) else "is there already"
    raise ConfigError(
        UNIT_TIMES_WRITTEN_ONCE.problem(
            f"{path} {what}, and measured times are never overwritten",
            key="--out",
            set_by=f"--out {path}",
            suggestions=(f"--out {free}",),
        )
    )
