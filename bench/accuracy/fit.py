"""Fit the constants of devices and of generations of trainers to published runs.

A constant belongs to a family of devices (their multiprocessors), or to a generation of trainers:
never to a source, a row or a model. Links are not fitted here: theirs are measured collectives. The
sum of squares has a prior for each constant, so that what few rows tell stays near to what is known
(`cost/fit/solver.py`). Constants of a trainer have kin: what is known of an earlier generation, or
of trainers of its family, is what is expected of it, so that one of which nothing was published has
the mean of its kin. Runs of one publisher by one trainer share an error, so that a long sweep of
one cluster does not drown a table of a paper.

    python -m bench.accuracy.fit FILE.csv ... [--leave-out source]  prints constants, and errors
    python -m bench.accuracy.fit FILE.csv ... --write               writes them into the package
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

import echelon
from bench.accuracy.groups import LEAVE_OUT, is_complete, publisher_of
from bench.accuracy.predict import Adjust, Case, Prediction, cases_of, predict_cases, work_of
from bench.accuracy.published.known_models import data_tables
from bench.accuracy.published.rows import Row, read_rows
from bench.accuracy.report import summary_text
from echelon.core.cluster import Efficiency
from echelon.cost.fit.solver import Constant, ConstantValues, Groups, fit
from echelon.cost.inputs.cost_inputs import CostInputs, TrainerConstants
from echelon.cost.seconds.step import step_seconds
from echelon.cost.seconds.trainers import COMPILED, UNFITTED_FRAMEWORKS
from echelon.planner.predict.bands import device_family
from echelon.planner.predict.residuals import UNKNOWN

TABLES = data_tables("priors.toml")
DEVICE: Mapping[str, tuple[float, float, float]] = {
    name: tuple(ends) for name, ends in TABLES["limits"]["device"].items()
}
TRAINER: Mapping[str, tuple[float, float, float]] = {
    name: tuple(ends) for name, ends in TABLES["limits"]["trainer"].items()
}
"""Fields that are fitted: how low and how high they can be, and how sure their priors are (the
standard deviation of a logarithm)."""
DEVICES: Mapping[str, Efficiency] = {
    key: Efficiency(**{name: value for name, value in known.items() if name != "presets"})
    for key, known in TABLES["device"].items()
}
"""What is known of a generation of devices; of one that is not here its catalogue's values are."""
NOBODY = "generic"
"""What is no generation, but any trainer that is not known: nothing is fitted to its runs but how
much slower than its kin it is, as trainers are that nobody tuned for a table."""
UNTUNED, OF_PUBLISHER = 0.15, 0.12
"""Deviations of logarithms of seconds: of a trainer that is not known from its kin, and of the runs
of one publisher from those of its trainer."""
OF_FAMILY, OF_TRAINER = 1.0, 0.8
"""Deviations of a family of trainers from all of them, and of a trainer from its family, over that
of a constant of TRAINER."""
PARENTS: Mapping[str, str] = {
    key: known["parent"] for key, known in TABLES["trainer"].items() if key != NOBODY
}
"""What each generation of trainers comes of: an earlier one, or a family of them."""
FAMILIES = ("jax", "megatron", "torch")
OWN: Mapping[str, float] = {"pace": 0.05}
"""Deviations from kin of constants that differ less between trainers than others do."""
NOBODYS = "torch"
"""The family of a trainer that is not known."""
GRAPHS = frozenset({"GB200", "GB300"})
"""Devices whose hosts are slow, so that trainers start kernels from graphs: a start is fitted."""
FAR = 1.5
"""How many times as slow as the fastest split of a row one is that is not looked at in a fit."""
ALONE, SHARED = 0.07, 0.06
"""Deviations of logarithms of seconds: of a row by itself, and what rows of a publisher by one
trainer share."""
PACKAGE = Path(echelon.__file__).parent
TRAINERS = PACKAGE / "cost" / "seconds" / "fitted_trainers.toml"
PRESETS = PACKAGE / "config" / "presets" / "clusters"
UNNAMED: Mapping[str, tuple[str, ...]] = {
    "family torch": ("generic", "echelon"),
    "trainer generic": ("generic", "echelon"),
}
"""Trainers of which nobody published a run: they have the mean of their kin, and what is known of
trainers that have no name."""
HEAD = """# Constants of generations of trainers, fitted to published runs.
#
# Written by `python -m bench.accuracy.fit FILE.csv --write`; what each is, `TrainerConstants` in
# inputs.py says. A generation's constants that no run tells are what bench/data/priors.toml
# takes them to be.
"""
Refit = Callable[[Sequence[Case]], Adjust]
"""Fits constants to cases; what it returns puts these constants in the place of any cases' own."""


