# SPDX-License-Identifier: Apache-2.0
"""Measured kernels -> how near to its peaks a device comes.

Predicted seconds are those of `cost/seconds/kernels.py`, so what is fitted here is what a plan is
timed with. Kernels that several ranks ran at the same time on fewer cores took longer by running /
cores. On a device that runs behind its host a kernel takes at least as long as its start; where the
host computes itself, the start comes on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from echelon.core.cluster import PCIE_4_BYTES_PER_S, Cluster, Device, Efficiency
from echelon.core.plan import DTYPE_BYTES, DType
from echelon.cost.fit.samples import (
    FusedAttentionKernel,
    MatmulKernel,
    MeasuredKernel,
    MemoryKernel,
    OptimizerKernel,
    TimedKernel,
)
from echelon.cost.fit.solver import Array, Constant, ConstantValues, Fit, fit, relative_errors
from echelon.cost.seconds.from_plan import machine_numbers_from_cluster
from echelon.cost.seconds.kernels import matmul_seconds, memory_seconds

TILES = (1, 4, 8, 16, 32, 64, 128, 256)  # rows and columns of a tile
OWN_CORE_SHARE = 0.95
"""Share of its speed that a rank keeps beside others from which on nothing is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfittedDevice:
    """Say what is known of a device before anything is fitted."""

    name: str
    """What it calls itself."""
    memory_bytes: int
    """Bytes of one rank."""
    dtype: DType
    """What it computes in."""
    asynchronous: bool
    """Whether it runs behind its host."""
    units: int = 1
    """Streaming multiprocessors or cores, each with a tile at a time."""
    peak_flops: float | None = None
    """A vendor's FLOP/s; None: the best that was measured."""
    memory_bandwidth: float | None = None
    """A vendor's bytes/s; None: the best that was measured."""
    cores: float | None = None
    """Those that all ranks share; None: kernels timed alone and beside others tell."""
    capability: float = 0.0
    """The compute capability of a GPU; 0: not known."""
    host_bandwidth: float = PCIE_4_BYTES_PER_S
    """A vendor's bytes/s of the link to the host's memory, each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """Hold a device as it was measured, and predicted / measured - 1 of every kernel.

    Errors of kernels that are not `fitted` say how far off it is where nothing was measured.
    """

    device: Device
    timed: tuple[TimedKernel, ...]
    errors: tuple[float, ...]
    at_bound: tuple[str, ...]


def fit_device(machine: UnfittedDevice, timed: Sequence[TimedKernel]) -> DeviceFit:
    """Return the device that the fitted times are nearest to, by every size of tiles."""
    everything, timed = timed, [one for one in timed if one.fitted]
    cores = shared_cores(timed) if machine.cores is None else machine.cores
    start = _start(machine, timed, cores)
    found: list[tuple[float, Device, Fit]] = []
    for tile in TILES if machine.units == 1 else TILES[4:]:
        tried = replace(start, efficiency=replace(start.efficiency, tile=tile))
        one = _fit(machine, tried, timed)
        found.append((float(np.sum(np.log1p(np.abs(one.errors)))), tried, one))
    _, tried, best = min(found, key=lambda triple: triple[0])
    device = _with(tried, best.values)
    predicted = kernel_seconds(
        device, shapes_of(everything), dtype=machine.dtype, asynchronous=machine.asynchronous
    )
    return DeviceFit(
        device=device,
        timed=tuple(everything),
        errors=relative_errors(predicted, [one.seconds for one in everything]),
        at_bound=best.at_bound,
    )


def shared_cores(timed: Sequence[TimedKernel]) -> float:
    """Return how many cores the ranks share, by products timed alone and beside others; 0: none."""
    alone = {one.kernel: one.seconds for one in timed if one.running == 1}
    found = [
        one.running * alone[one.kernel] / one.seconds
        for one in timed
        if one.running > 1 and isinstance(one.kernel, MatmulKernel) and one.kernel in alone
    ]
    most = max((one.running for one in timed), default=1)
    cores = min(median(found), float(most)) if found else float(most)
    return 0.0 if cores >= OWN_CORE_SHARE * most else max(1.0, cores)


def kernel_seconds(device: Device, shapes: _Shapes, *, dtype: DType, asynchronous: bool) -> Array:
    """Return the predicted seconds of kernels on `device`, beside as many as they ran beside."""
    numbers = machine_numbers_from_cluster(_alone(device), dtype)
    size = float(DTYPE_BYTES[dtype])
    each = matmul_seconds(numbers, shapes.rows, shapes.depth, shapes.columns, size)
    products = shapes.batch * each
    peak = numbers.attention_flops
    work = np.where(shapes.rows > 0, products, 0.0)
    work = work + shapes.forward_flops / (peak * numbers.attention)
    work = work + shapes.backward_flops / (peak * numbers.attention_backward)
    work = work + memory_seconds(numbers, shapes.moved_bytes)
    work = work + shapes.update_bytes / (device.memory_bandwidth * device.efficiency.optimizer)
    start_s = device.efficiency.launch_s
    whole = np.maximum(work, start_s) if asynchronous else work + start_s
    share = np.asarray([device.share(running) for running in shapes.running])
    return whole / share


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shapes:
    """Hold the shapes of all kernels, each [kernels]; zeros where a kernel is of another kind."""

    rows: Array
    """Rows m of a product."""
    depth: Array
    """Depth k of a product."""
    columns: Array
    """Columns n of a product."""
    batch: Array
    """Products of a kernel."""
    forward_flops: Array
    """FLOP of attention forward."""
    backward_flops: Array
    """FLOP of attention backward."""
    moved_bytes: Array
    """Bytes that an operator reads and writes."""
    update_bytes: Array
    """Bytes that an update reads and writes."""
    running: tuple[int, ...]
    """Kernels that ran at the same time."""


def shapes_of(timed: Sequence[TimedKernel]) -> _Shapes:
    """Return the shapes of measured kernels."""
    kernels = [one.kernel for one in timed]

    def each(number: Callable[[MeasuredKernel], float]) -> Array:
        return np.asarray([number(kernel) for kernel in kernels], dtype=np.float64)

    def flops(kernel: MeasuredKernel, *, backward: bool) -> float:
        if isinstance(kernel, FusedAttentionKernel) and kernel.backward == backward:
            return kernel.flops
        return 0.0

    return _Shapes(
        rows=each(lambda k: k.rows if isinstance(k, MatmulKernel) else 0.0),
        depth=each(lambda k: k.depth if isinstance(k, MatmulKernel) else 1.0),
        columns=each(lambda k: k.columns if isinstance(k, MatmulKernel) else 1.0),
        batch=each(lambda k: k.batch if isinstance(k, MatmulKernel) else 0.0),
        forward_flops=each(lambda k: flops(k, backward=False)),
        backward_flops=each(lambda k: flops(k, backward=True)),
        moved_bytes=each(lambda k: k.num_bytes if isinstance(k, MemoryKernel) else 0.0),
        update_bytes=each(lambda k: k.num_bytes if isinstance(k, OptimizerKernel) else 0.0),
        running=tuple(one.running for one in timed),
    )


def _start(machine: UnfittedDevice, timed: Sequence[TimedKernel], cores: float) -> Device:
    """Return the device with its peaks: the vendor's, or the best of what was measured."""
    bare = Device(name=machine.name, memory_bytes=1, memory_bandwidth=1.0, cores=cores)

    def alone_s(one: TimedKernel) -> float:
        return one.seconds * bare.share(one.running)

    flops = [
        one.kernel.flops / alone_s(one) for one in timed if isinstance(one.kernel, MatmulKernel)
    ]
    moves = [(one.kernel.num_bytes, one) for one in timed if isinstance(one.kernel, MemoryKernel)]
    # On a GPU what is small stays in a cache or waits for its start; on a core it sets the peak.
    least = max(size for size, _ in moves) if machine.asynchronous else 0
    moved = [size / alone_s(one) for size, one in moves if size >= least]
    return replace(
        bare,
        memory_bytes=machine.memory_bytes,
        memory_bandwidth=machine.memory_bandwidth or max(moved),
        host_bandwidth=machine.host_bandwidth,
        peak_flops=((machine.dtype, machine.peak_flops or max(flops)),),
        efficiency=Efficiency(units=machine.units),
        capability=machine.capability,
    )


