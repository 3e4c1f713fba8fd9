# SPDX-License-Identifier: Apache-2.0
"""Measured times: of a model's units, and of a machine whose measurements are not all made yet.

The file of units is what `echelon calibrate RUN` writes. Blocks are alike, so the file has one of
them, and a run may have any number. B is that of a block that is not recomputed: a plan that
recomputes adds the forward pass. Whole sequences are measured: a context rank has its equal share
of every unit's work, 1 / cp. What ranks send is not in the file; transfers are modelled by the
links of the cluster.

Measurements of a machine are lines beside the file that is to be written. The first line says which
machine they are of, each other one is a measurement and its seconds, written when it is made. A
last line that was cut off, as the process was killed, is forgotten.
"""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from echelon.config.derived.pipeline import AUTO, NONE, SCHEDULE_KEY, STAGES_KEY, TIMES_KEY
from echelon.config.job import Job
from echelon.config.plan_view import plan_settings
from echelon.config.reading import missing_file
from echelon.config.view import View
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.cluster import CALIBRATION_CONTINUED
from echelon.core.rulebook.config import CANNOT_WRITE
from echelon.core.rulebook.pipeline import UNIT_TIMES_READABLE
from echelon.core.serialize import decode_json, to_json
from echelon.core.settings.value_types import MAX_REAL, toml_text
from echelon.cost.seconds.unit_times import (
    UnitTimes,
    unit_times_from_formulas,
    with_recompute,
    with_transfer,
)
from echelon.layout.buckets import UNIT_EMBEDDING, UNIT_HEAD

SUFFIX = ".unfinished"
SCHEMA = 1  # of the lines


