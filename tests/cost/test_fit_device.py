"""Constants of devices and links that are planted in times are found again, and stay plausible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest

from echelon.core.cluster import Device, Efficiency, Link
from echelon.cost.fit_device import (
    Machine,
    constants,
    fit_device,
    kernel_seconds,
    shapes_of,
    shared_cores,
)
from echelon.cost.fit_links import bus_bytes, collective_seconds, fit_link
from echelon.cost.fit_samples import COLLECTIVES, Collective, Kernel, Product, Timed
from echelon.cost.fit_samples import TimedCollective as Travelled
from echelon.cost.fit_workloads import cpu_workload, gpu_workload, tiny_workload

CPU = Machine(name="core", memory_bytes=2**31, dtype="fp32", asynchronous=False)
GPU = Machine(
    name="card",
    memory_bytes=2**36,
    dtype="bf16",
    asynchronous=True,
    units=100,
    peak_flops=300e12,
    memory_bandwidth=2e12,
)
CORE = Device(
    name="core",
    memory_bytes=2**31,
    memory_bandwidth=2e10,
    peak_flops=(("fp32", 6e10),),
    cores=2.0,
    efficiency=Efficiency(
        matmul=0.85,
        half_depth=20.0,
        tile=16,
        memory=0.6,
        attention=0.3,
        attention_backward=0.25,
        launch_s=8e-6,
        aligned=0.98,
        optimizer=0.45,
    ),
)
CARD = Device(
    name="card",
    memory_bytes=2**36,
    memory_bandwidth=2e12,
    peak_flops=(("bf16", 300e12),),
    efficiency=Efficiency(units=100, tile=128, half_depth=100.0, matmul=0.9, attention=0.55),
)


def _times(
    device: Device, machine: Machine, kernels: Sequence[Kernel], running: int, noise: float = 0.0
) -> list[Timed]:
    bare = [Timed(kernel=kernel, seconds=1.0, running=running) for kernel in kernels]
    seconds = kernel_seconds(
        device, shapes_of(bare), dtype=machine.dtype, asynchronous=machine.asynchronous
    )
    seconds = seconds * np.exp(noise * np.random.default_rng(7).standard_normal(len(bare)))
    return [replace(one, seconds=float(s)) for one, s in zip(bare, seconds, strict=True)]


def test_the_constants_of_a_core_are_found() -> None:
    workload = cpu_workload(0.1)
    timed = _times(CORE, CPU, list(workload.products)[::3], 1)
    timed += _times(CORE, CPU, workload.kernels, 4)
    found = fit_device(replace(CPU, peak_flops=6e10, memory_bandwidth=2e10), timed)
    assert found.device.cores == pytest.approx(2.0)
    for item in fields(Efficiency):
        planted = getattr(CORE.efficiency, item.name)
        assert getattr(found.device.efficiency, item.name) == pytest.approx(planted, rel=0.1), item
    assert max(map(abs, found.errors)) < 0.05
    assert found.device.flops("fp32") == 6e10


def test_the_constants_of_a_gpu_are_found() -> None:
    found = fit_device(GPU, _times(CARD, GPU, gpu_workload(0.1).kernels, 1))
    efficiency = found.device.efficiency
    assert (efficiency.tile, efficiency.units) == (128, 100)
    for name in ("matmul", "half_depth", "memory", "attention", "attention_backward"):
        assert getattr(efficiency, name) == pytest.approx(
            getattr(CARD.efficiency, name), rel=0.1
        ), name
    assert found.device.memory_bytes == 2**36


def test_peaks_that_nobody_states_are_the_best_that_was_measured() -> None:
    timed = _times(CORE, CPU, tiny_workload().kernels, 1)
    device = fit_device(CPU, timed).device
    rates = [one.kernel.flops / one.seconds for one in timed if isinstance(one.kernel, Product)]
    assert device.flops("fp32") == max(rates)


@pytest.mark.parametrize("noise", [0.3, 1.5])
def test_noise_leaves_every_constant_plausible(noise: float) -> None:
    found = fit_device(CPU, _times(CORE, CPU, tiny_workload().kernels, 2, noise))
    for one in constants(CPU):
        value = getattr(found.device.efficiency, one.name)
        assert one.low * 0.999 <= value <= one.high * 1.001
    assert len(found.errors) == len(tiny_workload().kernels)


@pytest.mark.parametrize(
    ("alone", "beside", "cores"), [(1.0, 2.0, 2.0), (1.0, 1.0, 0.0), (1.0, 8.0, 1.0)]
)
def test_how_many_cores_ranks_share(alone: float, beside: float, cores: float) -> None:
    kernel = Product(rows=64, depth=64, columns=64)
    timed = [
        Timed(kernel=kernel, seconds=alone),
        Timed(kernel=kernel, seconds=beside, running=4),
    ]
    assert shared_cores(timed) == cores
    assert shared_cores(timed[:1]) == 0.0


def _travelled(link: Link, noise: float = 0.0) -> list[Travelled]:
    sizes = [4**n * 1024 for n in range(9)]
    bare = [
        Travelled(collective=Collective(kind=kind, degree=degree, num_bytes=size), seconds=1.0)
        for degree, kind, size in product((2, 4, 8), COLLECTIVES, sizes)
    ]
    seconds = collective_seconds(link, bare)
    seconds = seconds * np.exp(noise * np.random.default_rng(3).standard_normal(len(bare)))
    return [replace(one, seconds=float(s)) for one, s in zip(bare, seconds, strict=True)]


LINK = Link(name="wire", degree=8, bandwidth=5e10, latency_s=4e-6, efficiency=0.8, half_bytes=3e5)


def test_the_constants_of_a_link_are_found() -> None:
    found = fit_link(replace(LINK, latency_s=0.0, efficiency=1.0), _travelled(LINK), rated=True)
    assert found.link.bandwidth == 5e10
    assert found.link.efficiency == pytest.approx(0.8, rel=0.02)
    assert found.link.latency_s == pytest.approx(4e-6, rel=0.02)
    assert found.link.half_bytes == pytest.approx(3e5, rel=0.1)
    assert max(map(abs, found.errors)) < 0.02


def test_the_bandwidth_of_an_unknown_link_is_the_best_that_was_measured() -> None:
    timed = _travelled(LINK)
    found = fit_link(replace(LINK, bandwidth=1.0), timed)
    assert found.link.bandwidth == max(bus_bytes(one.collective) / one.seconds for one in timed)
    assert found.link.bandwidth * found.link.efficiency == pytest.approx(4e10, rel=0.05)


def test_a_noisy_link_stays_plausible() -> None:
    link = fit_link(replace(LINK, bandwidth=1.0), _travelled(LINK, 1.0)).link
    assert 0.0 < link.efficiency <= 1.0
    assert link.latency_s > 0.0
    assert link.half_bytes > 0.0