class Fitting:
    """Hold cases as arrays, and the constants that they depend on."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = cases = [_without_far_candidates(case) for case in cases]
        self.work = work_of(cases)
        sizes = [len(case.candidates) for case in cases]
        self.starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self.devices = np.repeat([device_of(case) for case in cases], sizes)
        self.trainers = np.repeat([case.program.generation for case in cases], sizes)
        self.constants = tuple(self._constants())

    def _constants(self) -> list[Constant]:
        found: list[Constant] = []
        for key in sorted(set(self.devices) & set(DEVICES)):
            for name, limits in DEVICE.items():
                if name == "launch_s" and key not in GRAPHS:
                    continue
                value = float(getattr(DEVICES[key], name))
                found.append(_constant(f"device {key} {name}", value, limits))
        for name, limits in TRAINER.items():
            found.extend(_constants_of_trainers(name, limits))
        return found

    def together(self) -> dict[str, tuple[str, Any]]:
        """Return what can be moved at once: a field of all devices, or of all trainers."""
        of_case = {"device": self.devices[self.starts], "trainer": self.trainers[self.starts]}
        found: dict[str, tuple[str, Any]] = {}
        for one in self.constants:
            kind, key, field = one.name.split(" ")
            if kind == "family":
                # No run is of a family as such: what is known of one comes from its trainers.
                found[one.name] = (f"trainer {field}", of_case["trainer"] == "")
                continue
            found[one.name] = (f"{kind} {field}", of_case[kind] == key)
        return found

    def seconds(self, values: ConstantValues) -> Any:
        """Return the seconds of the fastest candidate of each case."""
        each = np.asarray(step_seconds(put(self.work, self.devices, self.trainers, values)).total)
        return np.minimum.reduceat(each, self.starts)


def put(work: CostInputs, devices: Any, trainers: Any, values: ConstantValues) -> CostInputs:
    """Return `work` with the constants of its rows' devices and trainers replaced."""
    machine: dict[str, Any] = {}
    software: dict[str, Any] = {}
    for name, value in values.items():
        kind, key, field = name.split(" ")
        if kind == "family":
            continue
        where, changed, record = (
            (devices == key, machine, work.machine)
            if kind == "device"
            else (trainers == key, software, work.software)
        )
        before = changed.get(field, getattr(record, field))
        changed[field] = np.where(where, value, before)
    return replace(
        work, machine=replace(work.machine, **machine), software=replace(work.software, **software)
    )


def device_of(case: Case) -> str:
    """Return the generation of a case's device, by its multiprocessors and its peak."""
    return device_family(case.machine) or UNKNOWN


def _without_far_candidates(case: Case) -> Case:
    """Return a case with the splits that can be the fastest whatever the constants are."""
    if len(case.candidates) == 1:
        return case
    each = np.asarray(step_seconds(work_of([case])).total)
    near = each <= FAR * each.min()
    chosen = tuple(one for one, is_near in zip(case.candidates, near, strict=True) if is_near)
    return replace(case, candidates=chosen)


def refit(cases: Sequence[Case], start: ConstantValues | None = None) -> ConstantValues:
    """Return the constants that are nearest to the measured times of `cases`."""
    known = [case for case in cases if case.program.generation != NOBODY]
    values = dict(_refit(known, start))
    values[f"trainer {NOBODY} pace"] = values[f"family {NOBODYS} pace"]
    values[f"trainer {NOBODY} pace"] *= exp(slower_than_kin(cases, values))
    return values


