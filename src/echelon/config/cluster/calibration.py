# SPDX-License-Identifier: Apache-2.0
"""The [calibration] table of a cluster file: when and with what it was measured, how far off it is.

It tells whoever is given the file, and `echelon calibrate merge`, what it is. No formula reads it;
the band of a step is as wide as the error of steps that were measured and not fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

from echelon.config.reading import read_toml
from echelon.core.errors import Problem
from echelon.core.settings.value_types import COUNT, Real, Text, ValueType, toml_text

TABLE = "calibration"
HELD_OUT = (
    "products",
    "attention",
    "memory",
    "optimizer",
    "collectives",
    "network",
    "steps",
)
"""What sizes are held out of: kernels, collectives in a node and between nodes, steps of plans."""
HELD_OUT_STEPS = f"{TABLE}.held_out.steps"
"""The error that bands rest on."""
CALIBRATION_SETTINGS: Mapping[str, tuple[ValueType, object]] = {
    f"{TABLE}.date": (Text(), "unknown"),
    f"{TABLE}.torch": (Text(), "unknown"),
    f"{TABLE}.echelon": (Text(), "unknown"),
    f"{TABLE}.nodes": (COUNT, 1),
    f"{TABLE}.ranks_per_node": (COUNT, 1),
    f"{TABLE}.merged": (COUNT, 1),
    **{f"{TABLE}.held_out.{name}": (Real(), "unknown") for name in HELD_OUT},
}
"""The settings of the table; an unknown error is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """Say when a cluster was measured, by which versions, on how many ranks, and how far it is off.

    `held_out` are means of |predicted / measured - 1| over sizes that were not fitted, by kind. Of
    several `merged` calibrations it has the latest date and the largest errors.
    """

    date: str
    torch: str
    echelon: str
    nodes: int
    ranks_per_node: int
    merged: int = 1
    held_out: tuple[tuple[str, float], ...] = ()


def calibration_lines(record: CalibrationRecord) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"[{TABLE}]"
    for item in fields(CalibrationRecord):
        value = getattr(record, item.name)
        if item.name != "held_out" and value != item.default:
            yield f"{item.name} = {toml_text(value)}"
    if record.held_out:
        yield from ("", f"[{TABLE}.held_out]")
        yield from (f"{name} = {round(error, 4)}" for name, error in record.held_out)


def read_calibration(path: Path) -> CalibrationRecord | None:
    """Return the record of a file that is a cluster's; None where nothing measured it."""
    read = read_toml(path, str(path))
    table = None if isinstance(read, Problem) else read[0].get(TABLE)
    if not isinstance(table, dict):
        return None
    entries = cast("dict[str, object]", table)
    names = {item.name for item in fields(CalibrationRecord)} - {"held_out"}
    values: dict[str, object] = {
        name: entries.get(name, CALIBRATION_SETTINGS[f"{TABLE}.{name}"][1]) for name in names
    }
    errors = cast("dict[str, float]", entries.get("held_out", {}))
    held_out = tuple((name, float(errors[name])) for name in HELD_OUT if name in errors)
    return CalibrationRecord(**values, held_out=held_out)  # type: ignore[arg-type]
