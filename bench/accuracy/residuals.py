"""How far predictions are from runs that nobody fitted: measured beside predicted, run by run.

Constants are fitted again without what a prediction is for: without all runs of its publisher,
without its generation of trainers, without its family of devices. What no run tells then stays what
was known before any (`priors.py`). Memory has no fitted constant: what is counted (parameters,
gradients, optimizer state) is kept apart from what is estimated.

    python -m bench.accuracy.residuals FILE.csv ... LEFT.csv  many fits, minutes; what they predict
    python -m bench.accuracy.residuals --write LEFT.csv       its quantiles, into the package
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np

from bench.accuracy.fit import NOBODY, adjust, device_of, refit, unfitted
from bench.accuracy.groups import is_complete, publisher_of
from bench.accuracy.predict import GB, Case, cases_of, predict_cases
from bench.accuracy.published.rows import read_rows
from echelon.cost.fit.solver import ConstantValues
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.peak.fullest_rank import fullest_rank_bytes
from echelon.planner.predict.estimate import EXACT
from echelon.planner.predict.nearest_run import num_parameters
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


def main(arguments: list[str] | None = None) -> int:
    """Predict every run without its like, or write what that says of predictions."""
    from bench.accuracy.spreads import write_module

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
