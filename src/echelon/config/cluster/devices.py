# SPDX-License-Identifier: Apache-2.0
"""Devices: which one of the catalogue a driver's name means, and numbers that look wrong.

Numbers of a cluster file may look like another unit: GB for bytes, TFLOP/s for FLOP/s. A device
that the catalogue has by name is held to the catalogue's numbers, any other to what a device can do
at all. `sure = true` in [device] says that a number is meant.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, cast

from echelon.config.presets import Preset, preset_names, read_preset
from echelon.core.cluster import Backend, Device, Efficiency
from echelon.core.messages.names import contains_name
from echelon.core.settings.value_types import toml_text
from echelon.cost.seconds.kernels import replaced_efficiencies

VARIANT = r"-(\d+gb|pcie)$"
"""What stands after a device in the name of a preset: one of its memories, or its board."""
SuspectNumber = tuple[str, str, tuple[str, ...]]
"""A number that looks wrong: its key in [device], why, and what would do in its place."""


def device_preset_from_name(name: str, memory_bytes: int) -> Preset | None:
    """Return the preset of the device that calls itself `name`; None where there is none.

    Of several by the same name it is the one on the same kind of board with the nearest memory.
    """
    words = {preset: re.sub(VARIANT, "", preset) for preset in preset_names("clusters")}
    fits = {
        preset: word
        for preset, word in words.items()
        if contains_name(name, word) and not word.startswith("cpu")
    }
    if not fits:
        return None
    longest = max(map(len, fits.values()))
    pcie = contains_name(name, "pcie")
    found = [
        preset
        for one, word in fits.items()
        if len(word) == longest and (preset := read_preset("clusters", one)) is not None
    ]
    boards = [preset for preset in found if preset.name.endswith("-pcie") == pcie] or found
    return min(boards, key=lambda preset: abs(_memory(preset) - memory_bytes))


@cache
def common_devices() -> tuple[str, ...]:
    """Return the presets of devices that anybody can rent, those to offer first first.

    Why each is one of them stands in `presets/common_devices.toml`.
    """
    text = (files("echelon.config.presets") / "common_devices.toml").read_text("utf-8")
    devices = cast("list[dict[str, str]]", tomllib.loads(text)["device"])
    return tuple(one["preset"] for one in devices)


def device_table(preset: Preset) -> dict[str, Any]:
    """Return what a preset says of its device."""
    return cast("dict[str, Any]", preset.tables["device"])


def _memory(preset: Preset) -> int:
    return cast(int, device_table(preset)["memory_bytes"])


def changed_efficiencies(device: Device, given: Collection[str]) -> Mapping[str, float]:
    """Return the efficiencies that are `given` and predict nothing of our trainer: key, and usual.

    Where kernels were measured, these predict other trainers alone: as the preset of such a device
    has them, they were fitted for that, and a file that was printed is right. Another number is
    somebody's own, meant for our trainer too. The usual one is that of the preset nearest by name.
    """
    presets = (read_preset("clusters", name) for name in preset_names("clusters"))
    tables = [device_table(one) for one in presets if one is not None]
    alike = [one for one in tables if one.get("measured") == device.measured]
    mine = device_preset_from_name(device.name, device.memory_bytes)
    alike.sort(key=lambda one: mine is None or one != device_table(mine))
    found: list[dict[str, float]] = []
    for table in alike:
        fitted = cast("Mapping[str, float]", table.get("efficiency", {}))
        usual = {
            name: float(fitted.get(name, getattr(Efficiency(), name)))
            for name in replaced_efficiencies(device)
            if name in given
        }
        found.append({n: u for n, u in usual.items() if getattr(device.efficiency, n) != u})
    return {} if {} in found or not found else found[0]


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
ABOVE_PEAK = 1.5  # times the catalogue's peak
BELOW_PEAK = 8.0  # times below it
"""The same for a dense peak: sparse matrices are printed with twice of it."""
LEAST_BYTES = 1e6  # bytes
LEAST_RATE = 1e8  # bytes per second
LEAST_FLOPS = 1e8  # FLOP/s
"""Below these no device of any kind is."""
CPU = {"memory_bytes": 64e12, "memory_bandwidth": 4e12, "peak_flops": 1e15}
"""Above these no processor is."""
LONGEST_START = 0.1
"""Seconds that no kernel takes to start."""


def suspect_device_numbers(device: Device, backend: Backend) -> Iterator[SuspectNumber]:
    """Yield the numbers of a device that look like another unit."""
    preset = device_preset_from_name(device.name, device.memory_bytes)
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
        yield _suspect_number(key, value, beside, scales, _guessed(key, usual, backend))
    start = device.efficiency.launch_s
    if start > LONGEST_START:
        limits = (1e-7, 1e-3)
        yield _suspect_number(
            "efficiency.launch_s", start, "kernels start in microseconds", SECONDS, limits
        )


def likely_unit(
    value: float, scales: Scales, limits: tuple[float, float]
) -> tuple[str, float] | None:
    """Return the unit in which a number makes sense, and what it is then."""
    low, high = limits
    found = ((name, value * scale) for scale, name in scales if low <= value * scale <= high)
    return next(found, None)


def _suspect_number(
    key: str, value: float, beside: str, scales: Scales, limits: tuple[float, float]
) -> SuspectNumber:
    meant = likely_unit(value, scales, limits)
    name = key.rpartition(".")[2]
    looks = "" if meant is None else f"; it looks like {meant[0]}"
    suggestions = () if meant is None else (f"{name} = {_text(key, meant[1])}",)
    return f"device.{key}", f"{beside}{looks}", suggestions


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
