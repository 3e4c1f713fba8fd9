# SPDX-License-Identifier: Apache-2.0
"""A cluster described in TOML -> Cluster, and back: a node, the links in it and beyond it.

A preset of clusters has the same form. A tier of links names one of the catalogue (`link =
"infiniband-ndr"`, `presets/links.toml`) or gives its own numbers, or both: its own win.

The [calibration] table says when and with what a file was measured, and how far off it is. It tells
whoever is given the file, and `echelon calibrate merge`, what it is. No formula reads it;
the band of a step is as wide as the error of steps that were measured and not fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

from echelon.config.cluster.devices import suspect_device_numbers
from echelon.config.cluster.links import (
    ALL,
    device_problems,
    efficiency_problems,
    link_degrees,
    link_preset_from_name,
    link_presets,
    tier_problems,
    unit_problems,
)
from echelon.config.entries import Entry, check_layer
from echelon.config.reading import read_toml
from echelon.config.view import View, record
from echelon.core.cluster import (
    NOT_MEASURED,
    PCIE_4_BYTES_PER_S,
    STEP_ERROR,
    TRAINER_CONSTANTS,
    Backend,
    Cluster,
    Device,
    Efficiency,
    Link,
)
from echelon.core.errors import Problem
from echelon.core.rulebook.config import MISSING_SETTING, UNKNOWN_PRESET, WRONG_TYPE
from echelon.core.rules import did_you_mean
from echelon.core.settings.value_types import (
    BYTES_PER_S,
    COUNT,
    DTYPES,
    FLOP_PER_S,
    FROM_ZERO,
    MEMORY_BYTES,
    POSITIVE,
    SECONDS,
    SECONDS_OR_ZERO,
    SIZE_OR_ZERO,
    Choice,
    Flag,
    Integer,
    Real,
    Setting,
    Text,
    ValueType,
    toml_text,
)
from echelon.cost.seconds.kernels import measured_tables

DEVICE_DTYPES = (*DTYPES, "fp8")
"""What a device has peaks of: dtypes that a run computes in, and one that only others' runs do."""

SHORT_FROM = 1e6  # bytes, bytes/s or FLOP/s: numbers from here on are written as 450e9
SHARE = Real(above=True, maximum=1.0)
NOT_SHARES: Mapping[str, ValueType] = {
    "half_depth": Real(),
    "half_reach": Real(),
    "tile": COUNT,
    "units": COUNT,
    "launch_s": SECONDS_OR_ZERO,
}
"""Fields of Efficiency that are sizes or seconds; all others are shares of a peak."""


def _settings(kinds: Mapping[str, tuple[ValueType, object]]) -> dict[str, Setting]:
    return {
        key: Setting(key=key, kind=kind, default=default, about="")
        for key, (kind, default) in kinds.items()
    }


_TYPICAL = Efficiency()
TABLE = "calibration"
HELD_OUT = ("products", "attention", "memory", "optimizer", "collectives", "network", "steps")
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

CLUSTER_SETTINGS = _settings(
    {
        "name": (Text(), None),
        "nodes": (COUNT, 1),
        "devices_per_node": (COUNT, None),
        "backend": (Choice(options=("gloo", "nccl")), "nccl"),
        "device.name": (Text(), None),
        "device.memory_bytes": (MEMORY_BYTES, None),
        "device.memory_bandwidth": (BYTES_PER_S, None),
        "device.host_bandwidth": (BYTES_PER_S, PCIE_4_BYTES_PER_S),
        "device.measured": (Choice(options=(NOT_MEASURED, *measured_tables())), NOT_MEASURED),
        "device.cores": (Real(), 0.0),
        "device.capability": (Real(), 0.0),
        "device.sure": (Flag(), False),
        **{f"device.peak_flops.{dtype}": (FLOP_PER_S, "unknown") for dtype in DEVICE_DTYPES},
        **{
            f"device.efficiency.{item.name}": (
                NOT_SHARES.get(item.name, SHARE),
                getattr(_TYPICAL, item.name),
            )
            for item in fields(Efficiency)
        },
        **{
            f"trainer.{name}": (SECONDS if name.endswith("_s") else POSITIVE, "unknown")
            for name in TRAINER_CONSTANTS
        },
        **CALIBRATION_SETTINGS,
    }
)
LINK_SETTINGS = _settings(
    {
        "link": (Text(), "none"),
        "name": (Text(), None),
        "degree": (Integer(words=(ALL,)), ALL),
        "bandwidth": (BYTES_PER_S, None),
        "latency_s": (SECONDS_OR_ZERO, None),
        "efficiency": (SHARE, 1.0),
        "half_bytes": (SIZE_OR_ZERO, 0.0),
        "interfaces": (FROM_ZERO, 0),
        "sure": (Flag(), False),
    }
)


