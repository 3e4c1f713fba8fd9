"""How far predictions are from runs that nobody fitted: measured beside predicted, run by run.

Constants are fitted again without what a prediction is for: without all runs of its publisher,
without its generation of trainers, without its family of devices. What no run tells then stays what
was known before any (`data/priors.toml`). Memory has no fitted constant: what is counted
(parameters, gradients, optimizer state) is kept apart from what is estimated.

    python -m bench.accuracy.residuals FILE.csv ... LEFT.csv  many fits, minutes; what they predict
    python -m bench.accuracy.residuals --write LEFT.csv       its quantiles, into the package

Four of five runs lie between the tenths at both ends. A publisher with many runs counts as the root
of their number, so that one long sweep does not speak for all.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import combinations
from math import ceil, log
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np

import echelon
from bench.accuracy.fit import NOBODY, adjust, device_of, refit, unfitted
from bench.accuracy.groups import is_complete, publisher_of
from bench.accuracy.predict import GB, Case, cases_of, predict_cases
from bench.accuracy.published.rows import read_rows
from echelon.cost.fit.solver import ConstantValues
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.peak.fullest_rank import fullest_rank_bytes
from echelon.planner.predict.bands import ALLOCATORS, NEAR
from echelon.planner.predict.estimate import EXACT
from echelon.planner.predict.nearest_run import FILE, MeasuredRun, num_parameters, power_of_two
from echelon.planner.predict.residuals import UNKNOWN


def trainer_of(case: Case) -> str:
    """Return the generation of trainers of a case, or that it is none that is known."""
    generation = case.program.generation
    return UNKNOWN if generation == NOBODY else generation


KINDS: Mapping[str, Callable[[Case], str]] = {
    "publisher": lambda case: publisher_of(case.row),
    "trainer": trainer_of,
    "device": device_of,
}
"""What is left out, one at a time."""
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
LINE = 101
"""Characters of the longest line of the package, with its end."""
FEW = 5
"""Runs below which those of a trainer on a device are judged together with others of the trainer,
or of all, that are as few."""
SWEEP = ("source", "model", "gpu", "n_gpus", "seq_len", "global_batch")
"""Columns in which the runs of a sweep are alike: they differ in their plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Hold one run: what was measured, and what is predicted without its publisher, and so on.

    `sweep` names the runs of one table with one model on as many devices; `tokens` are those of a
    microbatch on a context rank. What a run does not say is 0. `counted_gb` are parameters,
    gradients and optimizer state, `estimated_gb` the rest.
    """

    id: str
    sweep: str
    publisher: str
    trainer: str
    device: str
    devices: float
    experts: float
    parameters: float
    tokens: float
    measured_s: float
    publisher_s: float
    trainer_s: float
    device_s: float
    measured_gb: float
    counted_gb: float
    estimated_gb: float


def left_out(cases: Sequence[Case], *, workers: int = 1) -> Iterator[LeftOut]:
    """Yield every run with what constants that were fitted without it make of it."""
    bare = [unfitted(case) for case in cases]
    groups = {kind: _groups([*map(name, bare)]) for kind, name in KINDS.items()}
    each = [group for named in groups.values() for group in named.values()]
    fits = _fits_without(bare, [*dict.fromkeys(each)], workers)
    seconds = {kind: _seconds(bare, named.values(), fits) for kind, named in groups.items()}
    sweeps: dict[tuple[str, ...], str] = {}
    for index, (case, held) in enumerate(zip(cases, _held(cases), strict=True)):
        table = tuple(map(case.row.word, SWEEP))
        yield LeftOut(
            id=case.row.id,
            sweep=sweeps.setdefault(table, f"{len(sweeps)}"),
            devices=float(np.asarray(case.candidates[0].layout.devices)),
            experts=float(np.asarray(case.model.experts)),
            parameters=num_parameters(case.model),
            tokens=tokens_of(case),
            measured_s=case.measured.step_s or 0.0,
            measured_gb=case.measured.memory_gb or 0.0,
            counted_gb=held[0] / GB,
            estimated_gb=held[1] / GB,
            publisher=KINDS["publisher"](case),
            trainer=KINDS["trainer"](case),
            device=KINDS["device"](case),
            publisher_s=seconds["publisher"][index],
            trainer_s=seconds["trainer"][index],
            device_s=seconds["device"][index],
        )


def tokens_of(case: Case) -> float:
    """Return the tokens of a microbatch of a case on a context rank."""
    layout = case.candidates[0].layout
    return float(np.asarray(layout.microbatch * case.model.length / layout.cp))


def _fits_without(
    cases: Sequence[Case], groups: Sequence[frozenset[int]], workers: int
) -> dict[frozenset[int], ConstantValues]:
    """Return the constants that are fitted without each group of cases, `workers` at a time.

    A search for constants begins at those of all cases, and forgets what no case tells.
    """
    start = refit([case for case in cases if _told(case)])
    outside = [
        [case for index, case in enumerate(cases) if index not in group and _told(case)]
        for group in groups
    ]
    without = partial(refit, start=start)
    if workers == 1:
        return dict(zip(groups, map(without, outside), strict=True))
    fits: dict[frozenset[int], ConstantValues] = {}
    with Pool(workers) as pool:
        for group, values in zip(groups, pool.imap(without, outside), strict=True):
            fits[group] = values
            print(f"{len(fits)} of {len(groups)} fits", file=sys.stderr, flush=True)
    return fits


def _groups(names: Sequence[str]) -> dict[str, frozenset[int]]:
    """Return which cases have each name."""
    return {
        name: frozenset(index for index, other in enumerate(names) if other == name)
        for name in dict.fromkeys(names)
    }


def _seconds(
    cases: Sequence[Case],
    groups: Iterable[frozenset[int]],
    fits: Mapping[frozenset[int], ConstantValues],
) -> list[float]:
    """Return the seconds of each case by constants fitted to the cases of other groups."""
    found: dict[int, float] = {}
    for inside in groups:
        order = sorted(inside)
        predicted = predict_cases(adjust(fits[inside])([cases[index] for index in order]))
        found |= {index: one.step_s or 0.0 for index, one in zip(order, predicted, strict=True)}
    return [found[index] for index in range(len(cases))]


def _told(case: Case) -> bool:
    return is_complete(case.row) and bool(case.measured.step_s)


def _held(cases: Sequence[Case]) -> Iterator[tuple[float, float]]:
    """Yield the bytes of each case that are counted, and those that are estimated."""
    for case, one in zip(cases, predict_cases(cases), strict=True):
        assert one.chosen is not None
        work = CostInputs(
            model=case.model,
            machine=case.machine,
            software=case.software,
            layout=one.chosen.layout,
        )
        terms = fullest_rank_bytes(work).terms
        held = {name: float(np.asarray(value).reshape(-1)[0]) for name, value in terms.items()}
        counted = sum(held[name] for name in EXACT)
        # What a row means is the allocator's number, or the driver's.
        yield counted, GB * (one.memory_gb or 0.0) - counted


def write_left_out(path: Path, rows: Sequence[LeftOut]) -> None:
    """Write one line a run, numbers to five digits."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(item.name for item in fields(LeftOut))
        for row in rows:
            cells = asdict(row).values()
            writer.writerow(f"{cell:.5g}" if isinstance(cell, float) else cell for cell in cells)


