"""`ec.calibrate_machine`: what the machine at hand does, measured, as a cluster file."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from echelon.api.calibrating.trainer import StepMeasurement, measure_trainer
from echelon.config.cluster.devices import device_preset_from_name, device_table
from echelon.config.cluster.file import cluster_toml
from echelon.config.files.new_file import require_writable, write_new
from echelon.core.cluster import Backend, Cluster, Link
from echelon.core.errors import ConfigError
from echelon.core.optional import optional_package
from echelon.core.plan import DType
from echelon.core.rulebook.cluster import RANKS_TO_CALIBRATE
from echelon.cost.fit.device import DeviceFit, UnfittedDevice, fit_device
from echelon.cost.fit.links import LinkFit, fit_link
from echelon.cost.fit.samples import (
    COLLECTIVES,
    Collective,
    MatmulKernel,
    MeasuredKernel,
    TimedCollective,
    TimedKernel,
    Workload,
    cpu_workload,
    gpu_workload,
)
from echelon.cost.fit.trainer import TrainerFit
from echelon.launch.host import first_words, num_usable_cores, total_memory_bytes

if TYPE_CHECKING:
    from echelon.launch.local.pool import RankPool

EVERY_STEP = StepMeasurement()
WINDOW_S = 0.25
"""Seconds in which a kernel or collective is run again and again: under three minutes in all."""
JOB_TIMEOUT_S = 1800.0
MOST_RANKS = 64  # ranks
LEAST_ALONE_FLOPS = 1e6
"""FLOPs of a product from which on running it alone tells how many cores ranks share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCalibration:
    """Hold a cluster as it was measured, and how far the fitted constants are from each time."""

    cluster: Cluster
    device: DeviceFit
    links: LinkFit | None
    trainer: TrainerFit | None
    out: Path


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

    `ranks` run at the same time, by default one on each GPU, or on each core. On processors,
    `steps` of small plans are measured too (None: they are not). Raises ConfigError,
    before anything is measured, where `out` is there already or there cannot be so many ranks.
    """
    path = Path(out)
    require_writable(path, key="--out")
    optional_package("torch", extra="train", purpose="measuring a machine")
    from echelon.launch.local.pool import RankPool

    place = _here(ranks)
    if workload is None:
        workload = (cpu_workload if place.backend == "gloo" else gpu_workload)(window_s)
    with RankPool(place.ranks, backend=place.backend) as pool:
        timed = _measure_kernels(pool, place, workload, say)
        collectives = _measure_collectives(pool, place, workload, say)
        say("fitting")
        cluster, device, links = _fitted(place, timed, collectives)
        trainer: TrainerFit | None = None
        if place.backend == "gloo" and steps is not None:
            trainer = measure_trainer(pool, cluster, steps, say)
            cluster = trainer.cluster
    write_new(path, cluster_toml(cluster, _about(device, links, trainer)), key="--out")
    return MachineCalibration(
        cluster=cluster, device=device, links=links, trainer=trainer, out=path
    )


def _fitted(
    place: _MeasuredMachine, timed: list[TimedKernel], collectives: list[TimedCollective]
) -> tuple[Cluster, DeviceFit, LinkFit | None]:
    """Return the cluster that kernels and collectives tell of, and how far off it is."""
    device = fit_device(place.machine, timed)
    links: LinkFit | None = None
    if collectives:
        name = "Gloo on one host" if place.backend == "gloo" else "NCCL inside of a node"
        start = Link(name=name, degree=place.ranks, bandwidth=1.0, latency_s=0.0)
        links = fit_link(start, collectives, cores=device.device.cores)
    cluster = Cluster(
        name=f"{place.ranks}x {device.device.name}",
        device=device.device,
        devices_per_node=place.ranks,
        nodes=1,
        links=(links.link,) if links else (),
        backend=place.backend,
    )
    return cluster, device, links


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredMachine:
    """Say what is measured here: how many ranks of what, with how many threads each."""

    machine: UnfittedDevice
    ranks: int
    threads: int
    backend: Backend
    dtype: DType


def _here(ranks: int | None) -> _MeasuredMachine:
    import torch

    if torch.cuda.is_available():
        return _gpus(ranks, torch.cuda.device_count(), torch.cuda.get_device_properties(0))
    cores = num_usable_cores()
    wanted = max(1, round(cores)) if ranks is None else _checked(ranks, MOST_RANKS, "ranks")
    threads = max(1, int(cores) // wanted)
    machine = UnfittedDevice(
        name=_cpu_name(),
        memory_bytes=total_memory_bytes() // wanted,
        dtype="fp32",
        asynchronous=False,
        cores=(cores if cores < wanted else 0.0) if threads == 1 else None,
    )
    return _MeasuredMachine(
        machine=machine, ranks=wanted, threads=threads, backend="gloo", dtype="fp32"
    )


def _gpus(ranks: int | None, there: int, properties: Any) -> _MeasuredMachine:
    dtype: DType = "bf16" if properties.major >= 8 else "fp16"
    preset = device_preset_from_name(properties.name, properties.total_memory)
    device = device_table(preset) if preset else {}
    machine = UnfittedDevice(
        name=properties.name,
        memory_bytes=properties.total_memory,
        dtype=dtype,
        asynchronous=True,
        units=properties.multi_processor_count,
        peak_flops=device.get("peak_flops", {}).get(dtype),
        memory_bandwidth=device.get("memory_bandwidth"),
    )
    wanted = there if ranks is None else _checked(ranks, there, "GPUs")
    return _MeasuredMachine(machine=machine, ranks=wanted, threads=1, backend="nccl", dtype=dtype)


def _checked(ranks: int, most: int, what: str) -> int:
    if 1 <= ranks <= most:
        return ranks
    raise ConfigError(
        RANKS_TO_CALIBRATE.problem(
            f"--ranks {ranks}: this machine is measured with 1 to {most} {what}",
            key="--ranks",
            set_by=f"--ranks {ranks}",
            suggestions=sorted({1, most}),
        )
    )


def _measure_kernels(
    pool: RankPool, place: _MeasuredMachine, workload: Workload, say: Callable[[str], None]
) -> list[TimedKernel]:
    from echelon.training.measure.kernels import KernelJob, measure_kernels

    def share(ranks: int) -> float:
        # A rank's own seconds are those that it would take with a core of its own.
        return min(1.0, place.machine.cores / ranks) if place.machine.cores else 1.0

    def run(kernels: Sequence[MeasuredKernel], ranks: int) -> list[TimedKernel]:
        job = KernelJob(
            kernels=kernels, dtype=place.dtype, window_s=workload.window_s, threads=place.threads
        )
        found = pool.run(measure_kernels, job, ranks, timeout_s=JOB_TIMEOUT_S)
        means = [sum(each) / ranks / share(ranks) for each in zip(*found, strict=True)]
        return [
            TimedKernel(kernel=kernel, seconds=seconds, running=ranks)
            for kernel, seconds in zip(kernels, means, strict=True)
        ]

    alone: list[TimedKernel] = []
    if place.ranks > 1 and place.backend == "gloo" and place.machine.cores is None:
        large = [one for one in workload.matmuls if one.flops >= LEAST_ALONE_FLOPS]
        few: list[MatmulKernel] = (large or list(workload.matmuls))[::3]
        say(f"measuring {len(few)} products on one rank")
        alone = run(few, 1)
    say(f"measuring {len(workload.kernels)} kernels on {place.ranks} ranks at once")
    return alone + run(workload.kernels, place.ranks)


def _measure_collectives(
    pool: RankPool, place: _MeasuredMachine, workload: Workload, say: Callable[[str], None]
) -> list[TimedCollective]:
    from echelon.training.measure.collectives import CollectiveJob, measure_collectives

    degrees = sorted({n for n in (2, 4, 8, 16, 32, place.ranks) if 2 <= n <= place.ranks})
    wanted = [
        Collective(kind=kind, degree=degree, num_bytes=size)
        for degree in degrees
        for kind in COLLECTIVES
        for size in workload.sizes
    ]
    if not wanted:
        return []
    say(f"measuring {len(wanted)} collectives of {', '.join(map(str, degrees))} ranks")
    job = CollectiveJob(collectives=wanted, window_s=workload.window_s, threads=place.threads)
    found = pool.run(measure_collectives, job, place.ranks, timeout_s=JOB_TIMEOUT_S)[0]
    return [
        TimedCollective(collective=one, seconds=seconds)
        for one, seconds in zip(wanted, found, strict=True)
    ]


def _about(device: DeviceFit, links: LinkFit | None, trainer: TrainerFit | None) -> list[str]:
    """Return the comment above a measured cluster."""

    def off(fit: DeviceFit | LinkFit | TrainerFit) -> str:
        return f"{mean(map(abs, fit.errors)):.0%} of {len(fit.errors)}"

    return [
        "Measured by `echelon calibrate`. Peaks are a vendor's where the device is known, else the",
        "best that was reached; shares are fitted, inside of their bounds. Mean error of the fit:",
        f"kernels {off(device)}," + (f" collectives {off(links)}," if links else ""),
        *([f"steps of plans {off(trainer)}."] if trainer else []),
    ]


def _cpu_name() -> str:
    words = first_words(Path("/proc/cpuinfo"))
    if "name" in words:
        named = words[words.index("name") + 2 :]
        end = next((i for i, word in enumerate(named) if word in ("stepping", "cpu")), 0)
        if 0 < end < 12:
            return " ".join(named[:end])
    return platform.processor() or "CPU core"
