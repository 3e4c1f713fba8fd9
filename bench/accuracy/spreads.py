"""Quantiles of measured / predicted over runs that were left out, as a module of the package.

Four of five runs lie between the tenths at both ends. A publisher with many runs counts as the root
of their number, so that one long sweep does not speak for all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import log
from pathlib import Path
from typing import Any

import numpy as np

import echelon
from bench.accuracy.residuals import LeftOut
from echelon.planner.explain.bands import NEAR, NODE

MODULE = Path(echelon.__file__).parent / "planner" / "predict" / "residuals.py"
SHARE = 0.8
"""The share of runs in a band."""
HEAD = '''"""How far off runs are that were not fitted: measured / predicted of four in five.

Written by `python -m bench.accuracy.residuals --write LEFT.csv` from runs that the same command
left out of its fits. STEP: the seconds of runs of a known trainer on a known device ("known"), of a
trainer that was left out, of a device that was left out, on one node and on several. HELD: bytes
that are not counted. PAIRS: by how much the ratio of two plans' seconds is off, in logarithms,
where predictions are near and where they are far. `planner/explain/bands.py` reads this.
"""

from __future__ import annotations

from collections.abc import Mapping

Factors = tuple[float, float]

'''


def write_module(rows: Sequence[LeftOut]) -> None:
    """Write what runs say of predictions into the package."""
    MODULE.write_text(module_text(rows), encoding="utf-8")


def module_text(rows: Sequence[LeftOut]) -> str:
    """Return the module as text."""
    told = [row for row in rows if row.measured_s]
    dense = [row for row in told if not row.experts]
    mixtures = [row for row in told if row.experts]
    held = [row for row in rows if row.measured_gb]
    groups = {
        "known": [(row, row.measured_s / row.publisher_s) for row in known(dense)],
        "trainer": [(row, row.measured_s / row.trainer_s) for row in dense],
        "device": [(row, row.measured_s / row.device_s) for row in dense],
    }
    step = {name: _by_place(group) for name, group in groups.items()}
    lines = ["STEP: Mapping[str, Mapping[str, Factors]] = {\n"]
    lines += [f'    "{name}": {_text(places)},\n' for name, places in step.items()]
    lines.append("}\n")
    experts = factors([(row, row.measured_s / row.publisher_s) for row in mixtures])
    rest = [(row, (row.measured_gb - row.counted_gb) / row.estimated_gb) for row in held]
    runs = {name: len(group) for name, group in groups.items()}
    runs |= {"experts": len(mixtures), "held": len(held)}
    lines.append(f"EXPERTS: Factors = {experts}\n")
    lines.append(f"HELD: Factors = {factors(rest)}\n")
    lines.append(f"PAIRS: Mapping[str, float] = {_text(pairs(told))}\n")
    lines.append(f"RUNS: Mapping[str, int] = {_text(runs)}\n")
    lines.append(f"MOST_DEVICES = {max(round(row.devices) for row in told)}  # devices\n")
    return HEAD + "".join(lines)


def known(rows: Sequence[LeftOut]) -> list[LeftOut]:
    """Return the runs of which another publisher has the trainer, and another has the device."""
    return [
        row
        for row in rows
        if all(
            any(
                getattr(other, name) == getattr(row, name) and other.publisher != row.publisher
                for other in rows
            )
            for name in ("trainer", "device")
        )
    ]


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


def _by_place(found: Sequence[tuple[LeftOut, float]]) -> dict[str, tuple[float, float]]:
    node = [one for one in found if one[0].devices <= NODE]
    return {"node": factors(node), "nodes": factors([one for one in found if one not in node])}


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
