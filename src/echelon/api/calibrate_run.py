"""`echelon calibrate --from`: a run's events -> its cluster, refined, as a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from echelon.config.cluster_toml import cluster_toml
from echelon.config.new_file import require_writable, write_new
from echelon.core.axis import LOSS_AXES, MESH_AXES, SHARD_AXES, Axis
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError
from echelon.core.event import Event
from echelon.core.mesh import Mesh
from echelon.core.rulebook.observe import RUN_HAS_EVENTS
from echelon.cost.fit_run import COMPUTED, Action, Observed, RunFit, Travel, fit_run
from echelon.cost.fit_samples import Collective, CollectiveKind
from echelon.observe.events import ranks_with_events
from echelon.observe.recorded_steps import ACTION_KINDS, RecordedSteps
from echelon.observe.run_directory import open_run

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
KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
KIND_NAMES: tuple[str, ...] = KINDS
QUARTER = 0
"""Of the times of a collective the lower quartile counts: others wait for a slower rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Give one constant before and after."""

    name: str
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTime:
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
    changes: tuple[Change, ...]
    times: tuple[SeenTime, ...]
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
        raise _no_events(folder, "no action or collective of two steps in its events")
    found = fit_run(plan, observed)
    calibration = RunCalibration(
        run=folder,
        steps=len({number for number, _ in steps}),
        cluster=found.cluster,
        changes=tuple(_changes(plan.cluster, found.cluster)),
        times=tuple(_times(observed, found)),
        out=path,
    )
    about = (f"Refined by `echelon calibrate --from` from {calibration.steps} steps of a run.",)
    write_new(path, cluster_toml(found.cluster, about), key="--out")
    return calibration


def _steps(folder: Path, world: int) -> list[tuple[int, Sequence[Event]]]:
    """Return the events of each rank in each of the last steps but the first."""
    there = set(ranks_with_events(folder))
    if missing := [rank for rank in range(world) if rank not in there]:
        raise _no_events(folder, f"no events of {len(missing)} of its {world} ranks")
    recorded = RecordedSteps(folder, range(world))
    return [
        (number, events)
        for number in recorded.numbers[1:][-STEPS_READ:]
        for events in recorded.read(number).events.values()
    ]


def _observed(mesh: Mesh, steps: Sequence[tuple[int, Sequence[Event]]]) -> Iterator[Observed]:
    actions: dict[Action, list[float]] = {}
    travels: dict[Travel, list[float]] = {}
    for _, events in steps:
        sent = [event for event in events if event.kind in KINDS]
        for event in events:
            if event.kind in ACTION_KINDS and event.stage is not None:
                what = Action(kind=event.kind, stage=event.stage)
                actions.setdefault(what, []).append(_computed_s(event, sent))
        for event in sent:
            if (travel := _travel(mesh, event)) is not None:
                travels.setdefault(travel, []).append(event.end - event.start)
    for what, seconds in actions.items():
        if (usual := median(seconds)) > 0:
            yield Observed(what=what, seconds=usual, count=len(seconds))
    for what, seconds in travels.items():
        if len(seconds) > 1 and (quick := quantiles(seconds, n=4)[QUARTER]) > 0:
            yield Observed(what=what, seconds=quick, count=len(seconds))


def _computed_s(action: Event, sent: Sequence[Event]) -> float:
    """Return the seconds of an action without those in which a collective was under way."""
    waited, free = 0.0, action.start
    inside = (e for e in sent if e.start < action.end and e.end > action.start)
    for event in sorted(inside, key=lambda e: e.start):
        begin, end = max(event.start, free), min(event.end, action.end)
        waited += max(0.0, end - begin)
        free = max(free, end)
    return action.end - action.start - waited


def _travel(mesh: Mesh, event: Event) -> Travel | None:
    """Return the collective of an event; None where it sends nothing, or its group is unlike."""
    axes = AXES.get(event.axis)
    degree = mesh.degree(*axes) if axes else 1
    if axes is None or degree == 1 or event.bytes == 0:
        return None
    kind = KINDS[KIND_NAMES.index(event.kind)]
    share = (degree - 1) / degree * (2 if kind == "all_reduce" else 1)
    inner = MESH_AXES[MESH_AXES.index(axes[-1]) + 1 :]
    return Travel(
        collective=Collective(kind=kind, degree=degree, num_bytes=round(event.bytes / share)),
        stride=mesh.degree(*inner),
        axis=event.axis,
    )


def _changes(before: Cluster, after: Cluster) -> Iterator[Change]:
    for name in (*COMPUTED, "launch_s"):
        old, new = (getattr(one.device.efficiency, name) for one in (before, after))
        yield Change(name=name, before=old, after=new)
    for old_link, new_link in zip(before.links, after.links, strict=True):
        for name in ("latency_s", "efficiency", "half_bytes"):
            old, new = getattr(old_link, name), getattr(new_link, name)
            yield Change(name=f"{old_link.name}: {name}", before=old, after=new)


def _times(observed: Sequence[Observed], found: RunFit) -> Iterator[SeenTime]:
    for one, before, after in zip(observed, found.before, found.after, strict=True):
        yield SeenTime(
            name=one.name, count=one.count, seconds=one.seconds, before=before, after=after
        )


def _no_events(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        RUN_HAS_EVENTS.problem(
            f"{folder} has {why}",
            key="observe.events",
            works=["observe.events = true in a new run"],
        )
    )
