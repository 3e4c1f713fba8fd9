"""Measured times of a model's units: the file that `echelon calibrate --model` writes.

Blocks are alike, so the file has one of them, and a run may have any number. B is that of a block
that is not recomputed: a plan that recomputes adds the forward pass. Transfers are not in the file;
they are modelled by the links of the cluster.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, cast

from echelon.config.files import missing_file
from echelon.config.job import Job
from echelon.config.kinds import toml_text
from echelon.config.pipeline import AUTO, NONE, SCHEDULE_KEY, STAGES_KEY, TIMES_KEY
from echelon.config.view import View
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.pipeline import UNIT_TIMES_FIT_RUN, UNIT_TIMES_READABLE
from echelon.cost.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.cost.unit_times import UnitTimes, modelled_times, with_recompute, with_transfer

TIMES_SCHEMA = 1
BLOCK = "block"
UNITS = (UNIT_EMBEDDING, BLOCK, UNIT_HEAD)
PASSES = ("forward_s", "input_gradient_s", "weight_gradient_s", "backward_s")
"""F, B, W, and BW: the whole backward pass at once."""

FITTED_MODEL = (
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "vocab",
    "gated",
    "activation",
    "tied",
    "norm",
    "positions",
    "qk_norm",
    "qkv_bias",
    "output_bias",
    "mlp_bias",
)
"""Settings of the model that a block, the embedding or the head takes its time from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesFile:
    """Hold what was measured: seconds by unit, and the settings that they were measured with.

    `device`, `threads` and `spread` (by unit, the distance of the quartiles over the median) are
    for whoever reads the file.
    """

    model: str
    fits: Mapping[str, object]
    seconds: Mapping[str, Mapping[str, float]]
    device: str = ""
    threads: int = 1
    spread: Mapping[str, float]

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(
            {
                "schema": TIMES_SCHEMA,
                "model": self.model,
                "fits": dict(self.fits),
                "device": self.device,
                "threads": self.threads,
                "seconds": {unit: dict(found) for unit, found in self.seconds.items()},
                "spread": dict(self.spread),
            },
            indent=2,
        )


def fitted(plan: Plan) -> dict[str, object]:
    """Return the settings of a plan that its units take their time from."""
    return {
        **{f"model.{name}": getattr(plan.model, name) for name in FITTED_MODEL},
        "batch.microbatch_sequences": plan.layout.microbatch_sequences,
        "batch.sequence_length": plan.mathematics.sequence_length,
        "precision.parameters": plan.mathematics.precision.parameters,
        "mesh.tp": plan.mesh.tp,
        "mesh.sequence_parallel": plan.layout.sequence_parallel,
    }


def read_times(path: Path, set_by: str = "") -> TimesFile:
    """Return what a file of times holds; ConfigError where it is not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(_unreadable(path, f"it is not UTF-8: {error.reason}", set_by)) from error
    except (OSError, ValueError) as error:
        raise ConfigError(missing_file(path, error, set_by)) from error
    try:
        return _parsed(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(_unreadable(path, str(error), set_by)) from error


def _unreadable(path: Path, why: str, set_by: str) -> Problem:
    return UNIT_TIMES_READABLE.problem(
        f"{path} is not a file of measured times: {why}",
        key=TIMES_KEY,
        set_by=set_by,
        works=("echelon calibrate --model RUN --out times.json",),
    )


def _parsed(data: Any) -> TimesFile:
    entries = _object(data, "the file")
    known = {"schema", "model", "fits", "device", "threads", "seconds", "spread"}
    if entries.get("schema") != TIMES_SCHEMA or set(entries) != known:
        raise ValueError(f"it has no schema {TIMES_SCHEMA} with {', '.join(sorted(known))}")
    seconds = _object(entries["seconds"], "seconds")
    if set(seconds) != set(UNITS):
        raise ValueError(f"seconds has {', '.join(sorted(seconds))}, not {', '.join(UNITS)}")
    return TimesFile(
        model=str(entries["model"]),
        fits=_object(entries["fits"], "fits"),
        seconds={unit: _times(seconds[unit], unit) for unit in UNITS},
        device=str(entries["device"]),
        threads=int(entries["threads"]),
        spread=_object(entries["spread"], "spread"),
    )


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no table")
    return cast("dict[str, Any]", value)


def _times(value: Any, unit: str) -> dict[str, float]:
    entries = _object(value, unit)
    if set(entries) != set(PASSES):
        raise ValueError(f"{unit} has {', '.join(sorted(entries))}, not {', '.join(PASSES)}")
    for one, seconds in entries.items():
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not number or not isfinite(seconds) or seconds < 0:
            raise ValueError(f"{unit}.{one} = {seconds!r} is not a number of seconds")
    if sum(entries.values()) == 0 and unit == BLOCK:
        raise ValueError("a block takes no time at all")
    return {one: float(seconds) for one, seconds in entries.items()}


def times_fit(view: View) -> Iterator[Problem]:
    """Check that measured times can be read, and were measured with the settings of this run."""
    entry = view.entry(TIMES_KEY)
    if entry.value == NONE:
        return
    try:
        found = read_times(view.path(TIMES_KEY), entry.source)
    except ConfigError as error:
        yield from error.problems
        return
    wrong = {key: value for key, value in found.fits.items() if not _same(view, key, value)}
    if not wrong:
        return
    here = {key: toml_text(view.value(key)) if view.has(key) else "not set" for key in wrong}
    parts = [f"{key} = {toml_text(value)} (here {here[key]})" for key, value in wrong.items()]
    settings = " with ".join(f"{key} = {toml_text(value)}" for key, value in wrong.items())
    yield UNIT_TIMES_FIT_RUN.problem(
        f"{entry.value} was measured with {', '.join(parts)}",
        key=TIMES_KEY,
        set_by=view.set_by(TIMES_KEY, *wrong),
        works=(settings, f'{TIMES_KEY} = "none"', "echelon calibrate --model of this run"),
    )


def _same(view: View, key: str, value: object) -> bool:
    return key in view.settings and view.has(key) and view.value(key) == value


def uses_times(view: View) -> bool:
    """Return whether anything is decided by the times of units."""
    return AUTO in (view.entry(STAGES_KEY).value, view.word(SCHEDULE_KEY))


def times_of(job: Job) -> UnitTimes:
    """Return the times that a job's stages were balanced by."""
    written = next((row.value for row in job.sources if row.key == TIMES_KEY), toml_text(NONE))
    return unit_times(job.plan, tomllib.loads(f"v = {written}")["v"])


def unit_times(plan: Plan, times: str) -> UnitTimes:
    """Return the times of a plan's units: those of the file `times`, or modelled for "none"."""
    if times == NONE:
        return modelled_times(plan)
    found = read_times(Path(times))
    units = {UNIT_EMBEDDING: UNIT_EMBEDDING, UNIT_HEAD: UNIT_HEAD}
    units |= {f"layers.{layer}": BLOCK for layer in range(plan.model.layers)}
    by_pass = {
        one: {unit: found.seconds[kind][one] for unit, kind in units.items()} for one in PASSES
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