def build_cluster(entries: Mapping[str, Entry], where: str) -> Cluster | list[Problem]:
    """Return the cluster that the entries of a file describe, or all that is wrong with them."""
    links = entries.get("links")
    plain = {key: entry for key, entry in entries.items() if key != "links"}
    view, problems = _checked(plain, CLUSTER_SETTINGS, "", where)
    tiers = _tables_in(links.value) if links else []
    if tiers is None:
        message = "links is not a list of tables; write [[links]] above each"
        problems.append(WRONG_TYPE.problem(message, key="links", set_by=where))
    views: list[View] = []
    for index, tier in enumerate(tiers or []):
        source = links.source if links else where
        own = {key: Entry(value=value, source=source) for key, value in tier.items()}
        inner, unknown = _with_catalogue(own, index, where)
        link_view, link_problems = _checked(inner, LINK_SETTINGS, f"links[{index}].", where)
        views.append(link_view)
        problems.extend(unknown or link_problems)
    if problems:
        return problems
    return _cluster(view, views, where)


def _with_catalogue(
    own: Mapping[str, Entry], index: int, where: str
) -> tuple[Mapping[str, Entry], list[Problem]]:
    """Return a tier's entries over those of the link that it names."""
    if "link" not in own or not isinstance(named := own["link"].value, str):
        return own, []
    link = link_presets().get(named)
    if link is None:
        close = did_you_mean(named, link_presets())
        hint = f'; did you mean "{close[0]}"?' if close else ""
        problem = UNKNOWN_PRESET.problem(
            f'links[{index}].link = "{named}" is not in the catalogue of links{hint}',
            key="links",
            set_by=where,
            suggestions=close or tuple(link_presets()),
        )
        return own, [problem]
    names, source = ("name", "bandwidth", "latency_s", "efficiency", "half_bytes"), f"link {named}"
    catalogue = {name: Entry(value=getattr(link, name), source=source) for name in names}
    return {**catalogue, **own}, []


def _tables_in(value: object) -> list[dict[str, object]] | None:
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    if not all(isinstance(item, dict) for item in items):
        return None
    return cast("list[dict[str, object]]", items)


def _checked(
    entries: Mapping[str, Entry], settings: Mapping[str, Setting], prefix: str, where: str
) -> tuple[View, list[Problem]]:
    fitting, problems = check_layer(entries, settings)
    wrong = frozenset(problem.key for problem in problems)
    view = View(entries=fitting, wrong=wrong, settings=settings)
    for key in settings:
        if key not in wrong and not view.has(key):
            problems.append(
                MISSING_SETTING.problem(
                    f"{prefix}{key} is not set and has no default",
                    key=key,
                    set_by=where,
                    suggestions=("a file as `echelon calibrate` writes it",),
                )
            )
    return view, problems


def _cluster(view: View, links: list[View], where: str) -> Cluster | list[Problem]:
    per_node, nodes = view.integer("devices_per_node"), view.integer("nodes")
    degrees = link_degrees(links, per_node * nodes)
    device, backend = _device(view), cast(Backend, view.word("backend"))
    problems = [*tier_problems(links, degrees, view, where)]
    problems += unit_problems(links, degrees, per_node, where, device.name)
    if not view.flag("device.sure"):
        problems += device_problems(device, backend, where)
    problems += efficiency_problems(device, _names_in(view, "device.efficiency"), where)
    if problems:
        return problems
    return Cluster(
        name=view.word("name"),
        device=device,
        devices_per_node=per_node,
        nodes=nodes,
        links=tuple(
            _link(link, degree, per_node)
            for link, degree in zip(links, degrees, strict=True)
            if degree is not None
        ),
        backend=backend,
        trainer=(*_known_numbers(view, "trainer", TRAINER_CONSTANTS), *_step_error(view)),
    )


