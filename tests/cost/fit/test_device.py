"""Constants of devices and links that are planted in times are found again, and stay plausible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest

from echelon.core.cluster import Device, Efficiency
from echelon.cost.fit.device import (
    UnfittedDevice,
    constants,
    fit_device,
    kernel_seconds,
    shapes_of,
    shared_cores,
)
from echelon.cost.fit.samples import (
    MatmulKernel,
    MeasuredKernel,
    TimedKernel,
    cpu_workload,
    gpu_workload,
)
from tests.cost.fit.tiny_workload import TINY

CPU = UnfittedDevice(name="core", memory_bytes=2**31, dtype="fp32", asynchronous=False)
GPU = UnfittedDevice(
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
    device: Device,
    machine: UnfittedDevice,
    kernels: Sequence[MeasuredKernel],
    running: int,
    noise: float = 0.0,
) -> list[TimedKernel]:
    bare = [TimedKernel(kernel=kernel, seconds=1.0, running=running) for kernel in kernels]
    seconds = kernel_seconds(
        device, shapes_of(bare), dtype=machine.dtype, asynchronous=machine.asynchronous
    )
    seconds = seconds * np.exp(noise * np.random.default_rng(7).standard_normal(len(bare)))
    return [replace(one, seconds=float(s)) for one, s in zip(bare, seconds, strict=True)]


def test_the_constants_of_a_core_are_found() -> None:
    workload = cpu_workload(0.1)
    timed = _times(CORE, CPU, list(workload.matmuls)[::3], 1)
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
    timed = _times(CORE, CPU, TINY.kernels, 1)
    device = fit_device(CPU, timed).device
    rates = [
        one.kernel.flops / one.seconds for one in timed if isinstance(one.kernel, MatmulKernel)
    ]
    assert device.flops("fp32") == max(rates)


@pytest.mark.quick("1.5")
@pytest.mark.parametrize("noise", [0.3, 1.5])
def test_noise_leaves_every_constant_plausible(noise: float) -> None:
    found = fit_device(CPU, _times(CORE, CPU, TINY.kernels, 2, noise))
    for one in constants(CPU):
        value = getattr(found.device.efficiency, one.name)
        assert one.low * 0.999 <= value <= one.high * 1.001
    assert len(found.errors) == len(TINY.kernels)


@pytest.mark.parametrize(
    ("alone", "beside", "cores"), [(1.0, 2.0, 2.0), (1.0, 1.0, 0.0), (1.0, 8.0, 1.0)]
)
def test_how_many_cores_ranks_share(alone: float, beside: float, cores: float) -> None:
    kernel = MatmulKernel(rows=64, depth=64, columns=64)
    timed = [
        TimedKernel(kernel=kernel, seconds=alone),
        TimedKernel(kernel=kernel, seconds=beside, running=4),
    ]
    assert shared_cores(timed) == cores
    assert shared_cores(timed[:1]) == 0.0


def test_what_is_held_out_is_not_fitted_and_its_error_is_told() -> None:
    timed = _times(CORE, CPU, TINY.kernels, 2)
    wrong = [replace(one, seconds=one.seconds / 50, fitted=False) for one in timed[::3]]
    found = fit_device(CPU, [*timed, *wrong])
    assert found.device == fit_device(CPU, timed).device
    assert len(found.errors) == len(timed) + len(wrong)
    assert min(found.errors[len(timed) :]) > 9.0