def read_left_out(path: Path) -> list[LeftOut]:
    """Return the runs of a file that `write_left_out` wrote."""
    words = {item.name for item in fields(LeftOut) if item.type == "str"}
    with path.open(encoding="utf-8", newline="") as file:
        return [
            LeftOut(**{k: v if k in words else float(v) for k, v in record.items()})  # type: ignore[arg-type]
            for record in csv.DictReader(file)
        ]


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
            line = f'        "{name}": {_text(each)},\n'
            if len(line) > LINE:
                inner = "".join(f'            "{device}": {off},\n' for device, off in each.items())
                line = f'        "{name}": {{\n{inner}        }},\n'
            lines.append(line)
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


def main(arguments: list[str] | None = None) -> int:
    """Predict every run without its like, or write what that says of predictions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.csv")
    parser.add_argument("--write", action="store_true", help="quantiles, into the package")
    options = parser.parse_args(arguments)
    *sources, left = options.files
    if sources:
        cases, _ = cases_of([row for file in sources for row in read_rows(file)])
        complete = [one for one in cases if is_complete(one.row)]
        write_left_out(left, [*left_out(complete, workers=os.cpu_count() or 1)])
    if options.write:
        write_module(read_left_out(left))
    return 0


if __name__ == "__main__":
    sys.exit(main())
