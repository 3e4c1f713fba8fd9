# SPDX-License-Identifier: Apache-2.0
"""`ec.merge_calibrations`: several cluster files that were measured -> the one that they tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.config.cluster.file import HELD_OUT, CalibrationRecord, cluster_toml, read_calibration
from echelon.config.cluster.settings import read_cluster_file
from echelon.config.files.new_file import require_writable, write_new
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.cluster import (
    CALIBRATION_SAME_DEVICE,
    CALIBRATION_SAME_NODE,
    CALIBRATIONS_TO_MERGE,
)
from echelon.core.units import binary_bytes
from echelon.cost.fit.merge import median_cluster

MEMORY = "memory"
SAME_MEMORY = 0.02
"""How far apart the memory of two GPUs of one kind may be, relative: drivers keep some of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedCalibration:
    """Hold the cluster that several calibrations tell together, and each of theirs."""

    cluster: Cluster
    record: CalibrationRecord
    clusters: tuple[tuple[Path, Cluster], ...]
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calibrated:
    path: Path
    cluster: Cluster
    record: CalibrationRecord


def merge_calibrations(files: Sequence[str | Path], *, out: str | Path) -> MergedCalibration:
    """Join calibrations of one kind of device and node into a cluster file `out`: the medians.

    Links come from the files that have them, so one of a single device and one of nodes go
    together. Raises ConfigError, with all that is wrong, where a file was not measured, is there
    twice, or is of another device or node, and where `out` is there already.
    """
    problems: list[Problem] = []
    try:
        require_writable(Path(out), key="--out")
    except ConfigError as error:
        problems += error.problems
    read = [*_read([Path(file) for file in files], problems)]
    problems += [*_unlike_devices(read), *_unlike_nodes(read)]
    if problems:
        raise ConfigError(problems)
    cluster = median_cluster([one.cluster for one in read])
    record = _joined_record([one.record for one in read], cluster)
    about = (
        f"Medians of {record.merged} calibrations, by `echelon calibrate merge`. Errors are the",
        "largest of them, at sizes that were measured and not fitted.",
    )
    write_new(Path(out), cluster_toml(cluster, about, record), key="--out")
    return MergedCalibration(
        cluster=cluster,
        record=record,
        clusters=tuple((one.path, one.cluster) for one in read),
        out=Path(out),
    )


def _read(files: Sequence[Path], problems: list[Problem]) -> Iterator[_Calibrated]:
    """Yield the files that were measured; what is wrong with others joins `problems`."""
    if len(files) < 2:
        problems.append(
            CALIBRATIONS_TO_MERGE.problem(
                f"{len(files)} file{'' if len(files) == 1 else 's'} to merge; it takes two or more",
                set_by=" ".join(map(str, files)),
                suggestions=("echelon calibrate merge A.toml B.toml --out C.toml",),
            )
        )
    seen: set[Path] = set()
    for path in files:
        if path.resolve() in seen:
            problems.append(
                CALIBRATIONS_TO_MERGE.problem(
                    f"{path} is named twice, and would count twice",
                    set_by=str(path),
                    suggestions=("each file once",),
                )
            )
            continue
        seen.add(path.resolve())
        cluster = read_cluster_file(path, str(path))
        if isinstance(cluster, list):
            problems += cluster
        elif (record := read_calibration(path)) is None or not cluster.device.peak_flops:
            problems.append(
                CALIBRATIONS_TO_MERGE.problem(
                    f"{path} has no [calibration] table: nothing in it says that it was measured",
                    set_by=str(path),
                    suggestions=("a file that echelon calibrate wrote",),
                )
            )
        else:
            yield _Calibrated(path=path, cluster=cluster, record=record)


def _unlike_devices(read: Sequence[_Calibrated]) -> Iterator[Problem]:
    """Yield one problem for each file whose device is not that of the first."""
    for one in read[1:]:
        mine, first = _device_words(one.cluster), _device_words(read[0].cluster)
        differ = [name for name in first if name != MEMORY and mine[name] != first[name]]
        if not differ and _other_memory(one.cluster, read[0].cluster):
            differ = [MEMORY]
        if differ:
            here = ", ".join(f"{name} {mine[name]}" for name in differ)
            there = ", ".join(f"{name} {first[name]}" for name in differ)
            yield CALIBRATION_SAME_DEVICE.problem(
                f"{one.path} is of another device: {here}, and {read[0].path} has {there}",
                set_by=str(one.path),
                suggestions=("a file for each kind of device",),
            )


def _device_words(cluster: Cluster) -> dict[str, str]:
    device = cluster.device
    return {
        "device": device.name,
        "backend": cluster.backend,
        "dtypes": "+".join(dtype for dtype, _ in device.peak_flops),
        "multiprocessors": str(device.efficiency.units),
        MEMORY: binary_bytes(device.memory_bytes),
    }


def _other_memory(one: Cluster, other: Cluster) -> bool:
    """Return whether GPUs of one name have other memory; ranks on cores share what there is."""
    mine, first = one.device.memory_bytes, other.device.memory_bytes
    return one.backend == "nccl" and abs(mine - first) > SAME_MEMORY * max(mine, first)


def _unlike_nodes(read: Sequence[_Calibrated]) -> Iterator[Problem]:
    linked = [one for one in read if one.cluster.num_devices > 1]
    sizes = {one.cluster.devices_per_node for one in linked}
    if len(sizes) > 1:
        parts = (f"{one.path} has {one.cluster.devices_per_node}" for one in linked)
        largest = max(sizes)
        yield CALIBRATION_SAME_NODE.problem(
            f"links of nodes with other numbers of devices have nothing in common: "
            f"{', '.join(parts)}",
            set_by=" ".join(str(one.path) for one in linked),
            suggestions=(f"torchrun --nproc-per-node {largest} -m echelon calibrate",),
        )


def _joined_record(records: Sequence[CalibrationRecord], cluster: Cluster) -> CalibrationRecord:
    errors = [dict(record.held_out) for record in records]
    return CalibrationRecord(
        date=max(record.date for record in records),
        torch=_all_of(record.torch for record in records),
        echelon=_all_of(record.echelon for record in records),
        nodes=cluster.nodes,
        ranks_per_node=cluster.devices_per_node,
        merged=sum(record.merged for record in records),
        held_out=tuple(
            (name, max(one[name] for one in errors if name in one))
            for name in HELD_OUT
            if any(name in one for one in errors)
        ),
    )


def _all_of(words: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(words))