def _fit(machine: UnfittedDevice, device: Device, timed: Sequence[TimedKernel]) -> Fit:
    shapes = shapes_of(timed)

    def predict(values: ConstantValues) -> Array:
        tried = _with(device, values)
        return kernel_seconds(tried, shapes, dtype=machine.dtype, asynchronous=machine.asynchronous)

    return fit(constants(machine), predict, [one.seconds for one in timed])


def constants(machine: UnfittedDevice) -> tuple[Constant, ...]:
    """Return what is fitted of a device, with its bounds and priors."""
    start_s = 5e-6 if machine.asynchronous else 10e-6
    return (
        Constant(name="matmul", low=0.02, high=1.0, prior=0.8, width=0.4),
        Constant(name="half_depth", low=0.5, high=2048.0, prior=48.0, width=1.0),
        Constant(name="memory", low=0.02, high=1.0, prior=0.7, width=0.7),
        Constant(name="attention", low=0.01, high=1.0, prior=0.4, width=1.0),
        Constant(name="attention_backward", low=0.01, high=1.0, prior=0.35, width=1.0),
        Constant(name="launch_s", low=2e-7, high=5e-3, prior=start_s, width=1.5),
        Constant(name="aligned", low=0.7, high=1.0, prior=0.97, width=0.1),
        Constant(name="optimizer", low=0.01, high=1.0, prior=0.6, width=1.0),
    )


def _with(device: Device, values: Mapping[str, float]) -> Device:
    return replace(device, efficiency=replace(device.efficiency, **values))


def _alone(device: Device) -> Cluster:
    return Cluster(name="one", device=device, devices_per_node=1, nodes=1, links=())