@dataclass(frozen=True, slots=True)
class Journal:
    """Write measurements into a file at once, each as one line; ranks of other processes too."""

    path: Path

    def append(self, name: str, seconds: float) -> None:
        """Write one measurement, named by `measurement_name`."""
        line = json.dumps({"measured": json.loads(name), "seconds": seconds}) + "\n"
        with self.path.open("a", encoding="ascii") as stream:
            stream.write(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedMeasurements:
    """Hold the seconds of what was measured before, by its name, and where more are written."""

    journal: Journal
    found: Mapping[str, float]

    def finish(self) -> None:
        """Remove the lines: what they say is in the file that was written."""
        self.journal.path.unlink(missing_ok=True)


def measurement_name(sample: object, **how: object) -> str:
    """Return one line of JSON that tells a measurement from all others."""
    entries = {"kind": type(sample).__name__, **to_json(sample), **how}
    return json.dumps(entries, sort_keys=True)


def unfinished_file(out: Path) -> Path:
    """Return where measurements stand until `out` is written."""
    out = out.absolute()
    return out.with_name(f"{out.name}{SUFFIX}")


@contextmanager
def unfinished_measurements(
    out: Path, machine: Mapping[str, object]
) -> Generator[UnfinishedMeasurements]:
    """Hold the unfinished measurements for `out` open, those of `machine`: no other process can.

    ConfigError where those that are there are of another machine, are none, or are being made. A
    file without any is removed at the end.
    """
    path = unfinished_file(out)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        reason = error.strerror or str(error)
        problem = CANNOT_WRITE.problem(f"{path} cannot be written: {reason}", key="--out")
        raise ConfigError(problem) from error
    try:
        _lock(descriptor, path)
        found = _begin(descriptor, path, machine)
        try:
            yield UnfinishedMeasurements(journal=Journal(path), found=found)
        finally:
            if num_measurements(path) == 0:
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def num_measurements(path: Path) -> int:
    """Return how many measurements are in a file of unfinished ones; 0 where there is none."""
    try:
        return max(0, path.read_bytes().count(b"\n") - 1)
    except OSError:
        return 0


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(_refused(path, "is being written by another calibration")) from None
    except OSError:
        return  # A file system without locks.


def _begin(descriptor: int, path: Path, machine: Mapping[str, object]) -> Mapping[str, float]:
    """Return what was measured before; write the first line where nothing was."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    head, *lines = whole.split(b"\n")
    wanted = cast("dict[str, object]", to_json(dict(machine)))
    if not head:
        os.ftruncate(descriptor, 0)
        first = {"schema": SCHEMA, "machine": wanted}
        os.pwrite(descriptor, (json.dumps(first) + "\n").encode("ascii"), 0)
        return {}
    try:
        first = decode_json(head)
        if first["schema"] != SCHEMA:
            raise ValueError(f"its schema is {first['schema']}")
        _require_same(path, first["machine"], wanted)
        read = [decode_json(line) for line in lines]
        found = {json.dumps(one["measured"], sort_keys=True): float(one["seconds"]) for one in read}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = _refused(path, f"is not one of unfinished measurements ({error})")
        raise ConfigError(problem) from error
    os.ftruncate(descriptor, len(whole) + 1)
    return found


def _require_same(path: Path, there: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    names = dict.fromkeys((*there, *wanted))
    differ = [name for name in names if there.get(name) != wanted.get(name)]
    if differ:
        parts = (f"{name} {there.get(name)} there, {wanted.get(name)} here" for name in differ)
        raise ConfigError(_refused(path, f"was begun otherwise: {'; '.join(parts)}"))


def _refused(path: Path, why: str) -> Problem:
    return CALIBRATION_CONTINUED.problem(
        f"{path.name} {why}",
        key="--out",
        set_by=str(path),
        suggestions=("another --out", f"rm {path}"),
    )


TIMES_SCHEMA = 2  # of the written file
BLOCK = "block"
UNITS = (UNIT_EMBEDDING, BLOCK, UNIT_HEAD)
PASSES = ("forward_s", "input_gradient_s", "weight_gradient_s", "backward_s")
"""F, B, W, and BW: the whole backward pass at once."""

FITTED_MODEL = (
    *("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "gated", "activation", "tied"),
    *("norm", "positions", "qk_norm", "qk_norm_over", "norm_place", "residual", "qkv_bias"),
    *("output_bias", "mlp_bias", "causal", "window", "soft_cap", "attention_scale"),
    *("rotary.fraction", "multipliers.embedding", "multipliers.residual", "multipliers.logits"),
)
"""Settings of the model that a block, the embedding or the head takes its time from."""

FITTED = (
    *(f"model.{name}" for name in FITTED_MODEL),
    "batch.microbatch_sequences",
    "batch.sequence_length",
    "precision.parameters",
    "mesh.tp",
    "mesh.sequence_parallel",
)
"""Every setting that units take their time from; the device is beside them."""

CPU = "cpu"
"""What a file calls its device where that is no GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesFile:
    """Hold what was measured: seconds by unit, and the settings that they were measured with.

    `device` is "cpu" or the name of a GPU. `threads` and `spread` (by unit, the distance of the
    quartiles over the median) are for whoever reads the file.
    """

    model: str
    fits: Mapping[str, object]
    device: str
    threads: int = 1
    seconds: Mapping[str, Mapping[str, float]]
    spread: Mapping[str, float]

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps({"schema": TIMES_SCHEMA, **asdict(self)}, indent=2)


def fitted_settings(plan: Plan) -> dict[str, object]:
    """Return the settings of a plan that its units take their time from."""
    settings = plan_settings(plan)
    return {key: settings[key] for key in FITTED}


def read_times(path: Path, set_by: str = "") -> TimesFile:
    """Return what a file of times holds; ConfigError where it is not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(_unreadable(path, f"it is not UTF-8: {error.reason}", set_by)) from error
    except (OSError, ValueError) as error:
        raise ConfigError(missing_file(path, error, set_by)) from error
    try:
        return _parsed(decode_json(text))
    except ValueError as error:
        raise ConfigError(_unreadable(path, str(error), set_by)) from error


def _unreadable(path: Path, why: str, set_by: str) -> Problem:
    return UNIT_TIMES_READABLE.problem(
        f"{path} is not a file of measured times: {why}",
        key=TIMES_KEY,
        set_by=set_by,
        suggestions=("echelon calibrate RUN --out times.json",),
    )


def _parsed(data: Any) -> TimesFile:
    entries = _object(data, "the file")
    known = {"schema", "model", "fits", "device", "threads", "seconds", "spread"}
    if entries.get("schema") != TIMES_SCHEMA or set(entries) != known:
        raise ValueError(f"it has no schema {TIMES_SCHEMA} with {', '.join(sorted(known))}")
    seconds = _object(entries["seconds"], "seconds", UNITS)
    spread = _object(entries["spread"], "spread", UNITS)
    return TimesFile(
        model=_text(entries["model"], "model"),
        fits=_fits(entries["fits"]),
        seconds={unit: _times(seconds[unit], unit) for unit in UNITS},
        device=_text(entries["device"], "device"),
        threads=_count(entries["threads"], "threads"),
        spread={unit: _number(spread[unit], f"spread.{unit}") for unit in UNITS},
    )


def _object(value: Any, where: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return a table, and with `names` one that has these; ValueError where it is none."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no table")
    entries = cast("dict[str, Any]", value)
    missing = [name for name in names if name not in entries]
    more = sorted(set(entries) - set(names)) if names else []
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}")
    if more:
        raise ValueError(f"{where} has {', '.join(more)}, which nothing reads")
    return entries


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where} = {value!r:.40} is not a name")
    return value


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where} = {value!r:.40} is not a count")
    return value


def _number(value: Any, where: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # A whole number may be too long for a float: it is compared as it is.
    if not number or not 0 <= value <= MAX_REAL:
        raise ValueError(f"{where} = {value!r:.40} is not a number from 0 up")
    return float(value)


def _fits(value: Any) -> dict[str, object]:
    entries = _object(value, "fits", FITTED)
    for key, one in entries.items():
        if not isinstance(one, str | int | float):
            raise ValueError(f"fits: {key} = {one!r:.40} is not the value of a setting")
    return entries


def _times(value: Any, unit: str) -> dict[str, float]:
    entries = _object(value, unit, PASSES)
    found = {one: _number(seconds, f"{unit}.{one}") for one, seconds in entries.items()}
    if sum(found.values()) == 0 and unit == BLOCK:
        raise ValueError("a block takes no time at all")
    return found


def uses_times(view: View) -> bool:
    """Return whether anything is decided by the times of units."""
    return AUTO in (view.entry(STAGES_KEY).value, view.word(SCHEDULE_KEY))


def unit_times_from_job(job: Job) -> UnitTimes:
    """Return the times that a job's stages were balanced by."""
    written = next((row.value for row in job.sources if row.key == TIMES_KEY), toml_text(NONE))
    return unit_times(job.plan, tomllib.loads(f"v = {written}")["v"])


def unit_times(plan: Plan, times: str) -> UnitTimes:
    """Return the times of a plan's units: those of the file `times`, or modelled for "none"."""
    if times == NONE:
        return unit_times_from_formulas(plan)
    found = read_times(Path(times))
    units = {UNIT_EMBEDDING: UNIT_EMBEDDING, UNIT_HEAD: UNIT_HEAD}
    units |= {f"layers.{layer}": BLOCK for layer in range(plan.model.layers)}
    by_pass = {
        one: {unit: found.seconds[kind][one] / plan.mesh.cp for unit, kind in units.items()}
        for one in PASSES
    }
    measured = UnitTimes(
        source="measured",
        forward_s=by_pass["forward_s"],
        input_gradient_s=by_pass["input_gradient_s"],
        weight_gradient_s=by_pass["weight_gradient_s"],
        backward_s=by_pass["backward_s"],
        where=times,
    )
    return with_transfer(plan, with_recompute(plan, measured))
