# SPDX-License-Identifier: Apache-2.0
"""`ec.calibrate_machine`: what the machine at hand does, measured, as a cluster file.

Ranks are started here, or are those of all nodes that torchrun started. Each measurement is written
at once, so that a calibration that was interrupted goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from echelon.api.calibrating.measuring import Measuring, StepMeasurement, measure_trainer
from echelon.api.calibrating.place import (
    JobRanks,
    MeasuredPlace,
    place_here,
    place_of_launch,
    require_ranks_of_launch,
)
from echelon.config.cluster.file import CalibrationRecord, cluster_toml
from echelon.config.files.measurements import (
    num_measurements,
    unfinished_file,
    unfinished_measurements,
)
from echelon.config.files.new_file import require_writable, write_new
from echelon.core.cluster import Cluster, Link
from echelon.core.optional import optional_package
from echelon.core.version import __version__
from echelon.cost.fit.device import DeviceFit, fit_device
from echelon.cost.fit.links import LinkFit, fit_last_tier, fit_link
from echelon.cost.fit.runs import TrainerFit
from echelon.cost.fit.samples import (
    FusedAttentionKernel,
    MatmulKernel,
    MemoryKernel,
    OptimizerKernel,
    TimedCollective,
    Workload,
    cpu_workload,
    gpu_workload,
)

if TYPE_CHECKING:
    from echelon.launch.launched.jobs import LaunchedPool

EVERY_STEP = StepMeasurement()
WINDOW_S = 0.25
"""Seconds in which a kernel or collective is run again and again: under three minutes in all."""
QUIET_S = 600.0
"""Seconds for which a rank may be quiet: one fits the constants while the others wait."""
KERNELS = {
    "products": MatmulKernel,
    "attention": FusedAttentionKernel,
    "memory": MemoryKernel,
    "optimizer": OptimizerKernel,
}
"""Kernels of which sizes are held out, by their names in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCalibration:
    """Hold a cluster as it was measured, and how far the fitted constants are from each time.

    `rank` is 0 but under torchrun, where every process has its own.
    """

    cluster: Cluster
    device: DeviceFit
    links: LinkFit | None
    network: LinkFit | None
    trainer: TrainerFit | None
    record: CalibrationRecord
    out: Path
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Say what is to be measured, into which file, and who is told of it."""

    out: Path
    window_s: float
    workload: Workload | None
    steps: StepMeasurement | None
    say: Callable[[str], None]


def calibrate_machine(
    *,
    out: str | Path,
    ranks: int | None = None,
    window_s: float = WINDOW_S,
    workload: Workload | None = None,
    steps: StepMeasurement | None = EVERY_STEP,
    say: Callable[[str], None] = lambda _: None,
) -> MachineCalibration:
    """Measure kernels and collectives on this machine, fit a cluster to them, write it to `out`.

    `ranks` run at the same time, by default one on each GPU, or on each core; under torchrun all
    that it started, and links between nodes are measured too. On processors, `steps` of small plans
    are measured (None: they are not). What an interrupted call with this `out` has measured is
    taken. Raises ConfigError, before anything is measured, where `out` is there already, there
    cannot be so many ranks, or what is unfinished is of another machine.
    """
    wanted = _Wanted(out=Path(out), window_s=window_s, workload=workload, steps=steps, say=say)
    optional_package("torch", extra="train", purpose="measuring a machine")
    from echelon.launch.environment import is_launched
    from echelon.launch.local.supervisor import RankPool

    if is_launched():
        return _calibrate_joined(wanted, ranks)
    require_writable(wanted.out, key="--out")
    place = place_here(ranks)
    # What is unfinished is looked at before a process starts: ranks start with the first job.
    with RankPool(place.ranks, backend=place.backend) as pool:
        return _calibrate(pool, place, wanted)


def _calibrate_joined(wanted: _Wanted, ranks: int | None) -> MachineCalibration:
    """Measure with the ranks of a launch, of which this process is one."""
    import torch

    from echelon.launch.environment import read_launched_rank, read_node_size
    from echelon.launch.launched.jobs import run_launched_jobs, tell_place
    from echelon.launch.local.messages import Limits
    from echelon.launch.local.supervisor import LaunchOptions

    world = read_launched_rank().world_size
    require_ranks_of_launch(ranks, read_node_size())

    def drive(pool: LaunchedPool) -> MachineCalibration:
        require_writable(wanted.out, key="--out")
        return _calibrate(pool, place_of_launch(pool.run(tell_place, None, world)), wanted)

    outcome = run_launched_jobs(
        drive,
        {"calibrate": str(wanted.out), "window_s": wanted.window_s},
        labels=[""] * world,
        options=LaunchOptions(
            backend="nccl" if torch.cuda.is_available() else "gloo", limits=Limits(step_s=QUIET_S)
        ),
    )
    return replace(outcome.require()[0], rank=outcome.rank)


def _calibrate(ranks: JobRanks, place: MeasuredPlace, wanted: _Wanted) -> MachineCalibration:
    workload = wanted.workload
    if workload is None:
        workload = (cpu_workload if place.backend == "gloo" else gpu_workload)(wanted.window_s)
    with unfinished_measurements(wanted.out, place.facts(workload.window_s)) as done:
        if done.found:
            wanted.say(f"{done.journal.path.name}: going on after {len(done.found)} measurements")
        measuring = Measuring(
            ranks=ranks, place=place, workload=workload, done=done, say=wanted.say
        )
        try:
            found = _measured(measuring, wanted)
        except BaseException:
            path = unfinished_file(wanted.out)
            if kept := num_measurements(path):
                told = f"{kept} measurements are kept in {path.name}"
                wanted.say(f"{told}: the same command goes on there")
            raise
        write_new(wanted.out, cluster_toml(found.cluster, ABOUT, found.record), key="--out")
        done.finish()
    return found


def _measured(measuring: Measuring, wanted: _Wanted) -> MachineCalibration:
    """Return what all measurements tell."""
    place, say = measuring.place, wanted.say
    timed = measuring.kernels()
    inside, between = measuring.collectives()
    say("fitting")
    device = fit_device(place.machine, timed)
    cluster, links, network = _joined(place, device, inside, between)
    trainer: TrainerFit | None = None
    if place.backend == "gloo" and wanted.steps is not None:
        trainer = measure_trainer(measuring.ranks, cluster, wanted.steps, measuring.done, say)
        cluster = trainer.cluster
    fits = {"collectives": links, "network": network, "steps": trainer}
    held_out = [*_kernel_errors(device), *_held_out_errors(fits)]
    return MachineCalibration(
        cluster=cluster,
        device=device,
        links=links,
        network=network,
        trainer=trainer,
        record=_record(place, held_out),
        out=wanted.out,
    )


def _joined(
    place: MeasuredPlace,
    device: DeviceFit,
    inside: list[TimedCollective],
    between: list[TimedCollective],
) -> tuple[Cluster, LinkFit | None, LinkFit | None]:
    """Return the cluster of a device and the links that collectives tell of, and their fits."""
    gloo, total = place.backend == "gloo", place.ranks * place.nodes
    links: LinkFit | None = None
    network: LinkFit | None = None
    if inside:
        name = "Gloo on one host" if gloo else "NCCL inside of a node"
        start = Link(name=name, degree=place.ranks, bandwidth=1.0, latency_s=0.0)
        links = fit_link(start, inside, cores=device.device.cores)
    cluster = Cluster(
        name=f"{total}x {device.device.name}",
        device=device.device,
        devices_per_node=place.ranks,
        nodes=place.nodes,
        links=(links.link,) if links else (),
        backend=place.backend,
    )
    if between:
        name = "Gloo between hosts" if gloo else "NCCL between nodes"
        start = Link(name=name, degree=total, bandwidth=1.0, latency_s=0.0)
        network = fit_last_tier(replace(cluster, links=(*cluster.links, start)), between)
        cluster = replace(cluster, links=(*cluster.links, network.link))
    return cluster, links, network


def _kernel_errors(device: DeviceFit) -> Iterator[tuple[str, float]]:
    timed = list(zip(device.timed, device.errors, strict=True))
    for name, kind in KERNELS.items():
        held = [abs(off) for one, off in timed if not one.fitted and isinstance(one.kernel, kind)]
        if held:
            yield name, mean(held)


def _held_out_errors(fits: dict[str, LinkFit | TrainerFit | None]) -> Iterator[tuple[str, float]]:
    for name, found in fits.items():
        if found is None:
            continue
        held = [
            abs(off) for one, off in zip(found.timed, found.errors, strict=True) if not one.fitted
        ]
        if held:
            yield name, mean(held)


def _record(place: MeasuredPlace, held_out: Iterable[tuple[str, float]]) -> CalibrationRecord:
    import torch

    return CalibrationRecord(
        date=datetime.now(UTC).date().isoformat(),
        torch=str(torch.__version__),
        echelon=__version__,
        nodes=place.nodes,
        ranks_per_node=place.ranks,
        held_out=tuple(held_out),
    )


ABOUT = (
    "Measured by `echelon calibrate`. Peaks are a vendor's where the device is known, else the",
    "best that was reached; shares are fitted, inside of their bounds. [calibration.held_out] has",
    "the mean error at sizes that were measured and not fitted.",
)