def slower_than_kin(cases: Sequence[Case], values: ConstantValues) -> float:
    """Return the logarithm by which trainers that are not known are slower than their kin.

    Each publisher counts once, by the middle of its runs, and few of them tell little.
    """
    unknown = [case for case in cases if case.program.generation == NOBODY]
    if not unknown:
        return 0.0
    off: dict[str, list[float]] = {}
    predicted = predict_cases(adjust(values)(unknown))
    for case, one in zip(unknown, predicted, strict=True):
        if case.measured.step_s and one.step_s:
            of_publisher = off.setdefault(publisher_of(case.row), [])
            of_publisher.append(log(case.measured.step_s / one.step_s))
    told = len(off) / OF_PUBLISHER**2
    return told * mean(map(median, off.values())) / (told + UNTUNED**-2)


def _refit(cases: Sequence[Case], start: ConstantValues | None) -> ConstantValues:
    problem = Fitting(cases)
    names = [(publisher_of(case.row), case.program.generation) for case in cases]
    order = list(dict.fromkeys(names))
    numbers = np.array([order.index(name) for name in names])
    measured = [case.measured.step_s or 0.0 for case in cases]
    begin = {one.name: one.prior for one in problem.constants}
    begin |= {name: value for name, value in (start or {}).items() if name in begin}
    found = fit(
        problem.constants,
        problem.seconds,
        measured,
        weights=Groups(numbers=numbers, alone=ALONE, shared=SHARED),
        start=begin,
        together=problem.together(),
    )
    return found.values


def predict_strictly(cases: Sequence[Case], by: Callable[[Row], str]) -> list[Prediction]:
    """Return a prediction for each case by constants that no case of its group had a part in.

    Neither where a search begins nor what stays unfitted comes of the package's constants: these
    are fitted to all cases.
    """
    bare = [unfitted(case) for case in cases]
    return predict_left_out(bare, lambda some: adjust(refit(some)), by)


def unfitted(case: Case) -> Case:
    """Return a case with the constants that were known before any fit."""
    before, device = priors()[case.program.generation], DEVICES.get(device_of(case))
    software = {name: getattr(before, name) for name in TRAINER}
    machine = {} if device is None else {name: getattr(device, name) for name in DEVICE}
    return replace(
        case,
        software=replace(case.software, **software),
        machine=replace(case.machine, **machine),
    )


def adjust(values: ConstantValues) -> Adjust:
    """Return what puts fitted constants in the place of the catalogue's."""

    def changed(cases: Sequence[Case]) -> Sequence[Case]:
        return [_changed(case, values) for case in cases]

    return changed


def _changed(case: Case, values: ConstantValues) -> Case:
    device, trainer = device_of(case), case.program.generation
    machine = {n: values[k] for n in DEVICE if (k := f"device {device} {n}") in values}
    kin = {n: values[k] for n in TRAINER if (k := f"family {NOBODYS} {n}") in values}
    own = {n: values[k] for n in TRAINER if (k := f"trainer {trainer} {n}") in values}
    software = kin | own if trainer == NOBODY else own
    return replace(
        case,
        machine=replace(case.machine, **machine),
        software=replace(case.software, **software),
    )


def _constants_of_trainers(name: str, limits: tuple[float, float, float]) -> Iterator[Constant]:
    """Yield one constant of all trainers together, of each family of them, and of each of them."""
    known, (low, high, sure) = priors(), limits
    value = float(getattr(known[NOBODY], name))
    yield _constant(f"family all {name}", value, limits)
    for family in FAMILIES:
        one = _constant(f"family {family} {name}", value, (low, high, OF_FAMILY * sure))
        yield replace(one, parent=f"family all {name}")
    for key, parent in PARENTS.items():
        value = float(getattr(known[key], name))
        never = name in TABLES["trainer"][key].get("never", ())
        ends = (value, value) if never else (low, high)
        one = _constant(f"trainer {key} {name}", value, (*ends, OWN.get(name, OF_TRAINER * sure)))
        yield replace(one, parent=f"{parent} {name}")


