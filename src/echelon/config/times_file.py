"""Measured times of a model's units: the file that `echelon calibrate --model` writes.

Blocks are alike, so the file has one of them, and a run may have any number. B is that of a block
that is not recomputed: a plan that recomputes adds the forward pass. Whole sequences are measured:
a context rank has its equal share of every unit's work, 1 / cp. What ranks send is not in the file;
transfers are modelled by the links of the cluster.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from echelon.config.cluster import read_cluster
from echelon.config.files import missing_file
from echelon.config.job import Job
from echelon.config.kinds import MAX_REAL, toml_text
from echelon.config.pipeline import AUTO, NONE, SCHEDULE_KEY, STAGES_KEY, TIMES_KEY
from echelon.config.schema import CLUSTER_SOURCES
from echelon.config.view import View
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.pipeline import UNIT_TIMES_FIT_RUN, UNIT_TIMES_READABLE
from echelon.cost.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.cost.unit_times import UnitTimes, modelled_times, with_recompute, with_transfer

TIMES_SCHEMA = 2
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
    "causal",
    "window",
    "soft_cap",
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

INSTEAD = (f'{TIMES_KEY} = "none"', "echelon calibrate --model of this run")

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
    seconds: Mapping[str, Mapping[str, float]]
    device: str
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
    model = (getattr(plan.model, name) for name in FITTED_MODEL)
    values = (
        *(NONE if value is None else value for value in model),
        plan.layout.microbatch_sequences,
        plan.mathematics.sequence_length,
        plan.mathematics.precision.parameters,
        plan.mesh.tp,
        plan.layout.sequence_parallel,
    )
    return dict(zip(FITTED, values, strict=True))


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
    _same_names(seconds, UNITS, "seconds")
    spread = _object(entries["spread"], "spread")
    _same_names(spread, UNITS, "spread")
    return TimesFile(
        model=_text(entries["model"], "model"),
        fits=_fits(entries["fits"]),
        seconds={unit: _times(seconds[unit], unit) for unit in UNITS},
        device=_text(entries["device"], "device"),
        threads=_count(entries["threads"], "threads"),
        spread={unit: _number(spread[unit], f"spread.{unit}") for unit in UNITS},
    )


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no table")
    return cast("dict[str, Any]", value)


def _same_names(entries: Mapping[str, object], names: Sequence[str], where: str) -> None:
    missing, more = [n for n in names if n not in entries], sorted(set(entries) - set(names))
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}")
    if more:
        raise ValueError(f"{where} has {', '.join(more)}, which nothing reads")


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
    entries = _object(value, "fits")
    _same_names(entries, FITTED, "fits")
    for key, one in entries.items():
        if not isinstance(one, str | int | float):
            raise ValueError(f"fits: {key} = {one!r:.40} is not the value of a setting")
    return entries


def _times(value: Any, unit: str) -> dict[str, float]:
    entries = _object(value, unit)
    _same_names(entries, PASSES, unit)
    found = {one: _number(seconds, f"{unit}.{one}") for one, seconds in entries.items()}
    if sum(found.values()) == 0 and unit == BLOCK:
        raise ValueError("a block takes no time at all")
    return found


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
    yield from _device_fits(view, found)
    here = {key: view.value(key) for key in FITTED}
    wrong = {key: value for key, value in found.fits.items() if not _same(value, here[key])}
    if not wrong:
        return
    parts = [
        f"{key} = {toml_text(value)} (here {toml_text(here[key])})" for key, value in wrong.items()
    ]
    settings = " with ".join(f"{key} = {toml_text(value)}" for key, value in wrong.items())
    yield UNIT_TIMES_FIT_RUN.problem(
        f"{entry.value} was measured with {', '.join(parts)}",
        key=TIMES_KEY,
        set_by=view.set_by(TIMES_KEY, *wrong),
        works=(settings, *INSTEAD),
    )


def _device_fits(view: View, found: TimesFile) -> Iterator[Problem]:
    """Yield that a CPU was measured for a cluster of GPUs, or a GPU for one of CPU ranks."""
    cluster = read_cluster(view)
    if isinstance(cluster, list) or (found.device == CPU) == (cluster.backend == "gloo"):
        return
    yield UNIT_TIMES_FIT_RUN.problem(
        f"{view.entry(TIMES_KEY).value} was measured on {_device(found.device)}, but the devices "
        f"of {cluster.name} are {cluster.device.name}",
        key=TIMES_KEY,
        set_by=view.set_by(TIMES_KEY, *CLUSTER_SOURCES),
        works=INSTEAD,
    )


def _device(name: str) -> str:
    return "CPU cores" if name == CPU else name


def _same(value: object, here: object) -> bool:
    return value == here and isinstance(value, bool) == isinstance(here, bool)


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
