"""Quantiles of measured / predicted over runs that were left out, as a module of the package.

Four of five runs lie between the tenths at both ends. A publisher with many runs counts as the root
of their number, so that one long sweep does not speak for all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from math import ceil, log
from pathlib import Path
from typing import Any

import numpy as np

import echelon
from bench.accuracy.residuals import LeftOut
from echelon.planner.predict.bands import ALLOCATORS, NEAR
from echelon.planner.predict.nearest_run import FILE, MeasuredRun, power_of_two

PREDICT = Path(echelon.__file__).parent / "planner" / "predict"
MODULE = PREDICT / "residuals.py"
MEASURED = PREDICT / FILE
SHARE = 0.8
"""The share of runs in a band."""
HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""How far off runs are that were not fitted: four in five are no farther.

Written by `python -m bench.accuracy.residuals --write LEFT.csv` from runs that the same command
left out of its fits. STEP: of dense models and of mixtures of experts, by trainer and device, how
far the logarithm of a step's seconds is off where a run's publisher was left out; LEFT_OUT: where
its trainer was, or its device. HELD: between which factors bytes lie that are not counted. PAIRS:
by how much the ratio of two plans' seconds is off, in logarithms, where predictions are near and
where they are far. `planner/predict/bands.py` reads this.
"""

from __future__ import annotations

from collections.abc import Mapping

Factors = tuple[float, float]

UNKNOWN = "other"
"""What a trainer or a device is called that is none of those of which runs were published."""

'''
FEW = 5
"""Runs below which those of a trainer on a device are judged together with others of the trainer,
or of all, that are as few."""


def write_module(rows: Sequence[LeftOut]) -> None:
    """Write what runs say of predictions into the package, and the runs by their sizes."""
    MODULE.write_text(module_text(rows), encoding="utf-8")
    MEASURED.write_text(measured_text(rows), encoding="utf-8")


def measured_text(rows: Sequence[LeftOut]) -> str:
    """Return the distinct runs with a measured step, sizes rounded to powers of two."""
    names = [item.name for item in fields(MeasuredRun)]
    found = {
        (
            *(row.trainer, row.device, int(row.experts > 0)),
            *(round(power_of_two(size)) for size in (row.parameters, row.devices, row.tokens)),
        )
        for row in rows
        if row.measured_s
    }
    return "".join(",".join(map(str, line)) + "\n" for line in [names, *sorted(found)])


def module_text(rows: Sequence[LeftOut]) -> str:
    """Return the module as text."""
    told = [row for row in rows if row.measured_s]
    held = [row for row in rows if row.measured_gb and row.trainer in ALLOCATORS]
    kinds = {
        "dense": [row for row in told if not row.experts],
        "experts": [row for row in told if row.experts],
    }
    lines = ["STEP: Mapping[str, Mapping[str, Mapping[str, float]]] = {\n"]
    for kind, group in kinds.items():
        lines.append(f'    "{kind}": {{\n')
        for name, each in deviations(group).items():
            lines.append(f'        "{name}": {{\n')
            lines += [f'            "{device}": {off},\n' for device, off in each.items()]
            lines.append("        },\n")
        lines.append("    },\n")
    lines.append("}\n")
    lines.append("LEFT_OUT: Mapping[str, Mapping[str, float]] = {\n")
    for name in ("trainer", "device"):
        off = {
            kind: _deviation([_off(row, name) for row in group]) for kind, group in kinds.items()
        }
        lines.append(f'    "{name}": {_text(off)},\n')
    lines.append("}\n")
    rest = [(row, (row.measured_gb - row.counted_gb) / row.estimated_gb) for row in held]
    runs = {name: len(group) for name, group in kinds.items()} | {"held": len(held)}
    lines.append(f"HELD: Factors = {factors(rest)}\n")
    lines.append(f"PAIRS: Mapping[str, float] = {_text(pairs(told))}\n")
    lines.append(f"RUNS: Mapping[str, int] = {_text(runs)}\n")
    lines.append(f"MOST_DEVICES = {max(round(row.devices) for row in told)}  # devices\n")
    return HEAD + "".join(lines)


def deviations(rows: Sequence[LeftOut]) -> dict[str, dict[str, float]]:
    """Return how far runs of each trainer on each device are off, in four of five of them.

    Where a trainer has few runs on a device, it is those on all such devices; where these are few,
    too, those of all trainers of which that is so.
    """
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        cells[row.trainer, row.device].append(_off(row, "publisher"))
    small = [key for key, found in cells.items() if len(found) < FEW]
    of_trainer = {key: [x for k in small if k[0] == key[0] for x in cells[k]] for key in small}
    others = [x for key in small if len(of_trainer[key]) < FEW for x in cells[key]]
    result: dict[str, dict[str, float]] = defaultdict(dict)
    for (trainer, device), found in sorted(cells.items()):
        together = of_trainer.get((trainer, device), found)
        result[trainer][device] = _deviation(together if len(together) >= FEW else others)
    return dict(result)


def _off(row: LeftOut, kind: str) -> float:
    return abs(log(row.measured_s / getattr(row, f"{kind}_s")))


def _deviation(found: Sequence[float]) -> float:
    """Return what four of five numbers are not above, as nearly as so many of them can tell.

    Numbers that are equal are above together, or none of them is.
    """
    ends = sorted({ceil(1e3 * one) / 1e3 for one in found}, reverse=True)

    def missed(end: float) -> float:
        return abs(sum(one <= end for one in found) / len(found) - SHARE)

    return min(ends, key=missed)


def factors(found: Sequence[tuple[LeftOut, float]]) -> tuple[float, float]:
    """Return between which factors four of five runs lie."""
    count = Counter(row.publisher for row, _ in found)
    weights = [count[row.publisher] ** -0.5 for row, _ in found]
    ends = _quantiles([value for _, value in found], weights, ((1 - SHARE) / 2, (1 + SHARE) / 2))
    low, high = (round(end, 3) for end in ends)
    return low, high


def pairs(rows: Sequence[LeftOut]) -> dict[str, float]:
    """Return by how much the ratio of two plans of one sweep is off, in four of five pairs."""
    sweeps: dict[str, list[LeftOut]] = defaultdict(list)
    for row in rows:
        sweeps[row.sweep].append(row)
    found: dict[str, list[tuple[str, float]]] = {"near": [], "far": []}
    for one, other in (pair for sweep in sweeps.values() for pair in combinations(sweep, 2)):
        predicted = log(one.publisher_s / other.publisher_s)
        off = abs(log(one.measured_s / other.measured_s) - predicted)
        found["near" if abs(predicted) < NEAR else "far"].append((one.publisher, off))
    return {name: _pair_quantile(group) for name, group in found.items()}


def _pair_quantile(group: Sequence[tuple[str, float]]) -> float:
    count = Counter(publisher for publisher, _ in group)
    weights = [count[publisher] ** -0.5 for publisher, _ in group]
    return round(_quantiles([off for _, off in group], weights, (SHARE,))[0], 3)


def _quantiles(
    values: Sequence[float], weights: Sequence[float], at: Sequence[float]
) -> list[float]:
    """Return quantiles of weighted values."""
    order = np.argsort(values)
    sorted_values, each = np.asarray(values)[order], np.asarray(weights)[order]
    places = (np.cumsum(each) - each / 2) / each.sum()
    return [float(np.interp(share, places, sorted_values)) for share in at]


def _text(found: Mapping[str, Any]) -> str:
    inside = ", ".join(f'"{name}": {value!r}' for name, value in found.items())
    return "{" + inside + "}"