def _constant(name: str, value: float, limits: tuple[float, float, float]) -> Constant:
    low, high, width = limits
    return Constant(name=name, low=low, high=high, prior=min(max(value, low), high), width=width)


def priors() -> dict[str, TrainerConstants]:
    """Every generation of trainers as it is known before a fit: facts, and the middle of all."""
    found: dict[str, TrainerConstants] = {}
    for key, facts in UNFITTED_FRAMEWORKS.items():
        known = COMPILED if key == "jax" else TABLES["trainer"].get(key, {})
        told = {name: value for name, value in known.items() if name in TRAINER}
        found[key] = replace(facts, **(TABLES["trainer"][NOBODY] | told))
    return found


def write_constants(values: ConstantValues) -> None:
    """Write the constants that a fit found, to three digits."""
    trainers: dict[str, dict[str, float]] = {}
    devices: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        kind, key, field = name.split(" ")
        for each in UNNAMED.get(f"{kind} {key}", () if kind == "family" else (key,)):
            into = devices if kind == "device" else trainers
            into.setdefault(each, {})[field] = float(f"{value:.3g}")
    if trainers:
        rows = "".join(_trainer(key, trainers[key]) for key in sorted(trainers))
        TRAINERS.write_text(HEAD + rows, encoding="utf-8")
    for key, found in devices.items():
        for stem in TABLES["device"][key]["presets"]:
            _put(preset_file(PRESETS, stem), found)


def preset_file(folder: Path, stem: str) -> Path:
    """Return the file of a preset, in whichever folder of a family it stands."""
    (path,) = folder.rglob(f"{stem}.toml")
    return path


def _trainer(key: str, found: Mapping[str, float]) -> str:
    return f"\n[{key}]\n" + "".join(f"{field} = {value!r}\n" for field, value in found.items())


def _put(path: Path, found: Mapping[str, float]) -> None:
    """Replace values of [device.efficiency]; what is not there yet comes at its end."""
    before, mark, after = path.read_text(encoding="utf-8").partition("[device.efficiency]\n")
    table, gap, rest = after.partition("\n\n")
    for field, value in found.items():
        line = f"{field} = {value:g}"
        table, changed = re.subn(rf"^{field} = .*$", line, table, flags=re.MULTILINE)
        if not changed:
            table += f"\n{line}"
    path.write_text(before + mark + table + gap + rest, encoding="utf-8")


def predict_left_out(
    cases: Sequence[Case], refit: Refit, by: Callable[[Row], str]
) -> list[Prediction]:
    """Return a prediction for each case, in order, by constants fitted to all other groups."""
    groups = dict.fromkeys(by(case.row) for case in cases)
    found: dict[int, Prediction] = {}
    for group in groups:
        inside = [index for index, case in enumerate(cases) if by(case.row) == group]
        outside = [
            case
            for case in cases
            if by(case.row) != group and is_complete(case.row) and case.measured.step_s
        ]
        adjust = refit(outside)
        predicted = predict_cases(adjust([cases[index] for index in inside]))
        found |= dict(zip(inside, predicted, strict=True))
    return [found[index] for index in range(len(cases))]


def main(arguments: list[str] | None = None) -> int:
    """Fit, print the constants, and the errors with them (or of each group without it)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.csv", help="published runs")
    parser.add_argument("--write", action="store_true", help="write them into the package")
    parser.add_argument("--leave-out", choices=sorted(LEAVE_OUT), help="groups to leave out")
    options = parser.parse_args(arguments)
    cases, _ = cases_of([row for file in options.files for row in read_rows(file)])
    told = [case for case in cases if is_complete(case.row) and case.measured.step_s]
    values = refit(told)
    for name, value in values.items():
        print(f"{name} = {value:.3g}")
    if options.write:
        write_constants(values)
    if options.leave_out:
        found = predict_strictly(cases, LEAVE_OUT[options.leave_out])
    else:
        found = predict_cases(adjust(values)(cases))
    print(summary_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