def _names_in(view: View, table: str) -> frozenset[str]:
    """Return what a file gives of a table, defaults that it repeats included."""
    parts = (key.rpartition(".") for key in view.entries)
    return frozenset(name for found, _, name in parts if found == table)


def _link(view: View, degree: int, per_node: int) -> Link:
    interfaces = view.integer("interfaces")
    interfaces = 0 if interfaces == per_node else interfaces
    return record(view, Link, "", degree=degree, interfaces=interfaces)


def _device(view: View) -> Device:
    return record(
        view,
        Device,
        "device",
        peak_flops=_known_numbers(view, "device.peak_flops", DEVICE_DTYPES),
        efficiency=record(view, Efficiency, "device.efficiency"),
    )


def _known_numbers(view: View, table: str, names: Iterable[str]) -> tuple[tuple[str, float], ...]:
    keys = [(name, f"{table}.{name}") for name in names]
    return tuple((name, view.number(key)) for name, key in keys if not view.is_default(key))


def _step_error(view: View) -> Iterator[tuple[str, float]]:
    if not view.is_default(HELD_OUT_STEPS):
        yield STEP_ERROR, view.number(HELD_OUT_STEPS)


def cluster_toml(
    cluster: Cluster, about: Sequence[str] = (), calibrated: CalibrationRecord | None = None
) -> str:
    """Return the file of a cluster under a comment: devices, then tiers of links, fastest first.

    What `calibrated` it is told after the devices.
    """
    lines = (*(f"# {line}".rstrip() for line in about), *_lines(cluster, calibrated))
    return "\n".join(lines) + "\n"


def _lines(cluster: Cluster, calibrated: CalibrationRecord | None) -> Iterator[str]:
    pairs = {"device.peak_flops": dict(cluster.device.peak_flops), "trainer": dict(cluster.trainer)}
    tables: dict[str, list[str]] = {}
    for key, setting in CLUSTER_SETTINGS.items():
        table, _, name = key.rpartition(".")
        if key in CALIBRATION_SETTINGS:
            continue  # It is none of the cluster's.
        value = pairs[table].get(name) if table in pairs else _value(cluster, key)
        # An efficiency is written whatever it is: a default may change, what was measured not.
        if value is not None and (value != setting.default or table == "device.efficiency"):
            tables.setdefault(table, []).append(f"{name} = {_text(value)}")
    if next(suspect_device_numbers(cluster.device, cluster.backend), None) is not None:
        tables["device"].append("sure = true")
    for table, lines in tables.items():
        yield from (["", f"[{table}]"] if table else [])
        yield from lines
    if calibrated is not None:
        yield from ("", *calibration_lines(calibrated))
    elif STEP_ERROR in (known := dict(cluster.trainer)):
        table, _, name = HELD_OUT_STEPS.rpartition(".")
        yield from ("", f"[{table}]", f"{name} = {_text(known[STEP_ERROR])}")
    for link in cluster.links:
        yield from ("", "[[links]]")
        written = {item.name: getattr(link, item.name) for item in fields(Link)}
        if link.degree == cluster.num_devices:
            written["degree"] = ALL  # So that more nodes need no other number here.
        yield from (f"{name} = {_text(value)}" for name, value in written.items())
        # What was measured is meant, though the catalogue has other numbers of this name.
        known = link_preset_from_name(link.name)
        if known is None or link.bandwidth > known.bandwidth or link.latency_s != known.latency_s:
            yield "sure = true"


def _value(cluster: Cluster, key: str) -> object:
    value: object = cluster
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _text(value: object) -> str:
    """Return a value as TOML: read back, a number is the same one, and 450e9 is 450 GB/s."""
    if isinstance(value, float) and value >= SHORT_FROM:
        short = (f"{value / 10**power:.0f}e{power}" for power in (12, 9, 6))
        exact = [text for text in short if float(text) == value]
        if exact:
            return exact[0]
    return repr(float(value)) if isinstance(value, float) else toml_text(value)


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
