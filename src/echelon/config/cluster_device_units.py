"""Numbers of a cluster file that look like another unit: GB for bytes, TFLOP/s for FLOP/s.

A device that the catalogue has by name is held to the catalogue's numbers, any other to what a
device can do at all. `sure = true` in [device] says that a number is meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from echelon.config.cluster_devices import device_table, known_device
from echelon.config.kinds import toml_text
from echelon.config.presets import preset_names, read_preset
from echelon.core.cluster import Backend, Device

Scales = Sequence[tuple[float, str]]

BYTES: Scales = ((1e9, "GB"), (2**20, "MiB"), (1e6, "MB"), (1e12, "TB"), (2**10, "KiB"))
BITS: Scales = ((1 / 8, "bits"),)
RATES: Scales = ((1e9, "GB/s"), (1e12, "TB/s"), (1e6, "MB/s"), (1 / 8, "bits per second"))
FLOPS: Scales = (
    (0.5, "the rate of sparse matrices, twice the dense one"),
    (1e12, "TFLOP/s"),
    (1e15, "PFLOP/s"),
    (1e3, "a number with 1e9 for 1e12"),
    (1e-3, "a number with 1e15 for 1e12"),
)
SECONDS: Scales = ((1e-6, "microseconds"), (1e-3, "milliseconds"), (1e-9, "nanoseconds"))

NEAR = 4.0
"""How far from the catalogue's number of its name a memory or a bandwidth may be."""
ABOVE_PEAK, BELOW_PEAK = 1.5, 8.0
"""The same for a dense peak: sparse matrices are printed with twice of it."""
LEAST_BYTES, LEAST_RATE, LEAST_FLOPS = 1e6, 1e8, 1e8
"""Below these no device of any kind is."""
CPU = {"memory_bytes": 64e12, "memory_bandwidth": 4e12, "peak_flops": 1e15}
"""Above these no processor is."""
LONGEST_START = 0.1
"""Seconds that no kernel takes to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Hold a number that looks wrong: its key in [device], why, and what would do in its place."""

    key: str
    why: str
    works: tuple[str, ...] = ()


def device_doubts(device: Device, backend: Backend) -> Iterator[Doubt]:
    """Yield the numbers of a device that look like another unit."""
    preset = known_device(device.name, device.memory_bytes)
    table = {} if preset is None else device_table(preset)
    numbers: list[tuple[str, float, Scales]] = [
        ("memory_bytes", float(device.memory_bytes), (*BYTES, *BITS)),
        ("memory_bandwidth", device.memory_bandwidth, RATES),
        *((f"peak_flops.{dtype}", flops, FLOPS) for dtype, flops in device.peak_flops),
    ]
    for key, value, scales in numbers:
        usual = _number(table, key)
        low, high = _limits(key, usual, backend)
        if low <= value <= high:
            continue
        if usual is not None:
            beside = f"{table['name']} has {_plain(usual)}"
        else:
            beside = (
                f"none has less than {_plain(low)}"
                if value < low
                else f"none has more than {_plain(high)}"
            )
        yield _doubt(key, value, beside, scales, _guessed(key, usual, backend))
    start = device.efficiency.launch_s
    if start > LONGEST_START:
        limits = (1e-7, 1e-3)
        yield _doubt("efficiency.launch_s", start, "kernels start in microseconds", SECONDS, limits)


def read_as(value: float, scales: Scales, limits: tuple[float, float]) -> tuple[str, float] | None:
    """Return the unit in which a number makes sense, and what it is then."""
    low, high = limits
    found = ((name, value * scale) for scale, name in scales if low <= value * scale <= high)
    return next(found, None)


def _doubt(
    key: str, value: float, beside: str, scales: Scales, limits: tuple[float, float]
) -> Doubt:
    meant = read_as(value, scales, limits)
    name = key.rpartition(".")[2]
    return Doubt(
        key=f"device.{key}",
        why=f"{beside}" + ("" if meant is None else f"; it looks like {meant[0]}"),
        works=() if meant is None else (f"{name} = {_text(key, meant[1])}",),
    )


def _limits(key: str, usual: float | None, backend: Backend) -> tuple[float, float]:
    """Return the least and the most that is not questioned."""
    field = key.partition(".")[0]
    if usual is not None:
        flops = field == "peak_flops"
        return usual / (BELOW_PEAK if flops else NEAR), usual * (ABOVE_PEAK if flops else NEAR)
    least = {"memory_bytes": LEAST_BYTES, "memory_bandwidth": LEAST_RATE}.get(field, LEAST_FLOPS)
    if backend == "gloo":
        return least, CPU[field]
    return least, NEAR * (_range_of(key) or _range_of("peak_flops.fp16") or (0.0, 0.0))[1]


def _guessed(key: str, usual: float | None, backend: Backend) -> tuple[float, float]:
    """Return between which numbers one is taken for what was meant."""
    if usual is not None:
        return _limits(key, usual, backend)
    if backend == "gloo":
        field = key.partition(".")[0]
        return {"memory_bytes": 2.0**28, "memory_bandwidth": 1e9}.get(field, 1e9), CPU[field]
    low, high = _range_of(key) or _range_of("peak_flops.fp16") or (0.0, 0.0)
    return low / NEAR, high * NEAR


@cache
def _range_of(key: str) -> tuple[float, float] | None:
    """Return the least and the most that an accelerator of the catalogue has of something."""
    presets = (read_preset("clusters", name) for name in preset_names("clusters"))
    tables = [
        device_table(preset)
        for preset in presets
        if preset is not None and preset.tables["backend"] == "nccl"
    ]
    found = [number for table in tables if (number := _number(table, key)) is not None]
    return (min(found), max(found)) if found else None


def _number(table: Mapping[str, Any], key: str) -> float | None:
    field, _, dtype = key.partition(".")
    peaks = cast("Mapping[str, float]", table.get("peak_flops", {}))
    return peaks.get(dtype) if dtype else cast("float | None", table.get(field))


def _text(key: str, number: float) -> str:
    return toml_text(round(number)) if key == "memory_bytes" else _plain(number)


def _plain(number: float) -> str:
    return f"{number:.6g}".replace("e+", "e")
